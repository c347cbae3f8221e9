"""The facts of a cluster, and how it preempts, read from what real ones printed: 22.05 with accounting, 24.11, 25.05."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurmtrain.slurm.facts import (
    ClusterFacts,
    Preemption,
    preemption_of,
)
from slurmtrain.slurm.read_facts import (
    QOS_COLUMNS,
    first_name,
    parse_gres,
    parse_minutes,
    read_facts,
)
from tests.support.recorded_slurm import facts_of

ALPHAS = ("alpha_22_05", "alpha_24_11", "alpha_25_05")


@pytest.mark.parametrize("name", ALPHAS)
def test_a_job_can_have_of_a_node_what_is_not_kept_for_the_system(name: str) -> None:
    """Which are two cores of two threads, and 8,000 MB."""
    racks = max(facts_of(name).nodes_of("gpu"), key=lambda group: group.count)
    assert (racks.cpus, racks.threads, racks.memory_mb) == (60, 2, 507000)


def test_a_controller_that_does_not_answer_leaves_everything_unknown() -> None:
    asked: list[Sequence[str]] = []

    def ask(command: Sequence[str]) -> None:
        asked.append(command)

    facts = read_facts(ask)
    assert facts == ClusterFacts() and len(asked) == 3


GRES = {
    "gpu:a100:4(S:0-1)": (("a100", 4),),
    "gpu:4(S:0,2)": (("", 4),),
    "gpu:nvidia_h100_80gb_hbm3:8(S:0-1),nic:mlx:4": (("nvidia_h100_80gb_hbm3", 8),),
    "gpu:a100:4,gpu:a100_1g.5gb:7,shard:8": (("a100", 4), ("a100_1g.5gb", 7)),
    "gpu": (("", 1),),
    "gpu:a100": (("a100", 1),),
    "gpu:no_consume:4": (("", 4),),
    "gpu:a100:no_consume:2K": (("a100", 2048),),
    **dict.fromkeys(("gpu:0", "(null)", "craynetwork:4", "gpu:a100:many"), ()),
}


def test_gpus_names_of_nodes_and_limits_of_time_are_read_from_slurms_words() -> None:
    assert {text: parse_gres(text) for text in GRES} == GRES
    first = {"n0": "n0", "n[07-12,15]": "n07", "rack[1-2]-n[01-04],x": "rack1-n01", "0c[1-3]": "0c1", "broken[1-": ""}
    first |= {"gpu-a.b,gpu-c": "gpu-a.b", "": ""}
    assert {names: first_name(names) for names in first} == first
    minutes = {"2-00:00:00": 2880, "00:05:00": 5, **dict.fromkeys(("UNLIMITED", "NONE", "", "soon"))}
    assert {text: parse_minutes(text) for text in minutes} == minutes


CONFIG = (
    "ClusterName = alpha\nSLURM_VERSION = 22.05.8\nKillWait                = 30 sec\nPreemptMode             = REQUEUE\n"
    "PreemptType             = preempt/partition_prio\n"
)
PARTITIONS = (
    "PartitionName=low AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=120 Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[0-3] PriorityJobFactor=1 PriorityTier=1 "
    "RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=16 \n"
    "PartitionName=high AllowGroups=ALL Default=NO GraceTime=0 PriorityTier=10 PreemptMode=OFF State=UP\n"
)


def read(answers: dict[str, str]) -> ClusterFacts:
    """The facts of a cluster whose commands answer by a word in them; others give no answer."""

    def ask(command: Sequence[str]) -> str | None:
        return next((text for word, text in answers.items() if word in command), None)

    return read_facts(ask, whole=False, user="me")


def test_how_long_a_preempted_job_lives_is_known_by_its_partition() -> None:
    facts = read({"config": CONFIG, "partition": PARTITIONS})
    for low in (None, "low", "low,high"):
        assert preemption_of(facts, low) == Preemption("REQUEUE", "partition low", 120, 30)
        assert preemption_of(facts, low).to_leave_s == 150
    assert preemption_of(facts, "high") == preemption_of(facts, "high,low")
    assert preemption_of(facts, "high").to_leave_s == preemption_of(facts, "nope").to_leave_s == 30
    assert preemption_of(read({}), None).to_leave_s is None


def test_the_grace_of_a_qos_is_asked_for_where_qos_preempt_each_other() -> None:
    accounts = "AccountingStorageType = accounting_storage/slurmdbd\nPreemptMode = REQUEUE\n"
    config = CONFIG.replace("partition_prio", "qos") + accounts
    silent = read({"config": config, "partition": PARTITIONS})
    assert preemption_of(silent, "low", qos="cheap") == Preemption("REQUEUE", "QOS cheap", None, 30)
    assert preemption_of(silent, "low").to_leave_s == 30
    row = "|".join(["cheap", "", "00:01:00", "", "cluster", *[""] * (len(QOS_COLUMNS) - 5)])
    known = read({"config": config, "partition": PARTITIONS, "qos": f"{row}\n"})
    assert preemption_of(known, "low", qos="cheap") == Preemption("REQUEUE", "QOS cheap", 60, 30)
    assert preemption_of(known, "low").to_leave_s == 30
