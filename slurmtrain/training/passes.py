"""How the micro batches of a step, or a batch to evaluate, go through a model: one after another, or as a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slurmtrain.data import IGNORED_TARGET
from slurmtrain.data.loader import Batch
from slurmtrain.errors import ConfigError
from slurmtrain.parallel.ddp import no_sync
from slurmtrain.parallel.lay import Laid
from slurmtrain.parallel.vocabulary import vocabulary_loss_sum

Measure = Callable[[Tensor, Tensor, Batch], Tensor]
"""Logits [B, S, V], targets [B, S] and the batch they belong to -> sums [K]. All are this rank's part: of each sequence its
stretch, of the vocabulary its share."""


class Passes(Protocol):
    """Attributes:
    rows: sequences of a batch to evaluate.
    """

    rows: int

    def train(self, micro_batches: list[Batch], count: Callable[[], int]) -> Tensor:
        """Forward and backward of a step.

        Args:
            count: tokens of the step over all ranks.

        Returns:
            The sum of this rank's losses, in nats; over all ranks they add up to that of the step.
        """

    def expect(self, length: int) -> None:
        """Sequences to evaluate have up to so many tokens.

        Raises:
            ConfigError: they are longer than what this model has been set up for.
        """

    def evaluate(self, batch: Batch, measure: Measure) -> Tensor | None:
        """What `measure` says of a batch of up to `rows` sequences. None where another rank says it."""


def passes_of(laid: Laid, micro_batches: int, micro_batch_size: int) -> Passes:
    """Args: micro_batches: of a step."""
    if laid.layout.pp > 1:
        return _Pipelined(laid, micro_batches, micro_batch_size)
    return _Straight(laid, micro_batch_size)


class _Straight:
    """Every rank goes through the whole depth of the model."""

    def __init__(self, laid: Laid, micro_batch_size: int):
        self._laid, self._model = laid, laid.model
        self.rows = micro_batch_size

    def train(self, micro_batches: list[Batch], count: Callable[[], int]) -> Tensor:
        total = torch.zeros((), device=self._laid.device)
        for index, batch in enumerate(micro_batches):
            if index == len(micro_batches) - 1:
                self._communicate(True)
                total += self._backward(batch, count)
            else:
                self._communicate(False)
                with no_sync(self._model):
                    total += self._backward(batch, count)
        return total * _is_own(self._laid)

    def expect(self, length: int) -> None:
        """Any length will do."""

    def evaluate(self, batch: Batch, measure: Measure) -> Tensor | None:
        own = _stretches(_lengthened(batch, _even(self._laid, batch["inputs"].shape[1])), self._laid)
        sums = measure(self._model(own["inputs"]), own["targets"], own)
        return sums if _is_own(self._laid) else None

    def _backward(self, batch: Batch, count: Callable[[], int]) -> Tensor:
        loss_sum = self._loss_sum(batch)
        (loss_sum * _scale(self._laid, count)).backward()
        return loss_sum.detach()

    def _loss_sum(self, batch: Batch) -> Tensor:
        inputs, targets = _own(batch, self._laid)
        return loss_sum(self._laid, self._model(inputs), targets)

    def _communicate(self, last: bool) -> None:
        """Gradients are scattered among shards after each micro batch, since whole ones would take the memory that sharding
        saves; but they are added up over replicas only once."""
        if self._laid.mesh is not None:
            model: Any = self._model  # an FSDPModule
            model.set_is_last_backward(last)
            model.set_requires_all_reduce(last)
            # Parameters that forward has kept are kept for the next micro batch, too.
            model.set_reshard_after_backward(last or self._laid.parallel.reshard_after_forward is not False)


class _Pipelined:
    """Every rank has stages of the model; micro batches move from rank to rank."""

    def __init__(self, laid: Laid, micro_batches: int, micro_batch_size: int):
        from slurmtrain.parallel.pipeline import Pipeline  # which takes half a second to import

        self._laid = laid
        self._micro_batch_size = micro_batch_size
        self.rows = micro_batches * micro_batch_size
        self._length: int | None = None  # tokens of a sequence: stages are set up for one shape
        self._at_the_end: Callable[[Tensor, Tensor], Tensor]  # where the last stage is, of a micro batch
        self._pipeline = Pipeline(
            laid.stages,
            laid.numbers,
            laid.stage_count,
            schedule=laid.parallel.pp_schedule,
            micro_batches=micro_batches,
            device=laid.device,
            group=laid.group("pp"),
            loss=lambda logits, targets: self._at_the_end(logits, targets),
        )

    def train(self, micro_batches: list[Batch], count: Callable[[], int]) -> Tensor:
        whole = {name: torch.cat([batch[name] for batch in micro_batches]) for name in ("inputs", "targets")}
        scale = _scale(self._laid, count)
        self._length = whole["inputs"].shape[1]
        self._at_the_end = lambda logits, targets: loss_sum(self._laid, logits, targets) * scale
        return self._sum(self._pipeline.train(*_own(whole, self._laid))) / scale

    def expect(self, length: int) -> None:
        if self._length is None:
            self._length = _even(self._laid, length)
        elif length > self._length:
            raise ConfigError(
                f"a set to evaluate has sequences of {length} tokens, but the stages of the pipeline are set up for the "
                f"{self._length} that they train on",
                hint="cut it into shorter ones, or evaluate in jobs: eval.mode=job eval.parallel.pp=1",
            )

    def evaluate(self, batch: Batch, measure: Measure) -> Tensor | None:
        assert self._length is not None, "expect() has not been called"
        own = _stretches(_filled(_lengthened(batch, self._length), self.rows), self._laid)
        parts = self._micro_batches(own)
        # The last stage gets the micro batches in their order.
        self._at_the_end = lambda logits, targets: measure(logits, targets, next(parts))
        sums = self._pipeline.evaluate(own["inputs"], own["targets"])
        return torch.stack(sums).sum(dim=0) if sums and _is_own(self._laid) else None

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        for first in range(0, self.rows, self._micro_batch_size):
            yield {name: tensor[first : first + self._micro_batch_size] for name, tensor in batch.items()}

    def _sum(self, losses: list[Tensor]) -> Tensor:
        return sum(losses, torch.zeros((), device=self._laid.device)) * _is_own(self._laid)


def _scale(laid: Laid, count: Callable[[], int]) -> float:
    """Gradients are averaged over the ranks that see other tokens; the mean wanted is over all tokens of the step."""
    return laid.layout.dp * laid.layout.cp / count()


def _is_own(laid: Laid) -> bool:
    """The ranks that share matrices all have the same loss; the first one's counts."""
    return laid.at["tp"] == 0


def _own(batch: Batch, laid: Laid) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, S] on this rank's device; of every sequence its stretch."""
    own = _stretches({name: batch[name] for name in ("inputs", "targets")}, laid)
    return own["inputs"], own["targets"]


def _stretches(batch: Batch, laid: Laid) -> Batch:
    """The batch on this rank's device; of everything with a value for each token [B, S, ...] its stretch."""
    length = batch["inputs"].shape[1]

    def own(tensor: Tensor) -> Tensor:
        if tensor.dim() > 1 and tensor.shape[1] == length:
            tensor = tensor.chunk(laid.layout.cp, dim=1)[laid.at["cp"]]
        if laid.device.type == "cuda":  # from any other memory, a copy waits for all that the GPU still has to do
            tensor = tensor.pin_memory()
        return tensor.to(laid.device, non_blocking=True)

    return {name: own(tensor) for name, tensor in batch.items()}


def loss_sum(laid: Laid, logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies, in nats, of logits [B, S, V] and targets [B, S]."""
    if laid.layout.tp > 1:
        return vocabulary_loss_sum(logits, targets, laid.group("tp"), IGNORED_TARGET)
    return (_compiled() if laid.parallel.compile else _cross_entropy_sum)(logits, targets)


def _cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    """The logits are the largest of all activations; compiled, their float32 copies are never written down."""
    return torch.compile(_cross_entropy_sum)


def _even(laid: Laid, length: int) -> int:
    """The least length from `length` on that can be shared by the ranks of a sequence."""
    layout = laid.layout
    sharing = layout.cp * (layout.tp if laid.parallel.sequence_parallel else 1)
    return -(-length // sharing) * sharing


def _lengthened(batch: Batch, length: int) -> Batch:
    """`batch` with `length` tokens a sequence. What is added comes last, as one more document, without targets."""
    have = batch["inputs"].shape[1]

    def longer(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != have:
            return tensor
        added = tensor[:, -1:].expand(-1, length - have, *tensor.shape[2:])
        if name == "documents":
            added = added + 1
        return torch.cat([tensor, torch.full_like(added, IGNORED_TARGET) if name == "targets" else added], dim=1)

    return {name: longer(name, tensor) for name, tensor in batch.items()} if length > have else batch


def _filled(batch: Batch, rows: int) -> Batch:
    """`batch` with `rows` sequences: a pipeline takes one shape only. Those that are added have no targets."""
    missing = rows - len(batch["inputs"])

    def more(name: str, tensor: Tensor) -> Tensor:
        added = tensor[:1].expand(missing, *tensor.shape[1:])
        return torch.cat([tensor, torch.full_like(added, IGNORED_TARGET) if name == "targets" else added])

    return {name: more(name, tensor) for name, tensor in batch.items()} if missing else batch
