"""Distribute a model over the ranks, in the one order in which the kinds of parallelism fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.parallel.ddp import apply_ddp
from slurmtrain.parallel.units import prepare_units


@dataclass(frozen=True)
class DistributedModel:
    """A model distributed over its ranks.

    Attributes:
        model: the part of the model that this rank holds, optimises and saves; parameters have the names of the whole
            model.
        stages: the modules that are called: the model, or its pipeline stages on this rank.
        stage_indices: the stages' indices among all stages.
        stage_count: number of all stages of the pipeline.
        dims: the sizes of all axes.
        rank: number of this rank; `coordinates` is where it stands on each axis.
        mesh: the device mesh; None for plain replicas.
        tied_parameters: parameters that the stage at the other end of the pipeline also has: those of a tied embedding.
    """

    model: nn.Module
    stages: tuple[nn.Module, ...]
    stage_indices: tuple[int, ...]
    stage_count: int
    parallel: ParallelConfig
    dims: ParallelDims
    rank: int
    device: torch.device
    mesh: DeviceMesh | None = None
    tied_parameters: tuple[nn.Parameter, ...] = ()

    @cached_property
    def coordinates(self) -> dict[str, int]:
        return self.dims.coordinates(self.rank)

    @cached_property
    def counts_samples(self) -> bool:
        """Whether this rank counts its samples, as the first of the ranks that share the same samples."""
        return all(self.coordinates[axis] == 0 for axis in ("pp", "cp", "tp"))

    @cached_property
    def counts_losses(self) -> bool:
        """Whether this rank's losses count: ranks that share matrices all have the same, and the first one's count."""
        return self.coordinates["tp"] == 0

    def group(self, axis: str) -> dist.ProcessGroup:
        assert self.mesh is not None
        return self.mesh.get_group(axis)


def parallelize(
    model: nn.Module,
    parallel: ParallelConfig,
    dims: ParallelDims,
    *,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    fill: Callable[[nn.Module], nn.Module],
) -> DistributedModel:
    """Distribute `model` over the ranks.

    The order is: pipeline stages -> tensors and sequences -> activation checkpointing -> compilation -> sharding. If
    the layout needs none of them, the model is wrapped as a plain replica.

    Args:
        model: the whole model, the same on all ranks, or on the meta device.
        group: all ranks; None for a single one.
        fill: moves the part that this rank holds to its device and gives it its initial values.

    Raises:
        ConfigError: the model does not support such a layout.
    """
    if not dims.uses_fsdp(parallel):
        prepare_units(model, parallel)
        model = apply_ddp(fill(model), device, group)
        return DistributedModel(model, (model,), (0,), 1, parallel, dims, rank, device)

    # Importing DTensors, FSDP and pipelines takes more than a second, which replicas do without.
    from slurmtrain.parallel.sharded import apply_fsdp, build_mesh

    mesh = build_mesh(dims, device)
    stage_indices, count, stages, shared = [0], 1, [model], []
    if dims.pp > 1:
        from slurmtrain.parallel.pipeline import part, shared_by_ends, stage_numbers

        stage_indices, count = stage_numbers(dims.coordinates(rank)["pp"], dims.pp, parallel.pp_schedule)
        shared = shared_by_ends(model, count)
        stages = [part(model, [index], count) for index in stage_indices]
        model = part(model, stage_indices, count) if len(stage_indices) > 1 else stages[0]
    apply_fsdp(stages, parallel, dims, rank, device, mesh)
    model = fill(model)
    held = dict(model.named_parameters())
    return DistributedModel(
        model,
        tuple(stages),
        tuple(stage_indices),
        count,
        parallel,
        dims,
        rank,
        device,
        mesh,
        tied_parameters=tuple(held[name] for name in shared if name in held and held[name].requires_grad),
    )
