"""The protocol of what hangs on the training loop, and the list that calls it.

    setup ─> load ─> start ─> before_first_step
        ─> each step: before_step ─> (forward and backward) ─> wants_save, gives_up ─> before_optimizer_step
                      ─> (the optimiser, while all ranks agree on a decision) ─> after_step
        ─> finish, or on_error ─> close

A hook is called on every rank where it is in the list. One that calls collectives has to be in all of them, at the same
place. What a hook reports goes through `log`, `evaluated` and `message`, which are no-ops on ranks that write nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor

from slurmtrain.training.state import StepResult, TrainingState


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

    def gives_up(self, state: TrainingState) -> bool:
        """Return whether this rank cannot usefully go on. Asked when `wants_save` is.

        Some hook has to raise an error in `after_step` when the ranks' decision says so.
        """
        return False

    def before_optimizer_step(self, state: TrainingState, grad_norm: Tensor) -> None:
        """Look at the gradients, or change them. They have been clipped; `grad_norm` is the norm before, a scalar."""

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        """Do what is due after step `state.step`.

        It may set `state.stopping`; and `state.save_requested`, since hooks other than `Checkpointing` come before it. Both
        have to be the same on all ranks.
        """

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

    def message(self, text: str) -> None:
        """Show a sentence to the person who watches."""


class TrainingHooks(TrainingHook):
    """Several hooks in their order, as one. Only methods that a hook overrides are called, so that the rest costs nothing."""

    def __init__(self, hooks: Sequence[TrainingHook]):
        self._hooks = tuple(hooks)
        events = [name for name in vars(TrainingHook) if not name.startswith("_")]
        self._of = {
            event: tuple(hook for hook in self._hooks if getattr(type(hook), event) is not getattr(TrainingHook, event))
            for event in events
        }

    def __iter__(self) -> Iterator[TrainingHook]:
        return iter(self._hooks)

    def setup(self, state: TrainingState) -> None:
        for hook in self._of["setup"]:
            hook.setup(state)

    def load(self, state: TrainingState) -> None:
        for hook in self._of["load"]:
            hook.load(state)

    def start(self, state: TrainingState) -> None:
        for hook in self._of["start"]:
            hook.start(state)

    def before_first_step(self, state: TrainingState) -> None:
        for hook in self._of["before_first_step"]:
            hook.before_first_step(state)

    def before_step(self, state: TrainingState) -> None:
        for hook in self._of["before_step"]:
            hook.before_step(state)

    def wants_save(self, state: TrainingState) -> bool:
        wanted = [hook.wants_save(state) for hook in self._of["wants_save"]]  # each is asked, whatever others say
        return any(wanted)

    def gives_up(self, state: TrainingState) -> bool:
        given_up = [hook.gives_up(state) for hook in self._of["gives_up"]]
        return any(given_up)

    def before_optimizer_step(self, state: TrainingState, grad_norm: Tensor) -> None:
        for hook in self._of["before_optimizer_step"]:
            hook.before_optimizer_step(state, grad_norm)

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        for hook in self._of["after_step"]:
            hook.after_step(state, result)

    def finish(self, state: TrainingState) -> None:
        for hook in self._of["finish"]:
            hook.finish(state)

    def on_error(self, state: TrainingState) -> None:
        with ExitStack() as stack:  # all of them, whatever one of them raises
            for hook in reversed(self._of["on_error"]):
                stack.callback(hook.on_error, state)

    def close(self, state: TrainingState) -> None:
        with ExitStack() as stack:  # in the reverse order, and all of them, whatever one of them raises
            for hook in self._of["close"]:
                stack.callback(hook.close, state)

    def log(self, step: int, values: Mapping[str, float | str | None]) -> None:
        for hook in self._of["log"]:
            hook.log(step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        for hook in self._of["evaluated"]:
            hook.evaluated(step, values)

    def message(self, text: str) -> None:
        for hook in self._of["message"]:
            hook.message(text)
