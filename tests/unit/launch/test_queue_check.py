"""What submit says before it queues a job that a cluster would refuse, or would let wait for ever without a word.

The clusters answer as recorded ones did.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.launch.queue_check.request import check_request
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.facts import Limits
from slurmtrain.slurm.topology import order_of_ranks
from tests.support.fake_slurm import FakeSlurm
from tests.support.recorded_slurm import CLUSTERS, answers_of, facts_of

PARTITIONS = "scontrol --all --oneliner show partition"
CONFIG = "scontrol show config"
# What a node of the default partition has: 64 CPUs, 4 GPUs.
JOB = {
    "tasks_per_node": "4",
    "cpus_per_task": "15",
    "gpus_per_node": "4",
    "gpu_type": "a100",
    "mem_per_node_gb": "0",
    "exclusive": "false",
    "time_limit_min": "60",
    "signal_lead_s": "60",
}
ON_CPUS = {"partition": "cpu", "gpus_per_node": "0", "gpu_type": "null", "gpu_memory_gb": "null", "cpus_per_task": "4"}
SMALL = {
    "partition": "debug",
    "gpu_type": "null",
    "gpu_memory_gb": "null",
    "time_limit_min": "5",
    "cpus_per_task": "4",
    "tasks_per_node": "4",
    "mem_per_node_gb": "62",
}


def of_gpu(what: str) -> dict[str, str]:
    """A change of the partition gpu: "State=UP State=DRAIN"."""
    before, _, after = what.partition(" ")
    return {f"(PartitionName=gpu .*?){before}": rf"\g<1>{after}"}


REFUSED: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "no such partition": ({"partition": "gpus"}, {}, "cluster.partition=gpus.*hint: .*gpu"),
    "no default partition": ({}, {"Default=YES": "Default=NO"}, "no default partition"),
    "none of several": ({"partition": "'mig,cpu'"}, {}, "cluster.gpus_per_node"),
    "inactive": ({"partition": "closed"}, {}, "starts no jobs at present .State=INACTIVE"),
    "drained": ({}, of_gpu("State=UP State=DRAIN"), "State=DRAIN"),
    "its alternate has no such GPUs": (
        {},
        of_gpu("State=UP State=INACTIVE")
        | {"(PartitionName=gpu .*?)Alternate=[^ ]*": ""}
        | of_gpu("LLN=NO Alternate=mig"),
        "cluster.gpus_per_node",
    ),
    "its alternate is itself": (
        {},
        of_gpu("State=UP State=INACTIVE") | of_gpu("LLN=NO Alternate=gpu"),
        "partition gpu starts no jobs",
    ),
    "too long": (
        {"time_limit_min": "2881"},
        {},
        "cluster.time_limit_min=2881.*hint: .*cluster.time_limit_min=2880",
    ),
    "too many nodes for the partition": ({**SMALL, "nodes": "2"}, {}, "MaxNodes"),
    "too few nodes for the partition": ({**ON_CPUS, "nodes": "1"}, {}, "MinNodes"),
    "too many nodes for the cluster": (
        {"nodes": "4", "spare_nodes": "1"},
        {},
        "only 4 nodes of partition gpu have a100:4 on a node",
    ),
    "other GPUs": ({"gpu_type": "h100"}, {}, "no node of partition gpu has h100:4"),
    "more GPUs": ({"gpus_per_node": "5", "tasks_per_node": "5", "cpus_per_task": "1"}, {}, "a100:5"),
    "more CPUs": ({"cpus_per_task": "17"}, {}, "68 CPUs on a node"),
    "more memory": ({"mem_per_node_gb": "512"}, {}, "512 GB of memory"),
    "more memory for each GPU": ({"mem_per_node_gb": "null", "mem_per_gpu_gb": "200"}, {}, "800 GB of memory"),
    "another feature": ({"constraint": "h100"}, {}, "the feature 'h100'"),
    # v100 are in nodes of 257,000 MB, the others have a100.
    "not together": (
        {"gpu_type": "v100", "cpus_per_task": "1", "mem_per_node_gb": "400"},
        {},
        "v100:4.*400 GB.*hint: .*2 x 40 CPUs, 250 GB, gpu:v100:8",
    ),
    "more CPUs than the partition gives": ({**SMALL, "cpus_per_task": "5"}, {}, "20 CPUs"),
    # sbatch takes it, and it waits: MaxMemPerLimit.
    "more memory than the partition gives": (
        {**SMALL, "mem_per_node_gb": "0"},
        {},
        "all memory of a node, 128000 MB, and partition debug gives it 64000.*hint: set at most cluster.mem_per_node_gb=62",
    ),
    "needs a reservation": ({}, of_gpu("ReqResv=NO ReqResv=YES"), "reservation"),
    "segments of a new SLURM": ({"nodes": "1", "segment": "1"}, {"24.11.7": "22.05.8"}, "SLURM 22.05 has no segments"),
}
ACCEPTED: dict[str, tuple[dict[str, str], dict[str, str], str | None]] = {
    "suits": ({}, {}, None),
    "suits on CPUs": ({**ON_CPUS, "nodes": "2"}, {}, None),
    "suits exactly": ({"time_limit_min": "2880", "nodes": "4"}, {}, None),
    "type in other letters": ({"gpu_type": "A100", "nodes": "2-4"}, {}, None),
    "one of several partitions": ({"partition": "'mig,gpu'"}, {}, None),
    "small": (SMALL, {}, None),
    "down": ({}, of_gpu("State=UP State=DOWN"), "State=DOWN"),
    "an alternate takes it": (
        {},
        of_gpu("State=UP State=DRAIN") | of_gpu("LLN=NO Alternate=urgent"),
        "SLURM puts them into urgent .Alternate.",
    ),
    "may still join": ({"nodes": "50"}, {"(SlurmctldParameters +=) .*": r"\1 cloud_dns"}, "the job needs 50"),
    "powered down": ({"nodes": "50"}, {"(SuspendProgram +=) .*": r"\1 /usr/sbin/off"}, "the job needs 50"),
    "a plugin may change it": ({"gpu_type": "h100"}, {"(JobSubmitPlugins +=) .*": r"\1 lua"}, "h100:4"),
    "partition of a reservation": ({"reservation": "course", "nodes": "99"}, {"Default=YES": "Default=NO"}, None),
    "shared CPUs": ({"cpus_per_task": "20", "+sbatch.overcommit": "true"}, {}, None),
    "switches of a flat network": (
        {"switches": "1"},
        {"(TopologyPlugin +=) .*": r"\1 topology/flat"},
        "switches=1 does nothing here",
    ),
    "segments of a tree": (
        {"segment": "1"},
        {"(TopologyPlugin +=) .*": r"\1 topology/tree"},
        "is for topology/block, and this cluster has topology/tree",
    ),
    "segments of blocks": ({"segment": "1"}, {"(TopologyPlugin +=) .*": r"\1 topology/block"}, None),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much to do answers late, and what is not known refuses no job."""
    monkeypatch.setitem(SlurmClient.glance.__kwdefaults__ or {}, "within_s", 60)


def submitted(slurm: FakeSlurm, fields: dict[str, str], changes: dict[str, str]) -> int:
    for command, answer in answers_of("alpha_24_11").items():
        for before, after in changes.items():
            answer = re.sub(before, after, answer)
        slurm.answer(command, answer)
    words = [f"{'+' * ('+' in name)}cluster.{name.lstrip('+')}={value}" for name, value in {**JOB, **fields}.items()]
    return main(["+cluster=a100x4", *words, "train.global_batch_size=39600", "train.micro_batch_size=1", "submit"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_never_start_is_refused_with_what_would(
    name: str, project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, changes, said = REFUSED[name]
    assert submitted(slurm, fields, changes) == 78
    error = capsys.readouterr().err
    assert re.search(said, error, re.DOTALL) and "hint: " in error, error
    assert slurm.jobs == [] and not (project / "runs").exists()


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_may_start_is_submitted_with_a_warning_where_it_may_wait(
    name: str, project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, changes, warning = ACCEPTED[name]
    assert submitted(slurm, fields, changes) == 0, capsys.readouterr().err
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == (warning is not None), warnings
    assert warning is None or re.search(warning, warnings[0])
    assert len(slurm.jobs) == 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_every_cluster_has_a_small_job_may_have(name: str) -> None:
    assert [each for each in check_request(facts_of(name), ClusterConfig(time_limit_min=5)) if each.fatal] == []


def test_what_the_shell_says_counts_where_the_config_says_nothing(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "closed")
    assert submitted(slurm, {}, {}) == 78
    assert "State=INACTIVE" in capsys.readouterr().err
    assert submitted(slurm, {"partition": "gpu"}, {}) == 0
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    for value, code in (("", 0), ("1", 0), ("no", 78)):
        monkeypatch.setenv("SBATCH_OVERCOMMIT", value)
        assert submitted(slurm, {"cpus_per_task": "20"}, {}) == code


# Limits of accounts and QOS: SLURM takes a job above them, which then waits for ever.

ALPHA = facts_of("alpha_22_05")
ROOM: dict[str, Any] = {"tasks_per_node": 4, "cpus_per_task": 15, "gpus_per_node": 4, "gpu_type": "a100"}


@pytest.mark.parametrize(
    ("fields", "limits", "words", "hint"),
    [
        ({"account": "chemistry"}, {}, "cluster.account=chemistry", "physics"),
        ({"qos": "hihg"}, {}, "no such QOS", "high"),
        ({"qos": "secret"}, {}, "may not use it", ""),
        (
            {"account": "physics", "qos": "high", "nodes": 3, "time_limit_min": 240},
            {},
            "QOS high gives a job 8",
            "nodes=2",
        ),
        (
            {"account": "physics", "nodes": 4},
            {},
            "account physics (all of its jobs together) gives a job 12",
            "nodes=3",
        ),
        ({"time_limit_min": 1441}, {}, "account biology gives a job, 1440", "time_limit_min=1440"),
        (
            {"account": "physics", "mem_per_node_gb": 100},
            {"tres": {"mem": 65536}},
            "102400 MB of memory, and QOS normal gives a job 65536",
            "mem_per_node_gb=64",
        ),
        (
            {"account": "physics", "nodes": 2, "time_limit_min": 61},
            {"tres_min": {"gres/gpu": 480}},
            "8 GPUs for 61 min, and QOS normal gives a job 480 of them x minutes",
            "time_limit_min=60",
        ),
        (
            {"account": "physics"},
            {"counts": {"submitted jobs of a user": 0}},
            "QOS normal lets no job through: it allows 0 submitted jobs of a user",
            "",
        ),
    ],
)
def test_a_limit_of_an_account_or_a_qos_that_no_such_job_passes_is_said(
    fields: dict[str, Any], limits: dict[str, Any], words: str, hint: str
) -> None:
    own = Limits(**limits)
    qos = tuple(replace(each, limits=own) if limits and each.name == "normal" else each for each in ALPHA.qos or ())
    facts = replace(ALPHA, qos=qos)
    (found,) = check_request(facts, ClusterConfig(**{**ROOM, "mem_per_node_gb": 0, **fields}), user_id=1000)
    assert found.fatal and words in found.message and hint in found.hint
    kept_on_record = replace(facts, config={**facts.config, "AccountingStorageEnforce": "none"})
    assert check_request(kept_on_record, ClusterConfig(**{**ROOM, "mem_per_node_gb": 0, **fields}), user_id=1000) == []


@pytest.mark.parametrize(
    ("kind", "parameter", "words"),
    [
        ("topology/tree", "SwitchAsNodeRank", "switch by switch (TopologyParam=SwitchAsNodeRank)"),
        (
            "topology/tree",
            "(null)",
            "need not follow the switches of topology/tree: with TopologyParam=SwitchAsNodeRank",
        ),
        ("topology/block", "RoutePart,BlockAsNodeRank", "block by block"),
        ("topology/block", "", "need not follow the blocks of topology/block"),
        ("topology/default", "", "SLURM knows no topology"),
        ("topology/3d_torus", "", "SLURM's order of nodes (topology/3d_torus)"),
    ],
)
def test_the_order_of_ranks_is_that_of_slurms_nodes_and_said(kind: str, parameter: str, words: str) -> None:
    assert words in str(order_of_ranks({"TopologyPlugin": kind, "TopologyParam": parameter}))
    assert order_of_ranks({}) is None
