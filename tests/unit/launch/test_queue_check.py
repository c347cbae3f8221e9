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
from tests.support.recorded_slurm import answers_of, facts_of

# What a node of the default partition has: 64 CPUs, 4 GPUs.
JOB = "tasks_per_node=4 cpus_per_task=15 gpus_per_node=4 gpu_type=a100 mem_per_node_gb=0 exclusive=false time_limit_min=60 "
JOB += "signal_lead_s=60 "
ON_CPUS = "partition=cpu gpus_per_node=0 gpu_type=null gpu_memory_gb=null cpus_per_task=4 "
SMALL = "partition=debug gpu_type=null gpu_memory_gb=null time_limit_min=5 cpus_per_task=4 tasks_per_node=4 "
DOWN = {"(PartitionName=gpu .*?)State=UP": r"\g<1>State=DOWN"}
# What a job asks for instead -> what is said.
REFUSED = {
    "partition=gpus": "cluster.partition=gpus.*hint: .*gpu",
    "time_limit_min=2881": "cluster.time_limit_min=2881.*hint: .*cluster.time_limit_min=2880",
    f"{SMALL}mem_per_node_gb=62 nodes=2": "MaxNodes",
    f"{ON_CPUS}nodes=1": "MinNodes",
    # sbatch takes it, and it waits: MaxMemPerLimit.
    SMALL: "memory of a node, 128000 MB, and partition debug gives it 64000.*hint: set at most cluster.mem_per_node_gb=62",
}
# The same, with what SLURM answers differently; "" where nothing is said.
ACCEPTED: dict[str, tuple[dict[str, str], str]] = {
    "nodes=1": ({}, ""),
    "partition='debug,gpu' time_limit_min=2880": ({}, ""),
    "nodes=2": (DOWN, "State=DOWN"),
    "time_limit_min=2881": ({"(JobSubmitPlugins +=) .*": r"\1 lua"}, "time_limit_min=2881"),
    "reservation=course nodes=99": ({"Default=YES": "Default=NO"}, ""),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much to do answers late, and what is not known refuses no job."""
    monkeypatch.setitem(SlurmClient.glance.__kwdefaults__ or {}, "within_s", 60)


def submitted(slurm: FakeSlurm, fields: str = "", changes: dict[str, str] | None = None) -> int:
    for command, answer in answers_of("alpha_24_11").items():
        for before, after in (changes or {}).items():
            answer = re.sub(before, after, answer)
        slurm.answer(command, answer)
    words = [f"cluster.{word}" for word in f"{JOB}{fields}".split()]
    return main(["+cluster=a100x4", *words, "train.global_batch_size=39600", "train.micro_batch_size=1", "submit"])


@pytest.mark.parametrize("fields", REFUSED)
def test_what_would_never_start_is_refused_with_what_would(
    fields: str, project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submitted(slurm, fields) == 78
    error = capsys.readouterr().err
    assert re.search(REFUSED[fields], error, re.DOTALL) and "hint: " in error, error
    assert slurm.jobs == [] and not (project / "runs").exists()


@pytest.mark.parametrize("fields", ACCEPTED)
def test_what_may_start_is_submitted_with_a_warning_where_it_may_wait(
    fields: str, project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, warning = ACCEPTED[fields]
    assert submitted(slurm, fields, changes) == 0, capsys.readouterr().err
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == bool(warning) and all(re.search(warning, line) for line in warnings), warnings
    assert len(slurm.jobs) == 1


def test_what_the_shell_says_counts_where_the_config_says_nothing(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "debug")
    assert submitted(slurm) == 78
    assert "partition debug" in capsys.readouterr().err
    assert submitted(slurm, "partition=gpu") == 0


def test_what_slurm_refuses_is_said_in_its_words_with_what_the_cluster_has(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "Requested node configuration is not available"
    slurm.fail("sbatch --test-only", f"allocation failure: {words}")
    slurm.answer("sinfo --noheader --all --format=%a %T", "up mixed\n")
    assert submitted(slurm) == 1
    error = capsys.readouterr().err
    assert f"sbatch refused the job: {words}\n" in error and "hint: the nodes of partition gpu are: " in error, error
    assert slurm.jobs == [] and not (project / "runs").exists()


@pytest.mark.parametrize(
    ("fields", "said", "hint"),
    [
        ({"account": "me"}, "Invalid account or account/partition combination", "your accounts are: .*biology"),
        ({"qos": "hihg"}, "Invalid qos specification", "did you mean high"),
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
    assert submitted(slurm) == 0
    assert "SLURM would queue this job, but not start it now: QOSMaxGRESPerJob" in capsys.readouterr().err
    assert len(slurm.jobs) == 1


def test_a_time_limit_above_that_of_an_account_or_a_qos_is_refused() -> None:
    facts = facts_of("alpha_22_05")
    ((error, fatal),) = check_request(facts, ClusterConfig(time_limit_min=1441))
    assert fatal and "account biology allows, 1440" in str(error) and "time_limit_min=1440" in str(error)
    assert check_request(facts, ClusterConfig(time_limit_min=1440)) == []
