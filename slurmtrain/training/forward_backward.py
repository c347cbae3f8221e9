"""The passes of a step's micro batches, or of a batch to evaluate, through a model: in sequence, or as a pipeline."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slurmtrain.data.loading.batches import (
    IGNORED_TARGET,
    Batch,
    check_for_model,
    concatenate,
    filled,
    padded,
    tokens_per_row,
)
from slurmtrain.data.loading.loader import BatchLoader
from slurmtrain.errors import ConfigError
from slurmtrain.observe.phases import Phase, PhaseClock
from slurmtrain.parallel.ddp import warm_up_ddp_buckets, without_trace
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.parallel.vocabulary import vocabulary_loss_sum

Measure = Callable[[Tensor, Tensor, Batch], Tensor]
"""Logits [B, S, V], targets [B, S] and the batch they belong to -> sums [K]. All are this rank's part: of each sequence its
stretch, of the vocabulary its share."""


class ForwardBackward(Protocol):
    """The forward and backward passes of a model.

    Attributes:
        eval_batch_size: number of sequences of a batch to evaluate.
    """

    eval_batch_size: int

    def train(self, micro_batches: list[Batch], global_tokens: Callable[[], int]) -> Tensor:
        """Run forward and backward of a step.

        Args:
            global_tokens: returns the number of tokens of the step over all ranks.

        Returns:
            The sum of this rank's losses, in nats; over all ranks they add up to that of the step.
        """

    def prepare_evaluation(self, max_length: int) -> None:
        """Prepare for sequences to evaluate of up to `max_length` tokens.

        Raises:
            ConfigError: they are longer than what this model has been set up for.
        """

    def evaluate(self, batch: Batch, measure: Measure) -> Tensor | None:
        """Return what `measure` returns for a batch of up to `eval_batch_size` sequences; None if another rank measures it."""


def build_forward_backward(
    distributed_model: DistributedModel,
    micro_batches: int,
    micro_batch_size: int,
    phases: PhaseClock | None = None,
) -> ForwardBackward:
    """Return the passes that the layout of `distributed_model` needs.

    Args:
        micro_batches: number of micro batches of a step.
        micro_batch_size: number of samples of a micro batch.
        phases: is told when a pass begins and ends to wait for other ranks; None: nobody is.
    """
    if distributed_model.dims.pp > 1:
        return _Pipelined(distributed_model, micro_batches, micro_batch_size)
    return _SequentialSchedule(distributed_model, micro_batch_size, phases or PhaseClock(None))


def warm_up(forward_backward: ForwardBackward, distributed_model: DistributedModel, loader: BatchLoader) -> None:
    """Run a backward pass and discard it, if the first one does what later ones do not.

    DistributedDataParallel regroups its buckets; a pipeline finds out the shapes, for which stages draw random numbers.
    """

    def backward(micro_batches: int) -> None:
        forward_backward.train([loader.example()] * micro_batches, global_tokens=lambda: 1)

    if distributed_model.dims.pp > 1:
        without_trace(distributed_model.model, lambda: backward(loader.accumulation_steps))
    warm_up_ddp_buckets(distributed_model.model, lambda: backward(1))


class _SequentialSchedule:
    """Passes in which every rank computes the whole depth of the model."""

    def __init__(self, distributed_model: DistributedModel, micro_batch_size: int, phases: PhaseClock):
        self._distributed_model, self._model = distributed_model, distributed_model.model
        self.eval_batch_size = micro_batch_size
        self._phases, self._per_token, self._sharing = phases, *_shares(distributed_model)
        self._is_ddp = isinstance(self._model, nn.parallel.DistributedDataParallel)
        self._notes_waits = phases.measures and (self._is_ddp or distributed_model.mesh is not None)

    def train(self, micro_batches: list[Batch], global_tokens: Callable[[], int]) -> Tensor:
        for batch in micro_batches:
            check_for_model(batch)
        total, model = torch.zeros((), device=self._distributed_model.device), cast(Any, self._model)
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            if self._distributed_model.mesh is not None:
                self._communicate(is_last)
            # All micro batches but the last only accumulate, and need no communication.
            with model.no_sync() if self._is_ddp and not is_last else nullcontext():
                total += self._backward(batch, global_tokens)
        return total * self._distributed_model.counts_losses

    def prepare_evaluation(self, max_length: int) -> None:
        """Accept any length."""

    def evaluate(self, batch: Batch, measure: Measure) -> Tensor | None:
        check_for_model(batch)
        own = _own(batch, self._distributed_model, self._sharing)
        sums = measure(self._model(own["inputs"], **_further_arguments(own, self._model)), own["targets"], own)
        return sums if self._distributed_model.counts_losses else None

    def _backward(self, batch: Batch, global_tokens: Callable[[], int]) -> Tensor:
        own = _own(batch, self._distributed_model, self._sharing)
        logits: Tensor = self._model(own["inputs"], **_further_arguments(own, self._model))
        losses = loss_sum(self._distributed_model, logits, own["targets"])
        # Here the sum of the losses is divided by the number of tokens of the whole step.
        weighted = losses * _nan_unless_finite(losses, self._per_token / global_tokens())
        if self._notes_waits:
            weighted.register_hook(self._note_when_computed)
        weighted.backward()  # backward(gradient) would import sympy
        self._phases.enter(Phase.FORWARD_BACKWARD)
        return losses.detach()

    def _note_when_computed(self, gradient: Tensor) -> None:
        """Have the end of the computation noted. Called when the backward pass begins.

        DDP and FSDP wait for their gradients in callbacks at the end of a backward pass, which are called in the order in
        which they were passed in; this one is passed in first.
        """
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._phases.enter(Phase.COMMUNICATION))

    def _communicate(self, last: bool) -> None:
        """Set which communication the next backward pass of a sharded model does.

        Gradients are scattered among shards after each micro batch, since whole ones would take the memory that
        sharding saves; but they are added up over replicas only after the last one.
        """
        model: Any = self._model  # an FSDPModule
        model.set_is_last_backward(last)
        model.set_requires_all_reduce(last)
        # Parameters that forward has kept are kept for the next micro batch, too.
        model.set_reshard_after_backward(last or self._distributed_model.parallel.reshard_after_forward is not False)


class _Pipelined:
    """Passes in which every rank has stages of the model, and micro batches move from rank to rank."""

    def __init__(self, distributed_model: DistributedModel, micro_batches: int, micro_batch_size: int):
        from slurmtrain.parallel.pipeline import Pipeline  # takes half a second to import

        self._distributed_model = distributed_model
        self._micro_batch_size = micro_batch_size
        self.eval_batch_size = micro_batches * micro_batch_size
        self._per_token, self._sharing = _shares(distributed_model)
        self._length: int | None = None  # tokens of a sequence: stages are set up for one shape
        self._last_stage_fn: Callable[[Tensor, Tensor], Tensor]  # where the last stage is, of a micro batch
        self._pipeline = Pipeline(
            distributed_model.stages,
            distributed_model.stage_indices,
            distributed_model.stage_count,
            schedule=distributed_model.parallel.pp_schedule,
            micro_batches=micro_batches,
            device=distributed_model.device,
            group=distributed_model.group("pp"),
            tied_parameters=distributed_model.tied_parameters,
            loss=lambda logits, targets: self._last_stage_fn(logits, targets),
        )

    def train(self, micro_batches: list[Batch], global_tokens: Callable[[], int]) -> Tensor:
        for batch in micro_batches:
            check_for_model(batch)
        whole = concatenate(micro_batches)
        scale = self._per_token / global_tokens()
        if self._length not in (None, tokens_per_row(whole)):
            raise ConfigError(
                f"the samples of a step have up to {tokens_per_row(whole)} tokens, but the stages of the pipeline are set up "
                f"for the {self._length} of the steps before",
                hint="give the data set an attribute seq_len, the length of its longest sample",
            )
        self._length = tokens_per_row(whole)

        def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
            own = loss_sum(self._distributed_model, logits, targets)
            return own * _nan_unless_finite(own, scale)

        self._last_stage_fn = loss_fn
        losses = self._run_pipeline(self._pipeline.train, _own(whole, self._distributed_model, self._sharing))
        total = sum(losses, torch.zeros((), device=self._distributed_model.device))
        return total * self._distributed_model.counts_losses / scale

    def prepare_evaluation(self, max_length: int) -> None:
        if self._length is None:
            self._length = -(-max_length // self._sharing) * self._sharing
        elif max_length > self._length:
            raise ConfigError(
                f"a set to evaluate has sequences of {max_length} tokens, but the stages of the pipeline are set up for the "
                f"{self._length} that they train on",
                hint="cut it into shorter ones, or evaluate in jobs: eval.mode=job eval.parallel.pp=1",
            )

    def evaluate(self, batch: Batch, measure: Measure) -> Tensor | None:
        assert self._length is not None, "prepare_evaluation() has not been called"
        check_for_model(batch)
        whole = filled(padded(batch, self._length), self.eval_batch_size)
        own = _own(whole, self._distributed_model, self._sharing)
        parts = self._micro_batches(own)
        # The last stage gets the micro batches in their order.
        self._last_stage_fn = lambda logits, targets: measure(logits, targets, next(parts))
        sums = self._run_pipeline(self._pipeline.evaluate, own)
        return torch.stack(sums).sum(dim=0) if sums and self._distributed_model.counts_losses else None

    def _run_pipeline(self, run: Callable[..., list[Tensor]], own: Batch) -> list[Tensor]:
        return run(own["inputs"], own["targets"], **_further_arguments(own, self._distributed_model.stages[0]))

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        for first in range(0, self.eval_batch_size, self._micro_batch_size):
            yield {name: tensor[first : first + self._micro_batch_size] for name, tensor in batch.items()}


def _shares(distributed_model: DistributedModel) -> tuple[int, int]:
    """Return two numbers of ranks: those that see other tokens, and those that share the activations of a sequence.

    The first, divided by the number of tokens of a step, is the weight of a token in the loss: gradients are averaged over
    these ranks, but the mean is over all tokens.
    """
    dims = distributed_model.dims
    return dims.dp * dims.cp, dims.sequence_ranks(distributed_model.parallel)


def _nan_unless_finite(loss: Tensor, weight: float) -> Tensor:
    """Return `weight`, or NaN if `loss` is not finite: the gradients then are not finite either, on any rank.

    So the norm of all gradients, which all ranks have anyway, also tells of a loss that only one rank has; and a loss can
    be infinite where its gradient is not.
    """
    value = loss.detach()
    return value - value + weight


def _own(batch: Batch, distributed_model: DistributedModel, sharing: int) -> Batch:
    """Return the batch on this rank's device, with this rank's part of every tensor that has a value per token [B, S, ...].

    Rows are padded so that `sharing` ranks can share them evenly. `documents` stay whole, since which tokens attend to which
    depends on whole sequences.
    """
    length, cp, own = -(-tokens_per_row(batch) // sharing) * sharing, distributed_model.dims.cp, {}
    for name, tensor in padded(batch, length).items():
        if cp > 1 and name != "documents" and tensor.dim() > 1 and tensor.shape[1] == length:
            tensor = tensor.chunk(cp, dim=1)[distributed_model.coordinates["cp"]]
        # From any other memory, a copy waits for all that the GPU still has to do.
        if distributed_model.device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.pin_memory()
        own[name] = tensor.to(distributed_model.device, non_blocking=True)
    return own


def _further_arguments(own: Batch, model: nn.Module) -> dict[str, Tensor]:
    """Return the arguments of the model besides its inputs.

    Raises:
        ConfigError: the model does not take them.
    """
    if "documents" not in own:
        return {}
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if "documents" not in inspect.signature(type(model).forward).parameters:
        raise ConfigError(
            "rows of the data hold several documents, which the model does not tell apart: its forward() has no `documents`",
            hint="set data.document_mask=false to let documents see those before them, or take `documents` as "
            "slurmtrain/models/decoder.py does",
        )
    return {"documents": own["documents"]}


def loss_sum(distributed_model: DistributedModel, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies, in nats, of logits [B, S, V] and targets [B, S]; or of [B, V] and [B]."""
    if distributed_model.dims.tp > 1:
        return vocabulary_loss_sum(logits, targets, distributed_model.group("tp"), IGNORED_TARGET)
    return (_compiled() if distributed_model.parallel.compile else _cross_entropy_sum)(logits, targets)


def _cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    """Return the compiled loss, which never writes float32 copies of the logits, the largest of all activations, to memory."""
    return torch.compile(_cross_entropy_sum)
