"""Pipeline parallelism: the model is cut into stages, and a step's micro batches go through them one after another.

A stage is the model without the parts that other stages have; its parts keep their names, so a checkpoint does not
depend on stages. A model of your own defines how it is cut by a method

    pipeline_part(numbers: Sequence[int], of: int) -> Module     the part that stages `numbers` of `of` stages have

A parameter may be in the first and in the last stage, as the matrix of a tied embedding: each has a copy, and the
gradients of both are added up, so that they stay the same to the last bit.

The schedules are torch's (torch.distributed.pipelining): GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019),
interleaved 1F1B (Narayanan et al. 2021), zero bubble (Qi et al. 2024, arXiv:2401.10241).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from slurmtrain.choices import PpSchedule
from slurmtrain.config.parallel_dims import STAGES_PER_RANK
from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder
from slurmtrain.parallel.sharded import reshard
from slurmtrain.planner.memory import layers_of_stages

_TORCH_NAMES: dict[str, str] = {
    PpSchedule.GPIPE: "GPipe",
    PpSchedule.ONE_F_ONE_B: "1F1B",
    PpSchedule.INTERLEAVED_1F1B: "Interleaved1F1B",
    PpSchedule.ZERO_BUBBLE: "InterleavedZeroBubble",
}


def stage_numbers(rank: int, ranks: int, schedule: str) -> tuple[list[int], int]:
    """Return the numbers of the stages that rank `rank` of `ranks` ranks of a pipeline has, and the number of all stages."""
    stages = ranks * STAGES_PER_RANK[schedule]
    return list(range(rank, stages, ranks)), stages


def part(model: nn.Module, numbers: Sequence[int], of: int) -> nn.Module:
    """Return the part of `model` that stages `numbers` of `of` have.

    It is another module with the same submodules under the same names.

    Raises:
        ConfigError: the model does not define how it is cut.
    """
    cut = getattr(model, "pipeline_part", None)
    if cut is not None:
        own: nn.Module = cut(numbers, of)
        return own
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"parallel.pp: {type(model).__name__} does not define how to split it into stages",
            hint="give it a method pipeline_part(), see slurmtrain/parallel/pipeline.py, or set parallel.pp=1",
        )
    result = _copy(model)
    ends = [0, *itertools.accumulate(layers_of_stages(len(model.blocks), of))]
    kept = [layer for number in numbers for layer in range(ends[number], ends[number + 1])]
    result.blocks = nn.ModuleDict({str(layer): model.blocks[str(layer)] for layer in kept})
    is_tied_end = of - 1 in numbers and model.output is None
    if 0 not in numbers and not is_tied_end:
        result.embedding = None  # type: ignore[assignment]
    if of - 1 not in numbers:
        result.norm = result.output = None
    return result


def _copy(model: Decoder) -> Decoder:
    """Return a copy of `model` with the same submodules, but with names and hooks of its own."""
    result = object.__new__(type(model))
    result.__dict__ = {name: copy.copy(value) for name, value in model.__dict__.items()}
    return result


def shared_by_ends(model: nn.Module, of: int) -> list[str]:
    """Return the names of the parameters of `model` that the first and the last of `of` stages both have.

    Raises:
        ConfigError: other stages share one, or those two have it under different names.
    """
    parts = [part(model, [number], of) for number in range(of)]
    places: dict[int, list[tuple[int, str]]] = {}
    for number, stage in enumerate(parts):
        for name, parameter in stage.named_parameters():
            places.setdefault(id(parameter), []).append((number, name))
    found = []
    for where in places.values():
        numbers, names = zip(*where, strict=True)
        if len(where) > 1:
            if numbers != (0, of - 1) or len(set(names)) > 1:
                raise ConfigError(
                    f"parallel.pp: stages {', '.join(map(str, numbers))} of {type(model).__name__} share the parameter "
                    f"{' = '.join(dict.fromkeys(names))}",
                    hint="only the first and the last may, under one name: see slurmtrain/parallel/pipeline.py",
                )
            found.append(names[0])
    return sorted(found)


class Pipeline:
    """This rank's stages and the schedule by which they work.

    Args:
        stages: this rank's stages; `stage_indices` are theirs among all stages.
        count: number of all stages.
        micro_batches: number of micro batches of a step.
        tied_parameters: parameters that the other end of the pipeline also has.
        loss: returns the loss of one micro batch's logits and targets; called on the rank of the last stage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        stage_indices: Sequence[int],
        count: int,
        *,
        schedule: str,
        micro_batches: int,
        device: torch.device,
        group: dist.ProcessGroup,
        tied_parameters: Sequence[nn.Parameter] = (),
        loss: Callable[[Tensor, Tensor], Tensor],
    ):
        self._stages = stages
        self._first, self._last = 0 in stage_indices, count - 1 in stage_indices
        self._micro_batches = micro_batches
        self._group, self._tied_parameters = group, tied_parameters
        built = [
            PipelineStage(stage, index, count, device, group=group)
            for stage, index in zip(stages, stage_indices, strict=True)
        ]
        kind: Any = get_schedule_class(_TORCH_NAMES[schedule])
        multiple = issubclass(kind, PipelineScheduleMulti)
        # The loss is divided by the tokens of the whole step, not once more by the number of micro batches.
        self._schedule = kind(
            built if multiple else built[0], n_microbatches=micro_batches, loss_fn=self._noted(loss), scale_grads=False
        )
        self._losses: list[Tensor] = []

    def train(self, inputs: Tensor, targets: Tensor, **more: Tensor) -> list[Tensor]:
        """Run forward and backward of a whole step [micro batches x B, S], and return the losses on the rank of the last stage.

        Args:
            more: further arguments of every stage, beside the output of the one before it.
        """
        losses = self._run(self._schedule.step, inputs, targets, more)
        for parameter in self._tied_parameters:
            assert isinstance(parameter.grad, DTensor)
            self._add_up_ends(parameter.grad.to_local())
        return losses

    def evaluate(self, inputs: Tensor, targets: Tensor, **more: Tensor) -> list[Tensor]:
        """Run the forward pass only; otherwise as `train`."""
        losses = self._run(self._schedule.eval, inputs, targets, more)
        reshard(self._stages)
        return losses

    def _add_up_ends(self, gradient: Tensor) -> None:
        """Add the gradient of the pipeline's other end.

        Both ends add the same two numbers, so they get the same bits.
        """
        peer = self._group.size() - 1 if self._first else 0
        theirs = torch.empty_like(gradient)
        exchange = [
            dist.P2POp(dist.isend, gradient, group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        gradient += theirs

    def _run(self, go: Callable[..., Any], inputs: Tensor, targets: Tensor, more: dict[str, Tensor]) -> list[Tensor]:
        self._losses = []
        go(*([inputs] if self._first else []), **({"target": targets} if self._last else {}), **more)
        return self._losses[-self._micro_batches :]  # torch's very first call is for the shapes

    def _noted(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def noted(logits: Tensor, targets: Tensor) -> Tensor:
            value = loss(logits, targets)
            self._losses.append(value.detach())
            return value

        return noted
