"""Training as a person gets it on one machine: the same numbers on any number of ranks, and through any interruption."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.config.compose import compose
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.rank.attempt_context import AttemptContext, Timeline
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.jobs.train import build_trainer
from slurmtrain.report.goodput import Cause
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals
from slurmtrain.training.agreement import StopAgreement
from slurmtrain.training.hooks import TrainingHook
from slurmtrain.training.hooks.base import RecordingHook, StepResult, TrainingState
from slurmtrain.training.trainer import Outcome, Trainer
from tests.support.gloo import wait_until
from tests.support.interrupted_run import check_time_adds_up
from tests.support.local_runs import LocalRun, Project, assert_same_bits

# In one process group, without a command line: what the trainer computes.


@cache  # Hydra takes longer than some of these runs do
def experiment(*overrides: str) -> Config:
    other = any(word.startswith(("experiment=", "data=", "data._target_=")) for word in overrides)
    few = [] if other else ["data.max_bytes=50000"]  # 7 samples are held out: what is evaluated is the point elsewhere
    return compose(["experiment=smoke", "train.tensorboard=false", "train.log_every=1", *few, *overrides])


def trainer(
    distributed: DistributedContext,
    run_path: Path,
    overrides: list[str],
    stop: Any = None,
    attempt: int = 1,
    hooks: Sequence[TrainingHook] = (),
    **more: Any,
) -> Trainer:
    """Args: stop: a flag, or an agreement of the ranks; more: for `build_trainer`."""
    run_path.mkdir(exist_ok=True)
    where = AttemptContext(RunDir(run_path), attempt, supervised=True)
    where.attempt_dir.path.mkdir(parents=True, exist_ok=True)
    if not isinstance(stop, StopAgreement):
        stop = StopAgreement(stop or signals.StopFlag(), distributed.control_group)
    return build_trainer(experiment(*overrides), distributed, where, stop, Timeline(), hooks=hooks, **more)


def fit(
    distributed: DistributedContext, run_path: Path, overrides: list[str], stop: Any = None, attempt: int = 1
) -> Outcome:
    return trainer(distributed, run_path, overrides, stop, attempt).fit()


def alone() -> DistributedContext:
    torch.set_num_threads(1)
    return DistributedContext(Environment(source="single"), torch.device("cpu"))


def losses(run_path: Path, field: str = "loss") -> dict[int, float]:
    return {record["step"]: record[field] for record in read_metrics(RunDir(run_path).metrics_file) if field in record}


# Two summation orders of the same float32 terms differ by about eps * sqrt(n) relative, eps = 2**-24, if rounding errors
# are independent (Higham 2002, section 2.8). A step's loss and gradient are sums over the n = 512 tokens of the global
# batch: 1.4e-6. Each step hands its difference on to the next, and with a small learning rate hardly magnifies it, so
# k steps differ by k * 1.4e-6 at most and by sqrt(k) * 1.4e-6 typically: 6e-6 for k = 20. Measured: 2e-7.
STEPS, TOKENS = 20, 8 * 64
TOLERANCE = STEPS**0.5 * TOKENS**0.5 * 2**-24
SLOW_RATE = ["optim.lr=1e-4", f"train.steps={STEPS}", "train.eval_every=10"]


RAGGED = [*SLOW_RATE, "data._target_=tests.parity.matrix.RaggedText"]


class Listener(RecordingHook):
    """Notes what it is called for, and after how many steps."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []


for event in (*vars(TrainingHook), *vars(RecordingHook)):
    if not event.startswith("_") and event not in ("message", "event"):
        setattr(
            Listener,
            event,
            lambda self, at, *more, event=event: self.heard.append((event, at if isinstance(at, int) else at.step)),
        )


def test_a_hook_hears_of_everything_in_the_order_that_its_protocol_states(tmp_path: Path) -> None:
    listener = Listener()
    trainer(alone(), tmp_path / "run", ["train.steps=2", "train.eval_every=0"], hooks=[listener]).fit()
    assert listener.heard == [
        ("start", 0),
        *(("before_step", 0), ("before_optimizer_step", 0), ("log", 1), ("after_step", 1)),
        *(("before_step", 1), ("before_optimizer_step", 1), ("log", 2), ("evaluated", 2), ("after_step", 2)),
        ("close", 2),
    ]


def test_an_evaluation_that_is_made_up_for_comes_after_all_hooks_have_started(tmp_path: Path) -> None:
    words = ["train.steps=3", "checkpoint.every_steps=2"]
    fit(alone(), tmp_path / "run", [*words, "train.eval_every=0"])
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint_0000003")
    listener = Listener()
    trainer(alone(), tmp_path / "run", [*words, "train.eval_every=2"], attempt=2, hooks=[listener]).fit()
    assert listener.heard[:3] == [("start", 2), ("evaluated", 2), ("before_step", 2)]


class SaveEarly(TrainingHook):
    """Asks for a checkpoint after certain steps, as a `train.hooks`."""

    def __init__(self, steps: list[int]):
        self._steps = steps

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if state.step in self._steps:
            state.save_requested = True


HOOKED = ["train.steps=3", "train.eval_every=0", "checkpoint.every_steps=0"]


def test_a_hook_of_train_hooks_has_its_step_saved(tmp_path: Path) -> None:
    fit(alone(), tmp_path / "run", [*HOOKED, f"train.hooks=[{{_target_: {__name__}.SaveEarly, steps: [2]}}]"])
    assert [path.name for path in committed(RunDir(tmp_path / "run").checkpoints)] == [
        "checkpoint_0000002",
        "checkpoint_0000003",
    ]


@pytest.mark.parametrize(("target", "problem"), [("no_such.Hook", "no_such"), ("builtins.dict", "is not a hook")])
def test_what_is_no_hook_is_refused(tmp_path: Path, target: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"train.hooks\[0\]._target_={target}.*{problem}"):
        fit(alone(), tmp_path / "run", [*HOOKED, f"train.hooks=[{{_target_: {target}}}]"])


class FailingAt(Listener):
    """Fails at one moment, and again when it is closed."""

    def __init__(self, moment: str):
        super().__init__()
        for event in (moment, "close"):
            setattr(self, event, lambda state, *more, event=event: self._fail(event))

    def _fail(self, event: str) -> None:
        self.heard.append((event, 0))
        raise (OSError if event == "close" else ConfigError)(f"failed at {event}")


MOMENTS = ("warm-up", "start", "before_step", "before_optimizer_step", "after_step", "close")


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_error_at_any_moment_closes_everything_and_stays_the_error_that_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    early, failing, listener = Listener(), FailingAt(moment), Listener()
    hooks = [early, failing, listener]
    training = trainer(alone(), tmp_path / "run", ["train.steps=1", "train.eval_every=0"], hooks=hooks)
    monkeypatch.setattr(training._loader, "close", lambda: listener.heard.append(("loader", training.step)))
    if moment == "warm-up":
        monkeypatch.setattr("slurmtrain.training.trainer.warm_up", lambda *_: failing._fail(moment))
    with pytest.raises(OSError if moment == "close" else ConfigError, match=f"failed at {moment}"):
        training.fit()
    assert [event for event, _ in listener.heard if event in ("close", "loader")] == ["close", "loader"]
    assert failing.heard[-1][0] == early.heard[-1][0] == "close" and gc.get_freeze_count() == 0
    assert ("could not end cleanly" in caplog.text) == (moment != "close")


class StopAt:
    """Stop signals that come by themselves when they have been asked `number` times."""

    def __init__(self, number: int):
        self._left, self.first = number, None
        self.save_asked = self.profile_asked = threading.Event()

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0

    def request(self, cause: str) -> None:
        pass


# Whole runs, from the command line to the exit code.

LONG = ["train.steps=30", "train.eval_every=15", "checkpoint.every_steps=8", "requeue.restart_delay_s=0"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """The run that others are compared with."""
    project = Project(tmp_path_factory.mktemp("undisturbed") / "project")
    return project.submit(*LONG, "cluster.tasks_per_node=2").finish()


def pause(project: Project) -> None:
    """From now on each forward pass takes its time."""
    (project.path / "pause").touch()


def hold(project: Project) -> None:
    """From now on no forward pass ends."""
    (project.path / "hold").touch()


def go_on(project: Project) -> None:
    for name in ("hold", "pause"):
        (project.path / name).unlink(missing_ok=True)


def wait_for_attempt(run: LocalRun, number: int) -> None:
    """Until attempt `number` trains."""

    def trains() -> bool:
        tries = run.attempts()
        return len(tries) >= number and tries[number - 1].stepping is not None

    wait_until(trains, f"in attempt {number}")


def test_ended_by_ctrl_c_killed_and_orphaned_it_finishes_with_the_bits_of_the_undisturbed_run(
    project: Project, undisturbed: LocalRun
) -> None:
    """With data workers, and told to stop in other ways: in tests/slurm."""
    pause(project)
    run = project.submit(*LONG, "cluster.tasks_per_node=2")
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 75
    assert "resume" in run.output and run.processes() == []
    run = project.resume()
    wait_for_attempt(run, 2)
    stopped_at = run.attempts()[-1].first_step or 0
    wait_until(lambda: step_of(committed(run.run_dir.checkpoints)[-1]) > stopped_at, "saved")
    os.kill(run.rank_pid(1), signal.SIGKILL)
    wait_for_attempt(run, 3)
    run.wait_for_step((run.attempts()[-1].first_step or 0) + 2)
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not run.processes(), "gone")  # ranks whose launcher was killed save and leave
    go_on(project)
    run = project.resume().finish()
    ended, killed, orphaned, last = run.attempts()
    assert (ended.reason, ended.verdict, ended.cause) == ("cancelled", "end", "SIGINT")
    assert ended.committed_step == ended.last_step == killed.first_step
    assert (killed.reason, killed.exit_code) == ("crash", 128 + signal.SIGKILL)
    assert orphaned.first_step in (8, 16, 24) and orphaned.first_step == killed.committed_step
    assert orphaned.said == "stopped" and last.first_step == orphaned.last_step
    assert last.reason == "finished" and run.processes() == []
    assert_same_bits(run, undisturbed)
    spent = check_time_adds_up(run.run_dir)
    assert (spent.seconds.get(Cause.REDONE, 0.0) > 0) == ((killed.last_step or 0) > orphaned.first_step)
    assert spent.seconds[Cause.EVALUATION] > 0 and spent.seconds[Cause.CHECKPOINT] > 0
    assert spent.interruptions["crash"] == 1 and spent.lost_s["crash"] > 0


def test_a_finished_run_that_is_given_more_steps_trains_on_to_them_and_with_a_smaller_lr_where_it_diverged(
    project: Project,
) -> None:
    first = project.submit("train.steps=6", "train.eval_every=0").finish()
    diverged = project.resume("train.steps=+7", "optim.lr=1e30")
    assert diverged.wait() == 78 and diverged.run_dir == first.run_dir
    assert first.run_dir.info()["steps"] == 13
    assert first.run_dir.info()["changes"][0]["set"] == ["train.steps=13", "optim.lr=1e30"]
    assert "not finite" in (diverged.attempts()[-1].sentence or "")
    last = project.resume("optim.lr=1e-3").finish()
    assert [(attempt.reason, attempt.first_step) for attempt in last.attempts()] == [
        *(("finished", 0), ("diverged", 6), ("finished", 6)),
    ]
    status = " ".join(project.cli("status", "last").stdout.split())
    assert "finished after 6 steps, and was then given 13" in status and ": finished" in status
    losses = {record["step"]: record["loss"] for record in last.losses() if "loss" in record}
    assert list(losses) == list(range(1, 14)) and all(map(math.isfinite, losses.values()))


def test_a_second_ctrl_c_leaves_at_once(project: Project) -> None:
    pause(project)
    run = project.submit(*LONG)
    run.wait_for_step(1)
    hold(project)
    run.process.send_signal(signal.SIGINT)
    wait_until((run.run_dir.attempt(1).path / "stop.json").exists, "told")
    assert run.process.poll() is None  # it waits for the step, which does not end
    run.process.send_signal(signal.SIGINT)
    assert run.wait() not in (0, 75)
    assert run.processes() == []


# Ranks that somebody starts by hand.

BY_HAND = ["+experiment=smoke", "model._target_=paced.Paced", "train.tensorboard=false", "train.log_every=1", "train"]


@pytest.mark.parametrize(
    ("command", "world_size"),
    [
        (["slurmtrain"], 1),
        (["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "slurmtrain"], 2),
    ],
    ids=["python", "torchrun"],
)
def test_started_by_hand_it_makes_one_run_directory_and_records_the_outcome_of_its_attempt(
    project: Project, command: list[str], world_size: int
) -> None:
    run = LocalRun(project.path, project.popen(*command, *BY_HAND))
    project.runs.append(run)
    assert run.wait() == 0, run.output
    assert len(all_runs(project.path / "runs")) == 1
    (attempt,) = run.attempts()
    assert (attempt.reason, attempt.verdict, attempt.world_size) == ("finished", "done", world_size)
    assert attempt.last_step == 20
    assert "finished" in project.cli("status", "last").stdout
