"""How a model is laid over the ranks, in the one order in which the parts fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slurmtrain.config.layout import Layout
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.parallel.ddp import replicate
from slurmtrain.parallel.recompute import prepare_units

if TYPE_CHECKING:
    from slurmtrain.parallel.compression import PowerSGD


@dataclass(frozen=True)
class Laid:
    """A model on its ranks.

    Attributes:
        model: what this rank holds of it, to be optimised and saved; parameters have the names of the whole model.
        stages: what is called: the model, or its pipeline stages on this rank.
        numbers: theirs; `stage_count` is of all stages.
        layout, at: the layout, and this rank's coordinates in it.
        mesh: None for plain replicas.
        compression: of gradients, where it has a state to save.
        shared: parameters that another stage has, too, at the other end of the pipeline: those of a tied embedding.
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
    compression: PowerSGD | None = None
    shared: tuple[nn.Parameter, ...] = ()

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
    """Stages -> tensors and sequences -> activation checkpointing -> compilation -> sharding; or plain replicas.

    Args:
        model: whole, the same on all ranks, or on the meta device.
        group: all ranks; None for a single one.
        fill: brings what this rank holds to its device, with its initial values.

    Raises:
        ConfigError: the model is not made for such a layout.
    """
    if not layout.uses_fsdp(parallel):
        prepare_units(model, parallel)
        model = replicate(fill(model), device, group)
        compression = _compressed(model, parallel, group)
        return Laid(model, (model,), (0,), 1, parallel, layout, rank, device, compression=compression)

    # Importing DTensors, FSDP and pipelines takes more than a second, which replicas do without.
    from slurmtrain.parallel.sharded import build_mesh, shard_stages

    mesh = build_mesh(layout, device)
    numbers, count, stages, shared = [0], 1, [model], []
    if layout.pp > 1:
        from slurmtrain.parallel.pipeline import part, shared_by_ends, stage_numbers

        numbers, count = stage_numbers(layout.coordinates(rank)["pp"], layout.pp, parallel.pp_schedule)
        shared = shared_by_ends(model, count)
        stages = [part(model, [number], count) for number in numbers]
        model = part(model, numbers, count) if len(numbers) > 1 else stages[0]
    shard_stages(stages, parallel, layout, rank, device, mesh)
    model = fill(model)
    held = dict(model.named_parameters())
    return Laid(
        model,
        tuple(stages),
        tuple(numbers),
        count,
        parallel,
        layout,
        rank,
        device,
        mesh,
        shared=tuple(held[name] for name in shared if name in held and held[name].requires_grad),
    )


def _compressed(model: nn.Module, parallel: ParallelConfig, group: dist.ProcessGroup | None) -> PowerSGD | None:
    """Gradients of replicas go through fewer bytes, where that is asked for. Returns what has a state of its own."""
    if group is None or parallel.gradient_compression == "none":
        return None
    from slurmtrain.parallel.compression import compress

    assert isinstance(model, nn.parallel.DistributedDataParallel)
    return compress(model, parallel, group)
