"""The guard against numbers that are not finite: it ends a training that cannot become useful again."""

from __future__ import annotations

import torch
from torch import Tensor

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.nonfinite import DivergedError, NonfiniteSteps
from slurmtrain.training.state import StepResult, TrainingState


class NonfiniteGuard(TrainingHook):
    """Ends the attempt after too many steps in a row without a finite loss and gradient norm.

    Args:
        limit: this many consecutive steps are too many; 0: any number is allowed.
        checkpointer: names the newest checkpoint in the error; None: nothing is saved.
    """

    def __init__(self, limit: int, checkpointer: Checkpointer | None):
        self._steps, self._checkpointer = NonfiniteSteps(limit), checkpointer

    def gives_up(self, state: TrainingState) -> bool:
        return self._steps.update()

    def before_optimizer_step(self, state: TrainingState, grad_norm: Tensor) -> None:
        steps = self._steps
        if steps.in_a_row == 1:
            state.hooks.message(
                f"step {steps.last}: loss or gradient norm are not finite"
                + (f"; {steps.limit} such steps in a row end the run" if steps.limit else "")
            )

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if result.decision.give_up:  # by what the step before this one was
            raise self._diverged(state)
        self._steps.note(state.step, result.loss_sum, result.grad_norm, result.tokens)

    def finish(self, state: TrainingState) -> None:
        if not state.stopping and not state.is_finite():
            self._steps.update()
            raise self._diverged(state)

    def _diverged(self, state: TrainingState) -> DivergedError:
        """Return the error that ends the run. All ranks call it together."""
        steps = self._steps
        loss = state.ranks.sum(torch.tensor(steps.loss)).item()
        numbers = f"the last one looked at, {steps.last}, has loss {loss:.4g} and gradient norm {steps.norm:.4g}"
        if 0 < steps.limit <= steps.in_a_row:
            many = f"in a row (train.max_nonfinite={steps.limit})"
            what = f"loss or gradient norm are not finite for {steps.in_a_row} steps {many}: from step {steps.first} on"
        else:
            what = f"the parameters are not finite after step {state.step}"
        step = self._checkpointer.last_step if self._checkpointer is not None else None
        before = "there is no checkpoint" if step is None else f"the newest checkpoint, of step {step}, is from before"
        return DivergedError(
            f"{what}; {numbers}; {before}",
            hint="the same steps would do the same again, so nothing is tried again: a smaller optim.lr, more "
            "optim.warmup_steps or optim.grad_clip=1 may help, or other data",
        )
