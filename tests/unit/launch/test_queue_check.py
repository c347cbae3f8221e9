"""What submit says before it queues a job that would never start.

The clusters answer as recorded ones did.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.launch.queue_check import check_request, hint_of_facts
from slurmtrain.slurm.client import SlurmClient
from tests.support.fake_slurm import FakeSlurm
from tests.support.recorded_slurm import CLUSTERS, answers_of, facts_of

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
    "too long": (
        {"time_limit_min": "2881"},
        {},
        "cluster.time_limit_min=2881.*hint: .*cluster.time_limit_min=2880",
    ),
    "none of several": ({"partition": "'debug,gpu'", "time_limit_min": "2881"}, {}, "cluster.time_limit_min=2881"),
    "too many nodes for the partition": ({**SMALL, "nodes": "2"}, {}, "MaxNodes"),
    "too few nodes for the partition": ({**ON_CPUS, "nodes": "1"}, {}, "MinNodes"),
    # sbatch takes it, and it waits: MaxMemPerLimit.
    "more memory than the partition gives": (
        {**SMALL, "mem_per_node_gb": "0"},
        {},
        "all memory of a node, 128000 MB, and partition debug gives it 64000.*hint: set at most cluster.mem_per_node_gb=62",
    ),
}
ACCEPTED: dict[str, tuple[dict[str, str], dict[str, str], str | None]] = {
    "suits": ({}, {}, None),
    "suits exactly": ({"time_limit_min": "2880", "nodes": "4"}, {}, None),
    "one of several partitions": ({"partition": "'debug,gpu'", "time_limit_min": "2880"}, {}, None),
    "small": (SMALL, {}, None),
    "down": ({}, of_gpu("State=UP State=DOWN"), "State=DOWN"),
    "a plugin may change it": (
        {"time_limit_min": "2881"},
        {"(JobSubmitPlugins +=) .*": r"\1 lua"},
        "time_limit_min=2881",
    ),
    "partition of a reservation": ({"reservation": "course", "nodes": "99"}, {"Default=YES": "Default=NO"}, None),
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
    assert not any(fatal for _, fatal in check_request(facts_of(name), ClusterConfig(time_limit_min=5)))


def test_what_the_shell_says_counts_where_the_config_says_nothing(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "debug")
    assert submitted(slurm, {}, {}) == 78
    assert "partition debug" in capsys.readouterr().err
    assert submitted(slurm, {"partition": "gpu"}, {}) == 0


def test_what_slurm_refuses_is_said_in_its_words_with_what_the_cluster_has(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "Requested node configuration is not available"
    slurm.fail("sbatch --test-only", f"allocation failure: {words}")
    slurm.answer("sinfo --noheader --all --format=%a %T", "up mixed\n")
    assert submitted(slurm, {}, {}) == 1
    error = capsys.readouterr().err
    assert f"sbatch refused the job: {words}\n" in error and "hint: the nodes of partition gpu are: " in error, error
    assert slurm.jobs == [] and not (project / "runs").exists()


@pytest.mark.parametrize(
    ("fields", "said", "hint"),
    [
        ({"partition": "gpu"}, "More processors requested than permitted", "nodes of partition gpu are: .*gpu:a100:4"),
        ({"account": "me"}, "Invalid account or account/partition combination", "your accounts are: .*biology"),
        ({"qos": "hihg"}, "Invalid qos specification", "did you mean high"),
        ({}, "Invalid feature specification", None),
    ],
)
def test_the_facts_of_the_cluster_say_what_to_write_instead(
    fields: dict[str, Any], said: str, hint: str | None
) -> None:
    found = hint_of_facts(said, facts_of("alpha_22_05"), ClusterConfig(**fields))
    assert found is None if hint is None else re.search(hint, found or ""), found


def test_a_job_above_a_limit_of_accounting_is_queued_with_a_warning(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    slurm.fail("sbatch --test-only", f"sbatch: error: QOSMaxGRESPerJob\nallocation failure: {words}")
    assert submitted(slurm, {}, {}) == 0
    assert "SLURM would queue this job, but not start it now: QOSMaxGRESPerJob" in capsys.readouterr().err
    assert len(slurm.jobs) == 1


def test_a_time_limit_above_that_of_an_account_or_a_qos_is_refused() -> None:
    facts = facts_of("alpha_22_05")
    ((error, fatal),) = check_request(facts, ClusterConfig(time_limit_min=1441))
    assert fatal and "account biology allows, 1440" in str(error) and "time_limit_min=1440" in str(error)
    assert check_request(facts, ClusterConfig(time_limit_min=1440)) == []
