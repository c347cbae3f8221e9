"""How a model is laid over the ranks, in the one order in which the parts fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from slurmtrain.config.layout import Layout
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.parallel.context import share_sequences
from slurmtrain.parallel.ddp import replicate
from slurmtrain.parallel.mesh import build_mesh, sequence_group, sharding_mesh
from slurmtrain.parallel.pipeline import part, stage_numbers
from slurmtrain.parallel.recompute import compile_unit, recompute
from slurmtrain.parallel.tensor import share_matrices
from slurmtrain.parallel.units import units


@dataclass(frozen=True)
class Laid:
    """A model on its ranks.

    Attributes:
        model: what this rank holds of it, to be optimised and saved; parameters have the names of the whole model.
        stages: what is called: the model, or its pipeline stages on this rank.
        numbers: theirs; `stage_count` is of all stages.
        layout, at: the layout, and this rank's coordinates in it.
        mesh: None for plain replicas.
    """

    model: nn.Module
    stages: tuple[nn.Module, ...]
    numbers: tuple[int, ...]
    stage_count: int
    parallel: ParallelConfig
    layout: Layout
    rank: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def at(self) -> dict[str, int]:
        return self.layout.coordinates(self.rank)

    @property
    def speaks(self) -> bool:
        """This rank's samples count. Others with the same ones, sharing model or sequences, say nothing."""
        return all(self.at[axis] == 0 for axis in ("pp", "cp", "tp"))

    def group(self, axis: str) -> dist.ProcessGroup:
        assert self.mesh is not None
        return self.mesh.get_group(axis)


def lay(
    model: nn.Module,
    parallel: ParallelConfig,
    layout: Layout,
    *,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    fill: Callable[[nn.Module], nn.Module],
) -> Laid:
    """Stages -> tensors and sequences -> activation checkpointing -> compilation -> sharding, or replicas.

    Args:
        model: whole, the same on all ranks, or on the meta device.
        group: all ranks; None for a single one.
        fill: brings what this rank holds to its device, with its initial values.

    Raises:
        ConfigError: the model is not made for such a layout.
    """
    sharded = not layout.replicas_only or parallel.param_dtype is not None or parallel.reduce_dtype != "float32"
    mesh = build_mesh(layout, device) if sharded else None
    sequences = sequence_group(layout, device) if layout.cp > 1 else None
    at = layout.coordinates(rank)
    numbers, count = stage_numbers(at["pp"], layout.pp, parallel.pp_schedule) if layout.pp > 1 else ([0], 1)
    stages = [part(model, [number], count) for number in numbers] if layout.pp > 1 else [model]
    if layout.pp > 1:
        model = part(model, numbers, count) if len(numbers) > 1 else stages[0]
    for stage in stages:
        if mesh is not None and layout.tp > 1:
            share_matrices(stage, mesh["tp"], sequence_parallel=parallel.sequence_parallel)
        if sequences is not None:
            share_sequences(stage, sequences, parallel.cp_method)
        _tell_positions(stage, parallel, layout, at["cp"])
        for unit in _units(stage, parallel):
            if parallel.activation_checkpointing != "none":
                recompute(unit, parallel.activation_checkpointing)
            if parallel.compile:
                compile_unit(unit)
        if mesh is not None:
            _shard(stage, parallel, sharding_mesh(mesh), keep=layout.pp > 1)
    model = fill(model)
    if mesh is None:
        model = replicate(model, device, group)
        stages = [model]
    return Laid(model, tuple(stages), tuple(numbers), count, parallel, layout, rank, device, mesh)


def _units(stage: nn.Module, parallel: ParallelConfig) -> list[nn.Module]:
    return units(stage, parallel.units)


def _shard(stage: nn.Module, parallel: ParallelConfig, mesh: DeviceMesh, *, keep: bool) -> None:
    """FSDP2, or HSDP on a mesh of two axes. Also for replicas of one shard, so that all layouts go one way.

    Args:
        keep: gathered parameters stay until the last micro batch has gone through: stages would gather them for each.
    """
    free = parallel.reshard_after_forward if parallel.reshard_after_forward is not None else not keep
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, parallel.param_dtype) if parallel.param_dtype else None,
        reduce_dtype=getattr(torch, parallel.reduce_dtype),
    )
    for unit in _units(stage, parallel):
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=free)
    # What is left is used first in the forward pass and last, so that freeing it between would be for nothing.
    fully_shard(stage, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def _tell_positions(stage: nn.Module, parallel: ParallelConfig, layout: Layout, stretch: int) -> None:
    """Where the shape of its input does not say at which positions of the sequence a stage works, tell it."""
    if layout.cp == 1 and (layout.pp == 1 or layout.tp == 1 or not parallel.sequence_parallel):
        return
    cut = layout.tp if parallel.sequence_parallel else 1  # of the residual stream, which comes from the stage before

    def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        length = args[0].shape[1] * (cut if args[0].is_floating_point() else 1)
        positions = torch.arange(stretch * length, (stretch + 1) * length, device=args[0].device)
        return args, {**kwargs, "positions_S": positions}

    stage.register_forward_pre_hook(tell, with_kwargs=True)
