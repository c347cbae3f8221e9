"""How the micro batches of a step go through a model: one after another, or as a pipeline."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slurmtrain.data import IGNORED_TARGET
from slurmtrain.data.loader import Batch
from slurmtrain.errors import ConfigError
from slurmtrain.parallel.ddp import no_sync
from slurmtrain.parallel.lay import Laid
from slurmtrain.parallel.vocabulary import vocabulary_loss_sum


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

    def evaluate(self, batch: Batch) -> Tensor:
        """The sum of the losses of a batch of up to `rows` sequences, as `train` returns it."""


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

    def evaluate(self, batch: Batch) -> Tensor:
        return self._loss_sum(batch) * _is_own(self._laid)

    def _backward(self, batch: Batch, count: Callable[[], int]) -> Tensor:
        loss_sum = self._loss_sum(batch)
        (loss_sum * _scale(self._laid, count)).backward()
        return loss_sum.detach()

    def _loss_sum(self, batch: Batch) -> Tensor:
        inputs, targets, more = _own(batch, self._laid)
        return _loss_sum(self._laid, self._model(inputs, **more), targets)

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
        self._scale = 1.0
        self.rows = micro_batches * micro_batch_size
        self._pipeline = Pipeline(
            laid.stages,
            laid.numbers,
            laid.stage_count,
            schedule=laid.parallel.pp_schedule,
            micro_batches=micro_batches,
            device=laid.device,
            group=laid.group("pp"),
            shared=laid.shared,
            loss=lambda logits, targets: _loss_sum(laid, logits, targets) * self._scale,
        )

    def train(self, micro_batches: list[Batch], count: Callable[[], int]) -> Tensor:
        whole = {name: torch.cat([batch[name] for batch in micro_batches]) for name in _known(micro_batches[0])}
        self._scale = _scale(self._laid, count)
        inputs, targets, more = _own(whole, self._laid)
        return self._sum(self._pipeline.train(inputs, targets, **more)) / self._scale

    def evaluate(self, batch: Batch) -> Tensor:
        self._scale = 1.0
        inputs, targets, more = _own(_filled(batch, self.rows), self._laid)
        return self._sum(self._pipeline.evaluate(inputs, targets, **more))

    def _sum(self, losses: list[Tensor]) -> Tensor:
        return sum(losses, torch.zeros((), device=self._laid.device)) * _is_own(self._laid)


def _scale(laid: Laid, count: Callable[[], int]) -> float:
    """Gradients are averaged over the ranks that see other tokens; the mean wanted is over all tokens of the step."""
    return laid.layout.dp * laid.layout.cp / count()


def _is_own(laid: Laid) -> bool:
    """The ranks that share matrices all have the same loss; the first one's counts."""
    return laid.at["tp"] == 0


def _known(batch: Batch) -> list[str]:
    """The names in `batch` that mean something here."""
    return [name for name in ("inputs", "targets", "documents") if name in batch]


def _own(batch: Batch, laid: Laid) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Inputs and targets [B, S] on this rank's device, of every sequence its stretch; and the model's other arguments.

    Those are `documents`, if there are any, of the whole sequence: who looks at what depends on all of it.

    Raises:
        ConfigError: the model does not take them.
    """
    parts = {name: batch[name] for name in _known(batch)}
    if "documents" in parts:
        _check_takes_documents(laid.stages[0])
    for name in ("inputs", "targets"):
        parts[name] = parts[name].chunk(laid.layout.cp, dim=1)[laid.at["cp"]]
    if laid.device.type == "cuda":  # from any other memory, a copy waits for all that the GPU still has to do
        parts = {name: part.pin_memory() for name, part in parts.items()}
    there = {name: part.to(laid.device, non_blocking=True) for name, part in parts.items()}
    return there.pop("inputs"), there.pop("targets"), there


def _check_takes_documents(model: nn.Module) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if "documents" not in inspect.signature(type(model).forward).parameters:
        raise ConfigError(
            "rows of the data hold several documents, which the model does not tell apart: its forward() has no `documents`",
            hint="set data.document_mask=false to let documents see those before them, or take `documents` as "
            "slurmtrain/models/decoder.py does",
        )


def _loss_sum(laid: Laid, logits: Tensor, targets: Tensor) -> Tensor:
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


def _filled(batch: Batch, rows: int) -> Batch:
    """`batch` with `rows` sequences: a pipeline takes one shape only. Those that are added have no targets."""
    missing = rows - len(batch["inputs"])
    added = {name: batch[name][:1].expand(missing, -1) for name in _known(batch)}
    added["targets"] = torch.full_like(added["targets"], IGNORED_TARGET)
    return {name: torch.cat([batch[name], more]) for name, more in added.items()}
