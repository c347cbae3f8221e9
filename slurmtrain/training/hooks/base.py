"""What hangs on the training loop: the protocol of hooks, the list that calls them, and the state that they share with it.

    start ─> each step: before_step ─> (forward and backward) ─> before_optimizer_step
                        ─> (the optimiser, while all ranks agree on a decision) ─> after_step
          ─> close

A hook is called on every rank where it is in the list. One that calls collectives has to be in all of them, at the same
place. What is reported goes to the hooks that record, which are no-ops on ranks that write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from slurmtrain.checkpoint.restore.restorer import Restored
from slurmtrain.checkpoint.save.job import SaveResult
from slurmtrain.checkpoint.tensors import not_finite
from slurmtrain.data.loading.loader import BatchLoader
from slurmtrain.observe.phases import PhaseClock, Throughput
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.planner.flops import ModelFlops
from slurmtrain.runs.reasons import Event
from slurmtrain.system.activity import HOOK, doing
from slurmtrain.training.agreement import AgreedDecision, TrainingRanks
from slurmtrain.training.step_numbers import Health, NumbersReader, StepNumbers


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

    def close(self, state: TrainingState) -> None:
        """Release what `start` and later methods have opened, if they have. Called after every ending, in the reverse order.

        After an error, what this method raises is logged, and the first error stays.
        """


class RecordingHook(TrainingHook):
    """A hook of this package that records: it hears of what is reported, and of steps that do not count any more."""

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        """Forget what was noted of the steps after `state.step`, to which training has gone back from `from_step`."""

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
        for method in hooks.of[event]:
            method(*arguments)

    return call


class TrainingHooks:
    """Several hooks in their order, as one. Only methods that a hook overrides are called, so that the rest costs nothing.

    Attributes:
        of: by its name, the methods that are called for an event.
    """

    def __init__(self, hooks: Sequence[TrainingHook]):
        self.of = {
            event: [
                _method(hook, event)
                for hook in hooks
                if isinstance(hook, kind) and getattr(type(hook), event) is not getattr(kind, event)
            ]
            for kind in (TrainingHook, RecordingHook)
            for event in vars(kind)
            if not event.startswith("_")
        }

    start = _in_turn("start")
    rolled_back = _in_turn("rolled_back")
    log = _in_turn("log")
    evaluated = _in_turn("evaluated")
    event = _in_turn("event")
    message = _in_turn("message")

    def close(self, state: TrainingState) -> None:
        with ExitStack() as stack:  # in the reverse order, whatever one of them raises
            for call in self.of["close"]:
                stack.callback(call, state)


def _method(hook: TrainingHook, event: str) -> Callable[..., Any]:
    """Return a method of a hook. One of the user's own may do anything, such as generating text, which is told."""
    method: Callable[..., Any] = getattr(hook, event)
    return method if type(hook).__module__.startswith("slurmtrain.") else doing(HOOK)(method)


class StepResult(NamedTuple):
    """The result of an optimiser step on this rank. Reading `loss_sum` or `grad_norm` waits for the device.

    Attributes:
        loss_sum: sum of this rank's losses, in nats, a scalar on the device; over all ranks they add up to the step's.
        grad_norm: norm of all gradients before they were clipped, a scalar on the device.
        tokens: number of targets of the step over all ranks that are not ignored; at least 1.
        learning_rate: rate of this step.
        decision: what all ranks have agreed to do after this step.
    """

    loss_sum: Tensor
    grad_norm: Tensor
    tokens: int
    learning_rate: float
    decision: AgreedDecision


@dataclass(eq=False)
class TrainingState:
    """The state of an attempt to train, which the loop moves on, and hooks read.

    Some of it is in every checkpoint, as the trainer's own part: see `state_dict`.

    Attributes:
        distributed_model: this rank's part of the model.
        optimizer: updates `parameters`.
        loader: this rank's micro batches.
        ranks: this rank, and its process groups.
        total_steps: step at which training is done.
        hooks: the trainer's, for a hook that has something to report: `state.hooks.message(text)`.
        parameters: those that are trained.
        data_hash: digest of all samples so far, see `data.loading.order`; at first, the name of the data.
        step: steps done, by this attempt and those before it.
        evaluated_at: the last of them after which was evaluated.
        health: what is remembered of the numbers of the steps.
        unread: numbers of the last steps, which nobody has looked at yet; up to date when a checkpoint is written.
        numbers: reads loss and gradient norm of each step two steps later.
        throughput: tokens and seconds of the last steps.
        phases: how long the parts of each step take on this rank.
        flops: operations of the model's training; None: not known.
        first_step: step at which this attempt began.
        restored: the checkpoint that it began from, if any.
        stopping: training ends before the next step. A hook that was interrupted by a stop sets it.
        save_requested: the state after this step is to be saved. A hook that needs a checkpoint of this step sets it.
        finished: all steps are done, and all hooks have finished.
        saved: the checkpoint written last at the end of this attempt, if any.
        metrics: metrics of the last evaluation of this attempt.
        longest_step_s: seconds of the longest step of this attempt.
        has_stepped: this attempt has done a step.
        furthest: step that was reached before, if it is more: by an earlier attempt, or before training went back.
    """

    distributed_model: DistributedModel
    optimizer: Optimizer
    loader: BatchLoader
    ranks: TrainingRanks
    total_steps: int
    hooks: TrainingHooks
    parameters: list[nn.Parameter]
    numbers: NumbersReader
    data_hash: str
    step: int = 0
    evaluated_at: int = 0
    health: Health = field(default_factory=Health)
    unread: list[StepNumbers] = field(default_factory=list)
    throughput: Throughput = field(default_factory=Throughput)
    phases: PhaseClock = field(default_factory=lambda: PhaseClock(None))
    flops: ModelFlops | None = None
    first_step: int = 0
    restored: Restored | None = None
    stopping: bool = False
    save_requested: bool = False
    finished: bool = False
    saved: SaveResult | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    longest_step_s: float = 0.0
    furthest: int = 0
    has_stepped: bool = False

    @property
    def is_last_step(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.total_steps

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "evaluated_at": self.evaluated_at,
            "data_hash": self.data_hash,
            "health": asdict(self.health),
            "unread": [numbers.to_json() for numbers in self.unread],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.evaluated_at = state["step"], state["evaluated_at"]
        self.data_hash = state["data_hash"]
        self.health = Health(**state["health"])
        self.unread = [StepNumbers.from_json(values) for values in state["unread"]]

    def objects(self) -> dict[str, Any]:
        """Return what a checkpoint consists of, as arguments of `Checkpointer.save` and `Checkpointer.restore`."""
        return self.objects_but_loader() | {"loader": self.loader}

    def objects_but_loader(self) -> dict[str, Any]:
        """Return what a checkpoint consists of, besides the position in the data."""
        return {
            "model": self.distributed_model.model,
            "optimizer": self.optimizer,
            "trainer": self,
        }

    def read_numbers(self) -> None:
        """Make `unread` complete before a checkpoint is written. All ranks call it together."""
        self.unread = self.numbers.read_all()

    def is_finite(self) -> bool:
        """Return whether the parameters are finite on all ranks, which call this together before they save."""
        return self.ranks.all_true(
            not not_finite({str(number): parameter for number, parameter in enumerate(self.parameters)})
        )
