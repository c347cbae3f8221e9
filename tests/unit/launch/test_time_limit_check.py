"""Plans that cannot work are refused at submit, with the number that would."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import ConfigError
from slurmtrain.launch.time_limit_check import Measured, check, measured_before
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.preemption import PreemptionTimes
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import add_attempt, submitted_run

SLOW = Measured(step_s=12.0, save_s=41.0, start_s=60.0, run_id="RUN")
WORDS = ["cluster=a100x4", "cluster.nodes=2"]


def cluster(lead_s: int, limit_min: int = 60) -> ClusterConfig:
    return ClusterConfig(signal_lead_s=lead_s, time_limit_min=limit_min)


def test_a_lead_shorter_than_a_step_and_a_save_is_refused_with_one_that_works() -> None:
    with pytest.raises(ConfigError) as refused:
        check(cluster(30), SLOW, None)
    assert refused.value.exit_code == 78
    assert "cluster.signal_lead_s=30 is shorter than one step (12 s) plus a save (41 s)" in refused.value.message
    assert "run RUN" in refused.value.message
    assert refused.value.hint == "set at least cluster.signal_lead_s=70"
    assert check(cluster(70), SLOW, None) == []


@pytest.mark.parametrize("lead_s", [53, 120, 0])
def test_a_lead_that_is_long_enough_or_switched_off_is_fine(lead_s: int) -> None:
    assert check(cluster(lead_s), SLOW, None) == []


@pytest.mark.parametrize(
    ("lead_s", "limit_min", "measured", "enough"),
    [(120, 3, None, 4), (120, 4, SLOW, 5), (300, 6, SLOW, 8), (0, 1, SLOW, 2)],
)
def test_a_time_limit_that_leaves_no_time_to_train_is_refused_with_one_that_works(
    lead_s: int, limit_min: int, measured: Measured | None, enough: int
) -> None:
    with pytest.raises(ConfigError, match=f"cluster.time_limit_min={limit_min} is too short") as refused:
        check(cluster(lead_s, limit_min), measured, None)
    assert refused.value.hint == f"set at least cluster.time_limit_min={enough}"
    assert check(cluster(lead_s, enough), measured, None) == []


@pytest.mark.parametrize(
    ("times", "warned"),
    [
        (None, False),
        (PreemptionTimes(30.0), False),  # nobody preempts it
        (PreemptionTimes(30.0, 23.0, "partition low"), False),
        (PreemptionTimes(30.0, 22.0, "partition low"), True),
        (PreemptionTimes(None, 0.0, "QOS cheap"), True),
    ],
)
def test_a_grace_time_too_short_for_a_save_is_a_warning(times: PreemptionTimes | None, warned: bool) -> None:
    warnings = check(cluster(120), SLOW, times)
    assert len(warnings) == warned
    if times is not None and warned:
        assert times.grace_of in warnings[0] and "last regular checkpoint" in warnings[0]


# What earlier runs have left.


def trained(project: Path, *, step_s: float, save_s: float, start_s: float = 5.0, ranks: int = 8) -> RunDir:
    """A run of the same experiment that has ended."""
    run_dir = submitted_run(project, *WORDS)
    times = {"started": 1.0, "stepping": 2.0, "start_up_s": {"imports": start_s}}
    add_attempt(run_dir, world_size=ranks, verdict="done", **times)
    records = [{"step": step, "loss": 1.0, "step_time_s": step_s} for step in range(1, 6)]
    evaluation = {"step": 5, "valid_loss": 1.0}
    lines = [*records, evaluation]
    run_dir.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "los')
    for seconds in (save_s / 2, save_s, save_s / 3):
        run_dir.event(Event.CHECKPOINT, step=5, seconds=seconds, stall_s=0.1)
    return run_dir


def test_what_the_newest_runs_of_the_same_experiment_measured_is_found(project: Path) -> None:
    runs = [trained(project, step_s=step_s, save_s=10 * step_s, start_s=step_s) for step_s in (9.0, 1.0, 2.0, 3.0)]
    assert measured_before(compose(WORDS), runs) == Measured(2.0, 30.0, 3.0, runs[-1].id)


@pytest.mark.parametrize("other", ["another experiment", "other ranks", "no save", "never trained", "no run.json"])
def test_other_runs_tell_nothing(project: Path, other: str) -> None:
    config = compose([*WORDS, "train.steps=7"] if other == "another experiment" else WORDS)
    run = trained(project, step_s=1.0, save_s=2.0, ranks=4 if other == "other ranks" else 8)
    if other == "no save":
        run.events_file.unlink()
    elif other == "never trained":
        (run.attempt(1).path / "attempt.json").unlink()
    elif other == "no run.json":
        run.info_file.unlink()
    assert measured_before(config, [run]) is None


def test_the_cluster_or_name_of_a_run_does_not_make_it_another_experiment(project: Path) -> None:
    run = trained(project, step_s=1.0, save_s=2.0)
    config = compose([*WORDS, "job.name=other", "cluster.signal_lead_s=60", "job.singleton=true"])
    assert measured_before(config, [run]) is not None


def test_a_long_record_is_read_from_its_end(project: Path) -> None:
    run = trained(project, step_s=1.0, save_s=2.0)
    with run.metrics_file.open("ab") as file:
        file.truncate(1 << 40)  # a hole: nobody could read all of it
        file.seek(0, os.SEEK_END)
        file.writelines(b'\n{"step": %d, "step_time_s": 0.5}' % step for step in range(1000))
        file.write(b"\n")
    measured = measured_before(compose(WORDS), [run])
    assert measured is not None and measured.step_s == 0.5


# At submit.


def test_submit_refuses_a_plan_that_cannot_work_and_leaves_nothing(
    project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(project, step_s=12.0, save_s=41.0)
    words = ["+cluster=a100x4", "cluster.nodes=2", "cluster.signal_lead_s=30", "submit"]
    assert main(words) == 78
    assert "set at least cluster.signal_lead_s=70" in capsys.readouterr().err
    assert slurm.jobs == [] and len(list(project.glob("runs/train/*"))) == 1


@pytest.mark.parametrize("measured", [True, False])
def test_a_grace_time_of_the_cluster_that_is_too_short_is_a_warning_once_a_save_has_been_measured(
    measured: bool, project: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SlurmClient.glance.__kwdefaults__ or {}, "within_s", 60)  # what is not known warns of nothing
    if measured:
        trained(project, step_s=12.0, save_s=41.0)
    slurm.configure(SLURM_VERSION="24.11.7", KillWait="30 sec", PreemptType="preempt/partition_prio")
    low = "PartitionName=low Default=YES GraceTime=5 PreemptMode=REQUEUE\n"
    slurm.answer("scontrol --all --oneliner show partition", low)
    assert main(["+cluster=a100x4", "cluster.nodes=2", "submit"]) == 0
    warning = "slurmtrain: warning: a preempted job lives on for 5 s (GraceTime of partition low) and 30 s (KillWait)"
    assert capsys.readouterr().err.count(warning) == measured
    assert len(slurm.jobs) == 1
