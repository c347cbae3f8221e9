"""Any plan of interruptions ends with the bits of the run that nobody interrupted: random moments, signals and ranks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.stop_watcher import StopWatcher
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
    """One signal to this process, at one moment of an attempt.

    Attributes:
        when: "step": before the `at`th step or round of evaluation; "save": when it begins to write its `at`th checkpoint,
            while training goes on; "moment": `seconds` after training began, whatever it does then.
        ranks: who gets it.
        grace: time that is left then, in saves, which decides about one in flight; None: not known.
    """

    when: str
    ranks: tuple[int, ...]
    number: signal.Signals
    at: int = 0
    seconds: float = 0.0
    grace: float | None = None


def draw_schedule(seed: int) -> list[Interruption]:
    dice = random.Random(seed)
    # The first kind goes round, so that ten schedules hold each several times.
    kinds = [("step", "save", "moment")[seed % 3], *dice.choices(("step", "save", "moment"), k=dice.randint(0, 3))]
    return [
        Interruption(
            when,
            ranks=dice.choice([(0,), (1,), (0, 1)]),
            number=dice.choice([signal.SIGTERM, signal.SIGUSR2]),
            at=dice.randint(1, 3) if when == "save" else dice.randint(0, 7),
            seconds=dice.uniform(0, 0.25),
            grace=dice.choice([None, 0.0, 1.0]),
        )
        for when in kinds
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
    """Calls `hook` with the number of each step and round of evaluation before it, and takes its time for it."""

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
        send = (
            partial(os.kill, os.getpid(), plan.number) if distributed.environment.rank in plan.ranks else lambda: None
        )
        stop, watch = Observed(distributed, before_step(plan, send)), Grace(plan.grace)
        blocks.write = slow_write(plan, send)  # the process is this attempt's own
    return trainer(distributed, run_path, OVERRIDES, stop, number, stop_watcher=watch).fit()


def before_step(plan: Interruption, send: Callable[[], None]) -> Callable[[int], None]:
    """A hook that sends the signal before a step, or sets the clock for it when training begins."""
    timer = threading.Timer(plan.seconds, send)
    timer.daemon = True

    def hook(asked: int) -> None:
        if plan.when == "step" and asked == plan.at:
            send()
        if plan.when == "moment" and asked == 0:
            timer.start()

    return hook


def slow_write(plan: Interruption, send: Callable[[], None]) -> Callable[..., Any]:
    """As blocks.write, so slow that training goes on for some steps meanwhile; the signal comes at its beginning."""
    write, begun = blocks.write, 0

    def write_slowly(path: Path, *arguments: Any, **options: Any) -> Any:
        nonlocal begun
        begun += 1
        if plan.when == "save" and begun == plan.at:
            send()
        time.sleep(WRITE_S)
        return write(path, *arguments, **options)

    return write_slowly


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with GlooRanks(tmp_path_factory.mktemp("undisturbed")) as ranks:
        path = ranks.tmp_path / "run"
        assert [outcome.finished for outcome in ranks(2, attempt, path, 1, None)] == [True, True]
        yield path


# In the evaluation after step 15, and in an attempt's first save, when it is not known yet how long one takes.
PLACES = [Interruption(when, (1,), signal.SIGTERM, at) for when, at in (("step", 15), ("save", 1))]
# PLACES have the other two kinds.
SCHEDULES = [
    pytest.param(PLACES, id="places"),
    *(pytest.param(draw_schedule(seed), marks=[pytest.mark.slow] * (seed != 2), id=str(seed)) for seed in range(10)),
]


@pytest.mark.parametrize("plans", SCHEDULES)
def test_a_schedule_of_interruptions_ends_with_the_bits_of_the_undisturbed_run(
    gloo_ranks: GlooRanks, tmp_path: Path, undisturbed: Path, plans: list[Interruption]
) -> None:
    run_path = tmp_path / "run"
    outcomes: list[Outcome] = []
    for number, plan in enumerate([*plans, None], start=1):
        both = gloo_ranks(2, attempt, run_path, number, plan)
        outcomes.append(both[0])
        assert (both[0].finished, both[0].step) == (both[1].finished, both[1].step)
        if both[0].finished:
            break
        if plan is not None and plan.grace is None:  # with time for it, what was reached is saved
            assert step_of(committed(run_path / "checkpoints")[-1]) == both[0].step
        if plans is PLACES and number == 1:
            assert both[0].step == 15 and losses(run_path, "valid_loss") == {}
    assert not outcomes[0].finished  # it was interrupted
    assert outcomes[-1].finished
    assert list(losses(undisturbed)) == list(range(1, STEPS + 1))
    assert_same_run(run_path, undisturbed)
