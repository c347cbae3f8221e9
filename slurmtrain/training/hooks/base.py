"""The protocol of what hangs on the training loop, and the list that calls it.

    setup ─> load ─> start ─> before_first_step
        ─> each step: before_step ─> (forward and backward) ─> numbers_known ─> wants_save, wants_rollback, wants_profile
                      ─> before_optimizer_step, skips_update
                      ─> (the optimiser, while all ranks agree on a decision) ─> after_step
                      ─> if a rank wants to go back: roll_back ─> rolled_back
        ─> finish, or on_error ─> close

A hook is called on every rank where it is in the list. One that calls collectives has to be in all of them, at the same
place. What a hook reports goes through `log`, `evaluated`, `event` and `message`, which are no-ops on ranks that write nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from slurmtrain.runs.events import Event
from slurmtrain.system.activity import HOOK, doing
from slurmtrain.training.state import StepResult, TrainingState
from slurmtrain.training.step_numbers import StepNumbers


class TrainingHook:
    """A concern of training other than its steps. Every method does nothing unless a subclass overrides it.

    Methods that are called in every step must not wait for what the device computes in it: reading a tensor would.
    """

    def setup(self, state: TrainingState) -> None:
        """Refuse, before anything is computed, what cannot work."""

    def load(self, state: TrainingState) -> None:
        """Load what this attempt begins from into `state.objects()`, and set `state.restored`."""

    def start(self, state: TrainingState) -> None:
        """Note what this attempt begins from. No worker of the loader runs yet."""

    def before_first_step(self, state: TrainingState) -> None:
        """Do what an earlier attempt has left undone, unless `state.stopping`."""

    def before_step(self, state: TrainingState) -> None:
        """Begin the step after `state.step`, before it waits for its data."""

    def wants_save(self, state: TrainingState) -> bool:
        """Return whether this rank wants a checkpoint after this step, which is not yet counted in `state.step`.

        Asked after the last backward pass of the step has been launched.
        """
        return False

    def numbers_known(self, state: TrainingState, numbers: StepNumbers) -> None:
        """Look at the loss and the gradient norm of an earlier step, which are the same on all ranks.

        Called once for each step, in their order: in the second step after it, or after the last one. Of a step that was
        still unread when a checkpoint was written, in the attempt that goes on from there.
        """

    def wants_rollback(self, state: TrainingState) -> str | None:
        """Return why training should go back to a checkpoint from before a trouble, a sentence; None: it should not.

        Asked when `wants_save` is. One rank is enough: all go back together after this step, to the newest checkpoint of at
        most `state.counters.health.sound_step`, and train on with the samples that come next. After train.max_rollbacks
        times without getting further, the sentence ends the run.
        """
        return None

    def wants_profile(self, state: TrainingState) -> bool:
        """Return whether this rank knows of a wish to profile the next steps. Asked when `wants_save` is."""
        return False

    def before_optimizer_step(self, state: TrainingState, grad_norm: Tensor) -> None:
        """Look at the gradients, or change them. They have been clipped; `grad_norm` is the norm before, a scalar."""

    def skips_update(self, state: TrainingState, grad_norm: Tensor) -> Tensor | None:
        """Return whether to leave out this step's update: a bool scalar on the device, the same on all ranks; None: no.

        Parameters and optimiser then stay as they are, and the batch counts as seen. Nobody waits for the answer. What only
        one rank can tell has to be made common by a reduction before.
        """
        return None

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        """Do what is due after step `state.step`.

        It may set `state.stopping`; and `state.save_requested`, since hooks other than `Checkpointing` come before it. Both
        have to be the same on all ranks.
        """

    def roll_back(self, state: TrainingState, at_most: int) -> bool:
        """Load the newest checkpoint of at most step `at_most` into `state.objects_but_loader()`, and forget newer ones.

        Returns:
            False, and nothing is changed, if this hook has none.
        """
        return False

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        """Forget what was noted of the steps after `state.step`, to which training has gone back from `from_step`."""

    def finish(self, state: TrainingState) -> None:
        """Complete what is under way: all steps are done, or training stops early (`state.stopping`)."""

    def on_error(self, state: TrainingState) -> None:
        """Keep what can be kept after an error in any of the methods above, or between them.

        No collectives: the other ranks may be gone. What this method raises is logged, and the first error stays.
        """

    def close(self, state: TrainingState) -> None:
        """Release what `setup` and later methods have opened, if they have. Called after every ending, in the reverse order.

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

    def has_handler(self, event: str) -> bool:
        """Return whether any hook has a method `event` of its own."""
        return bool(self._of[event])

    setup = _in_turn("setup")
    load = _in_turn("load")
    start = _in_turn("start")
    before_first_step = _in_turn("before_first_step")
    before_step = _in_turn("before_step")
    numbers_known = _in_turn("numbers_known")
    before_optimizer_step = _in_turn("before_optimizer_step")
    after_step = _in_turn("after_step")
    rolled_back = _in_turn("rolled_back")
    finish = _in_turn("finish")
    log = _in_turn("log")
    evaluated = _in_turn("evaluated")
    event = _in_turn("event")
    message = _in_turn("message")

    # What hooks are asked: each is, whatever others have answered.

    def wants_save(self, state: TrainingState) -> bool:
        wanted = [call(state) for call in self._of["wants_save"]]
        return any(wanted)

    def wants_rollback(self, state: TrainingState) -> str | None:
        reasons = [call(state) for call in self._of["wants_rollback"]]
        return next((reason for reason in reasons if reason is not None), None)

    def wants_profile(self, state: TrainingState) -> bool:
        wanted = [call(state) for call in self._of["wants_profile"]]
        return any(wanted)

    def skips_update(self, state: TrainingState, grad_norm: Tensor) -> Tensor | None:
        answers = [call(state, grad_norm) for call in self._of["skips_update"]]
        return functools.reduce(_either, answers, None)

    def roll_back(self, state: TrainingState, at_most: int) -> bool:
        return any(call(state, at_most) for call in self._of["roll_back"])  # the first that can

    # How training ends: all are called, in the reverse order, whatever one of them raises.

    def on_error(self, state: TrainingState) -> None:
        self._end("on_error", state)

    def close(self, state: TrainingState) -> None:
        self._end("close", state)

    def _end(self, event: str, state: TrainingState) -> None:
        with ExitStack() as stack:
            for call in self._of[event]:
                stack.callback(call, state)


def _method(hook: TrainingHook, event: str) -> Callable[..., Any]:
    """Return a method of a hook. One of the user's own may do anything, such as generating text, which is told."""
    method: Callable[..., Any] = getattr(hook, event)
    return method if type(hook).__module__.startswith("slurmtrain.") else doing(HOOK)(method)


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return where one of two bool scalars is true; None counts as false."""
    if one is None or other is None:
        return other if one is None else one
    return one.logical_or(other)
