"""The facts of a cluster, and how it preempts, read from what real ones printed: 22.05 with accounting, 24.11, 25.05."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.slurm.facts import (
    ClusterFacts,
    Preemption,
    preemption_of,
)
from slurmtrain.slurm.read_facts import (
    QOS_COLUMNS,
    first_name,
    parse_config,
    parse_gres,
    parse_groups,
    parse_minutes,
    parse_partitions,
    parse_qos,
    read_facts,
)
from tests.support.recorded_slurm import answers_of, facts_of

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


@pytest.mark.parametrize("missing", list(answers_of("alpha_22_05")))
def test_a_command_that_gives_no_answer_costs_only_its_own_facts(missing: str) -> None:
    answers = answers_of("alpha_22_05")
    facts = read_facts(lambda command: None if " ".join(command) == missing else answers[" ".join(command)], user="me")
    if missing != "scontrol show config":
        assert facts.name == "alpha"


def test_submit_asks_seven_commands_at_most_and_probe_nine() -> None:
    answers = answers_of("alpha_22_05")
    asked: list[str] = []

    def ask(command: Sequence[str]) -> str | None:
        asked.append(" ".join(command))
        return answers[asked[-1]]

    read_facts(ask, whole=False, user="me")
    assert len(asked) == 7
    asked.clear()
    read_facts(ask, user="me")
    assert len(asked) == 9


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


@given(st.text(alphabet="PartionName=12,|:()[]-. \nabcALLgpu/", max_size=200))
def test_odd_output_never_breaks_a_parser(text: str) -> None:
    parsed = [parse(text) for parse in (parse_config, parse_partitions, parse_groups, parse_qos)]
    assert all(found is None or isinstance(found, dict | tuple) for found in parsed)


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


def test_where_nobody_is_preempted_or_jobs_are_suspended_only_the_time_to_kill_counts() -> None:
    for config, mode in ((CONFIG.replace("partition_prio", "none"), "REQUEUE"), (CONFIG, "SUSPEND,GANG")):
        facts = read({"config": config, "partition": PARTITIONS.replace("PreemptMode=REQUEUE", f"PreemptMode={mode}")})
        assert preemption_of(facts, "low").to_leave_s == 30


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
