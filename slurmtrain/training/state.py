"""What the training loop and its hooks share: the counters, the result of a step, and the state of the attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from slurmtrain.checkpoint.restore.restorer import Restored
from slurmtrain.checkpoint.save.job import SaveResult
from slurmtrain.checkpoint.tensors import not_finite
from slurmtrain.data.loading import order
from slurmtrain.data.loading.loader import BatchLoader
from slurmtrain.observe.phases import PhaseClock
from slurmtrain.observe.throughput import Throughput
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.planner.flops import ModelFlops
from slurmtrain.training.agreement import AgreedDecision, TrainingRanks
from slurmtrain.training.health import Health
from slurmtrain.training.step_numbers import NumbersReader, StepNumbers

if TYPE_CHECKING:
    from slurmtrain.training.hooks.base import TrainingHooks


def all_finite(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether every element of this rank's part of the parameters is a finite number."""
    return not not_finite({str(number): parameter for number, parameter in enumerate(parameters)})


@dataclass
class Counters:
    """The trainer's own part of a checkpoint.

    Attributes:
        data_hash: digest of all samples so far, see `data.loading.order`; None: not known.
        health: what is remembered of the numbers of the steps.
        unread: numbers of the last steps, which nobody has looked at yet; up to date when a checkpoint is written.
    """

    step: int = 0
    evaluated_at: int = 0
    data_hash: str | None = None
    health: Health = field(default_factory=Health)
    unread: list[StepNumbers] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "evaluated_at": self.evaluated_at,
            "data_hash": self.data_hash,
            "health": self.health.to_json(),
            "unread": [numbers.to_json() for numbers in self.unread],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.evaluated_at = state["step"], state["evaluated_at"]
        self.data_hash = state["data_hash"]
        self.health = Health.from_json(state["health"])
        self.unread = [StepNumbers.from_json(values) for values in state["unread"]]


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


@dataclass
class TrainingState:
    """The state of an attempt to train, which the loop moves on, and hooks read.

    Attributes:
        distributed_model: this rank's part of the model.
        optimizer: updates `parameters`.
        loader: this rank's micro batches.
        ranks: this rank, and its process groups.
        total_steps: step at which training is done.
        counters: the trainer's own part of a checkpoint, the steps done among it.
        hooks: the trainer's, for a hook that has something to report: `state.hooks.message(text)`.
        parameters: those that are trained.
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
    """

    distributed_model: DistributedModel
    optimizer: Optimizer
    loader: BatchLoader
    ranks: TrainingRanks
    total_steps: int
    counters: Counters
    hooks: TrainingHooks
    parameters: list[nn.Parameter]
    numbers: NumbersReader
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

    @property
    def step(self) -> int:
        """Steps done, by this attempt and those before it."""
        return self.counters.step

    @property
    def is_last_step(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.total_steps

    def advance(self, digest: list[int]) -> None:
        """Count one more step, whose samples over all ranks have this digest."""
        self.counters.step += 1
        if self.counters.data_hash is not None:
            self.counters.data_hash = order.chained(self.counters.data_hash, digest)

    def objects(self) -> dict[str, Any]:
        """Return what a checkpoint consists of, as arguments of `Checkpointer.save` and `Checkpointer.restore`."""
        return self.objects_but_loader() | {"loader": self.loader}

    def objects_but_loader(self) -> dict[str, Any]:
        """Return what a checkpoint consists of, besides the position in the data."""
        return {
            "model": self.distributed_model.model,
            "optimizer": self.optimizer,
            "trainer": self.counters,
        }

    def begin_at_checkpoint(self) -> None:
        """Bring what is in no object of a checkpoint to the step that was restored, if one was."""
        self.numbers.restore(self.counters.unread)

    def read_numbers(self) -> None:
        """Make `counters.unread` complete before a checkpoint is written. All ranks call it together."""
        self.counters.unread = self.numbers.read_all()

    def is_finite(self) -> bool:
        """Return whether the parameters are finite on all ranks, which call this together before they save."""
        return self.ranks.all_true(all_finite(self.parameters))
