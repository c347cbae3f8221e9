"""The protocol of what hangs on the training loop, and the list that calls it.

    start ─> each step: before_step ─> (forward and backward) ─> before_optimizer_step
                        ─> (the optimiser, while all ranks agree on a decision) ─> after_step
          ─> close

A hook is called on every rank where it is in the list. One that calls collectives has to be in all of them, at the same
place. What is reported goes through `log`, `evaluated`, `event`, `message` and `rolled_back`, which are no-ops on ranks that
write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from slurmtrain.runs.reasons import Event
from slurmtrain.system.activity import HOOK, doing
from slurmtrain.training.state import StepResult, TrainingState


class TrainingHook:
    """A concern of training other than its steps. Every method does nothing unless a subclass overrides it.

    Methods that are called in every step must not wait for what the device computes in it: reading a tensor would.
    """

    def start(self, state: TrainingState) -> None:
        """Begin: the state is that of the checkpoint, if there was one, and the workers of the loader run.

        If `state.stopping`, no step follows.
        """

    def before_step(self, state: TrainingState) -> None:
        """Begin the step after `state.step`, before it waits for its data."""

    def before_optimizer_step(self, state: TrainingState, grad_norm: Tensor) -> None:
        """Look at the gradients, or change them. They have been clipped; `grad_norm` is the norm before, a scalar."""

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        """Do what is due after step `state.step`.

        It may set `state.stopping`; and `state.save_requested`, since hooks other than `Checkpointing` come before it. Both
        have to be the same on all ranks.
        """

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        """Forget what was noted of the steps after `state.step`, to which training has gone back from `from_step`."""

    def close(self, state: TrainingState) -> None:
        """Release what `start` and later methods have opened, if they have. Called after every ending, in the reverse order.

        After an error, what this method raises is logged, and the first error stays.
        """

    def log(self, step: int, values: Mapping[str, float | str | None]) -> None:
        """Write the numbers of a step of training, every train.log_every steps."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation after step `step`."""

    def event(self, event: Event, values: Mapping[str, Any]) -> None:
        """Record something that happened, with JSON values."""

    def message(self, text: str) -> None:
        """Show a sentence to the person who watches."""


def _in_turn(event: str) -> Callable[..., None]:
    """Return the method of `TrainingHooks` that calls the method `event` of one hook after another."""

    def call(hooks: TrainingHooks, *arguments: Any) -> None:
        for method in hooks._of[event]:
            method(*arguments)

    return call


class TrainingHooks:
    """Several hooks in their order, as one. Only methods that a hook overrides are called, so that the rest costs nothing."""

    def __init__(self, hooks: Sequence[TrainingHook]):
        events = [name for name in vars(TrainingHook) if not name.startswith("_")]
        self._of = {
            event: [
                _method(hook, event) for hook in hooks if getattr(type(hook), event) is not getattr(TrainingHook, event)
            ]
            for event in events
        }

    start = _in_turn("start")
    before_step = _in_turn("before_step")
    before_optimizer_step = _in_turn("before_optimizer_step")
    after_step = _in_turn("after_step")
    rolled_back = _in_turn("rolled_back")
    log = _in_turn("log")
    evaluated = _in_turn("evaluated")
    event = _in_turn("event")
    message = _in_turn("message")

    def close(self, state: TrainingState) -> None:
        with ExitStack() as stack:  # in the reverse order, whatever one of them raises
            for call in self._of["close"]:
                stack.callback(call, state)


def _method(hook: TrainingHook, event: str) -> Callable[..., Any]:
    """Return a method of a hook. One of the user's own may do anything, such as generating text, which is told."""
    method: Callable[..., Any] = getattr(hook, event)
    return method if type(hook).__module__.startswith("slurmtrain.") else doing(HOOK)(method)
