"""The guard against numbers that break: it leaves out updates that are not finite, and says when to go back or to end."""

from __future__ import annotations

import math

from torch import Tensor

from slurmtrain.choices import OnNonfinite
from slurmtrain.config.schema import TrainConfig
from slurmtrain.errors import DivergedError
from slurmtrain.runs.reasons import Event
from slurmtrain.training.health import HINT, Action
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.state import StepResult, TrainingState
from slurmtrain.training.step_numbers import StepNumbers

ALL_TOLD = 10  # of more skipped steps in a row, each hundredth is told
SAMPLES_NAMED = 8  # of a step's samples, at most


class NonfiniteGuard(TrainingHook):
    """Skips updates that are not finite, and asks to go back, or ends the run.

    It judges by numbers that are the same on all ranks, after the same step on all of them; see `training/health.py`.
    """

    def __init__(self, train: TrainConfig):
        self._train = train
        self._error: DivergedError | None = None

    def skips_update(self, grad_norm: Tensor) -> Tensor | None:
        """Return whether to leave out this step's update: a bool scalar on the device, the same on all ranks; None: no.

        Parameters and optimiser then stay as they are, and the batch counts as seen. Nobody waits for the answer.
        """
        # A loss that is not finite gives gradients that are not, see `training/forward_backward.py`.
        if not grad_norm.is_cuda and math.isfinite(grad_norm.item()):
            return None
        return grad_norm - grad_norm != 0  # as isfinite(), with fewer kernels: the difference of other numbers is NaN

    def look(self, state: TrainingState, numbers: StepNumbers) -> None:
        """Look at the loss and the gradient norm of an earlier step; `health.due` then says why to go back, if it is to.

        Called once for each step, in their order: in the second step after it, or after the last one. Of a step that was
        still unread when a checkpoint was written, in the attempt that goes on from there.
        """
        health = state.counters.health
        action = health.look(numbers, self._train)
        if action is None:
            return
        if health.in_a_row <= ALL_TOLD or health.in_a_row % 100 == 0:
            self._tell_skip(state, numbers)
        if action is Action.GO_ON:
            return
        why = _sentence(state, numbers, self._train)
        if action is Action.STOP:
            self._error = DivergedError(f"{why}; train.on_nonfinite=stop", hint=HINT)
        else:
            health.due = why

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if self._error is not None:
            raise self._error

    def check_parameters(self, state: TrainingState) -> None:
        """Raise DivergedError if training is done and the parameters are not finite."""
        if not state.stopping and not state.is_finite():
            raise DivergedError(f"the parameters are not finite after step {state.step}", hint=HINT)

    def _tell_skip(self, state: TrainingState, numbers: StepNumbers) -> None:
        health = state.counters.health
        state.hooks.event(
            Event.UPDATE_SKIPPED,
            {
                "step": numbers.step,
                "samples": list(numbers.samples),
                "rank": numbers.failed_rank,
                "in_a_row": health.in_a_row,
                "skipped": health.skipped,
            },
        )
        if health.in_a_row == 1:
            state.hooks.message(skip_sentence(numbers, self._train))


def skip_sentence(numbers: StepNumbers, train: TrainConfig) -> str:
    """Return what is said of the first step in a row whose update was left out, and what will be done about more of them."""
    waits = train.on_nonfinite == OnNonfinite.SKIP and train.max_skipped > 1
    more = f"; after {train.max_skipped} such steps in a row it goes back to a checkpoint" if waits else ""
    return (
        f"step {numbers.step}: loss or gradient norm are not finite{_where(numbers)}, so its update was left out{more}"
    )


def _sentence(state: TrainingState, numbers: StepNumbers, train: TrainConfig) -> str:
    """Return what went wrong, where, and with which samples."""
    health = state.counters.health
    if health.in_a_row > 1:
        many = f" (train.max_skipped={train.max_skipped})" if health.in_a_row == train.max_skipped else ""
        what = (
            f"loss or gradient norm are not finite for {health.in_a_row} steps in a row{many}: from step {health.first} on; "
            f"step {numbers.step} has loss {numbers.loss:.4g} and gradient norm {numbers.grad_norm:.4g}{_where(numbers)}"
        )
    else:
        what = f"step {numbers.step} has loss {numbers.loss:.4g} and gradient norm {numbers.grad_norm:.4g}{_where(numbers)}"
    return f"{what}; its samples are {_samples(state, numbers)}"


def _where(numbers: StepNumbers) -> str:
    if numbers.failed_rank is not None:
        return f", by the loss of rank {numbers.failed_rank}"
    return f", by the losses of {numbers.failed_ranks} ranks" if numbers.failed_ranks else ""


def _samples(state: TrainingState, numbers: StepNumbers) -> str:
    """Name the samples of a step: their numbers in the order of the run, and a few of their indices in the data set."""
    first, end = numbers.samples
    indices = state.loader.indices(first, min(end, first + SAMPLES_NAMED))
    more = ", ..." if end - first > SAMPLES_NAMED else ""
    return f"{first} to {end - 1} of the run's order (in the data set: {', '.join(map(str, indices))}{more})"
