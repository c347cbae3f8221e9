"""Exports of checkpoints for other programs, every checkpoint.export_every_steps and after the last step."""

from __future__ import annotations

from typing import Protocol

from slurmtrain.system.activity import EXPORT, doing
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.state import StepResult, TrainingState


class Exports(Protocol):
    """What makes the exports, beside training."""

    def finish(self) -> None:
        """Wait until all that was asked for is done."""

    def close(self) -> None:
        """End what is under way."""


class Exporting(TrainingHook):
    """Has a checkpoint saved when an export of it is due. On all ranks, before `Checkpointing`.

    Args:
        every: steps between exports.
        exports: rank 0's; None on the others.
    """

    def __init__(self, every: int, exports: Exports | None):
        self._every, self._exports = every, exports

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if not state.stopping and (state.step % self._every == 0 or state.is_last_step):
            state.save_requested = True

    def close(self, state: TrainingState) -> None:
        if self._exports is not None:
            self._exports.close()


class ExportsAtTheEnd(TrainingHook):
    """Waits for the exports when all steps are done. On all ranks, after `Checkpointing`, which saves the last step."""

    def __init__(self, exports: Exports | None):
        self._exports = exports

    def finish(self, state: TrainingState) -> None:
        if state.stopping:
            return
        if self._exports is not None:
            with doing(EXPORT):
                self._exports.finish()
        state.ranks.of_rank_0(0)  # srun ends ranks that go on long after another has exited
