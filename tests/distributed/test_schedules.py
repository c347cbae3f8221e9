"""Wherever a run is interrupted, it ends with the bits of the undisturbed run. At random moments: tests/slurm/test_soak.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from slurmtrain.checkpoint.format.blocks import write_file
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.save import job
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.stop_watcher import StopWatcher
from slurmtrain.system import signals
from slurmtrain.training.agreement import AgreedDecision, StopAgreement
from slurmtrain.training.trainer import Outcome
from tests.distributed.test_training import losses, trainer
from tests.support.gloo import GlooRanks
from tests.support.local_runs import assert_same_run

STEPS = 40
OVERRIDES = [
    f"train.steps={STEPS}",
    "train.eval_every=15",
    "cluster.tasks_per_node=2",
    "model.dropout=0.1",  # so that the random state matters
    "checkpoint.every_steps=4",
]
STEP_S = 0.01  # at least, of an attempt that is interrupted: the signal must come before the end
WRITE_S = 0.03  # how long a save takes at least that is in flight when the signal comes


@dataclass(frozen=True)
class Interruption:
    """One signal to one rank, at one place of an attempt.

    Attributes:
        when: "step": before the `at`th step or round of evaluation; "save": when it begins to write its `at`th checkpoint,
            while training goes on.
        grace: time that is left then, in saves, which decides about one in flight; None: not known.
    """

    when: str
    at: int
    rank: int
    number: signal.Signals = signal.SIGTERM
    grace: float | None = None


PLANS = [
    Interruption("step", 15, 1),  # in the evaluation after step 15
    Interruption("save", 1, 1),  # when it is not known yet how long a save takes
    Interruption("save", 2, 0, signal.SIGUSR2, grace=1.0),
    Interruption("step", 3, 0, signal.SIGUSR2, grace=0.0),
]


class Grace(StopWatcher):
    """Stands in for the watchman of rank 0, who asks SLURM how long this job has left."""

    def __init__(self, saves: float | None):
        self._saves, self._save_s = saves, 0.0

    def plan_stop(self, step_s: float, save_s: float) -> None:
        self._save_s = save_s

    def seconds_left(self) -> float | None:
        return None if self._saves is None else self._saves * self._save_s


class Observed(StopAgreement):
    """Calls `hook` with the number of each step and round of evaluation before it; each takes its time."""

    def __init__(self, distributed: DistributedContext, hook: Callable[[int], None]):
        super().__init__(signals.install_signal_handlers(), distributed.control_group)
        self._hook, self._asked = hook, 0

    def begin(self, *, save: bool | None = None, roll_back: bool = False, profile: bool = False) -> None:
        self._hook(self._asked)
        self._asked += 1
        super().begin(save=save, roll_back=roll_back, profile=profile)

    def finish(self) -> AgreedDecision:
        time.sleep(STEP_S)
        return super().finish()


def attempt(distributed: DistributedContext, run_path: Path, number: int, plan: Interruption | None) -> Outcome:
    """One life of the run on this rank, interrupted according to the plan."""
    stop, watch = StopAgreement(signals.install_signal_handlers(), distributed.control_group), Grace(None)
    if plan is not None:
        told = distributed.environment.rank == plan.rank
        send: Callable[[], None] = partial(os.kill, os.getpid(), plan.number) if told else lambda: None
        at = plan.at if plan.when == "step" else -1
        stop, watch = Observed(distributed, lambda asked: send() if asked == at else None), Grace(plan.grace)
        mock.patch.object(job, "write_file", slow_write(plan, send)).start()  # the process is this attempt's own
    return trainer(distributed, run_path, OVERRIDES, stop, number, stop_watcher=watch).fit()


def slow_write(plan: Interruption, send: Callable[[], None]) -> Callable[..., Any]:
    """As write_file, so slow that training goes on for some steps meanwhile; the signal comes at its beginning."""
    begun = 0

    def write_slowly(path: Path, *arguments: Any, **options: Any) -> Any:
        nonlocal begun
        begun += 1
        if plan.when == "save" and begun == plan.at:
            send()
        time.sleep(WRITE_S)
        return write_file(path, *arguments, **options)

    return write_slowly


def test_interrupted_in_every_place_a_run_ends_with_the_bits_of_the_undisturbed_one(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    whole, run_path = tmp_path / "whole", tmp_path / "run"
    assert [outcome.finished for outcome in gloo_ranks(2, attempt, whole, 1, None)] == [True, True]
    for number, plan in enumerate([*PLANS, None], start=1):
        both = gloo_ranks(2, attempt, run_path, number, plan)
        assert both[0].finished == both[1].finished == (plan is None) and both[0].step == both[1].step
        if plan is not None and plan.grace is None:  # with time for it, what was reached is saved
            assert step_of(committed(run_path / "checkpoints")[-1]) == both[0].step
        if number == 1:
            assert both[0].step == 15 and losses(run_path, "valid_loss") == {}
    assert list(losses(whole)) == list(range(1, STEPS + 1))
    assert_same_run(run_path, whole)
