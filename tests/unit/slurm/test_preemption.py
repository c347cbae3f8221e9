"""How a job is preempted, and how long it lives on then, by what SLURM's commands print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from slurmtrain.slurm.facts import ClusterFacts, Partition
from slurmtrain.slurm.parse_facts import QOS_COLUMNS
from slurmtrain.slurm.preemption import Preemption, PreemptionTimes, preemption_of, preemption_times
from slurmtrain.slurm.read_facts import read_preemption
from tests.support.recorded_slurm import answers_of

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


def read(answers: dict[str, str], asked: list[str] | None = None) -> ClusterFacts:
    """The facts of a cluster whose commands answer by a word in them; others give no answer."""

    def ask(command: Sequence[str]) -> str | None:
        if asked is not None:
            asked.append(" ".join(command))
        return next((text for word, text in answers.items() if word in command), None)

    return read_preemption(ask, user="me")


def test_how_long_a_preempted_job_lives_takes_two_short_questions() -> None:
    asked: list[str] = []
    facts = read({"config": CONFIG, "partition": PARTITIONS}, asked)
    assert asked == ["scontrol show config", "scontrol --all --oneliner show partition"]
    for low in (None, "low", "low,high"):
        assert preemption_times(facts, low) == PreemptionTimes(30, 120, "partition low")
    assert preemption_times(facts, "high") == preemption_times(facts, "high,low") == PreemptionTimes(30)
    assert preemption_times(facts, "nope") == PreemptionTimes(30)
    asked.clear()
    assert preemption_times(read({}, asked), None) is None
    assert asked == ["scontrol show config"]  # a controller that does not answer is not asked on


def test_where_nobody_is_preempted_or_jobs_are_suspended_only_the_time_to_kill_counts() -> None:
    for config, mode in ((CONFIG.replace("partition_prio", "none"), "REQUEUE"), (CONFIG, "SUSPEND,GANG")):
        facts = read({"config": config, "partition": PARTITIONS.replace("PreemptMode=REQUEUE", f"PreemptMode={mode}")})
        assert preemption_times(facts, "low") == PreemptionTimes(30)


def test_the_grace_of_a_qos_is_asked_for_where_qos_preempt_each_other() -> None:
    accounts = "AccountingStorageType = accounting_storage/slurmdbd\n"
    config = CONFIG.replace("partition_prio", "qos") + accounts
    silent = read({"config": config, "partition": PARTITIONS})
    assert preemption_times(silent, "low", qos="cheap") == PreemptionTimes(30, None, "QOS cheap")
    assert preemption_times(silent, "low") == PreemptionTimes(30)
    row = "|".join(["cheap", "", "00:01:00", "", "cluster", *[""] * (len(QOS_COLUMNS) - 5)])
    known = read({"config": config, "partition": PARTITIONS, "qos": f"{row}\n"})
    assert preemption_times(known, "low", qos="cheap") == PreemptionTimes(30, 60, "QOS cheap")
    assert preemption_times(known, "low") == PreemptionTimes(30)


def test_a_jobs_default_qos_is_that_of_its_account() -> None:
    answers = answers_of("alpha_22_05")
    shown = {command: text.replace("partition_prio", "qos") for command, text in answers.items()}
    facts = read_preemption(lambda command: shown.get(" ".join(command)), user="me")
    assert facts.config["PreemptType"] == "preempt/qos" and facts.associations is not None
    high = [replace(each, default_qos="high") if each.account == "physics" else each for each in facts.associations]
    facts = replace(facts, associations=tuple(high))
    assert preemption_times(facts, "gpu", account="physics") == PreemptionTimes(30, 30, "QOS high")
    assert preemption_times(facts, "gpu", account="biology") == PreemptionTimes(30, 0, "QOS normal")


@pytest.mark.parametrize(("own", "found"), [("", "REQUEUE"), ("CANCEL", "CANCEL"), ("OFF", "OFF")])
def test_a_partition_without_a_mode_of_its_own_has_the_clusters(own: str, found: str) -> None:
    facts = ClusterFacts(config={"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"})
    its = preemption_of(facts, Partition("low", preempt_mode=own, grace_s=5.0))
    assert its == Preemption(found, 5.0, "partition low")
    assert its.ends_jobs == (found != "OFF")
