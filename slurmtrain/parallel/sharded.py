"""A model that is sharded among ranks: the device mesh, and the kinds of parallelism applied to each stage in their order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.parallel.context import apply_context_parallel
from slurmtrain.parallel.tensor import apply_tensor_parallel
from slurmtrain.parallel.units import prepare_units, units


def apply_fsdp(
    stages: Sequence[nn.Module],
    parallel: ParallelConfig,
    dims: ParallelDims,
    rank: int,
    device: torch.device,
    mesh: DeviceMesh,
) -> None:
    """Apply tensor and context parallelism -> activation checkpointing -> compilation -> sharding to each stage, in place."""
    sequences = sequence_group(dims, device) if dims.cp > 1 else None
    for stage in stages:
        if dims.tp > 1:
            apply_tensor_parallel(stage, mesh["tp"], sequence_parallel=parallel.sequence_parallel)
        if sequences is not None:
            apply_context_parallel(stage, sequences, parallel.cp_method)
        _tell_positions(stage, parallel, dims, dims.coordinates(rank)["cp"])
        prepare_units(stage, parallel)
        _shard(stage, parallel, sharding_mesh(mesh), keep=dims.pp > 1)


def reshard(stages: Sequence[nn.Module]) -> None:
    """Free the parameters that a forward pass has gathered, if no backward pass follows that would free them."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def build_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """Return a mesh of the axes that are larger than 1, and always `dp_shard`. Called by all ranks together.

    Ranks that share sequences hold the same parameters and see other tokens, as shards do, so they count as shards
    here.
    """
    if not dist.is_initialized():  # a single rank, whose sharding is a formality
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sizes = {
        "pp": dims.pp,
        "dp_replicate": dims.dp_replicate,
        "dp_shard": dims.dp_shard * dims.cp,
        "tp": dims.tp,
    }
    names = tuple(axis for axis, size in sizes.items() if size > 1 or axis == "dp_shard")
    return _mesh(device, tuple(sizes[name] for name in names), names)


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of the mesh over which gradients are added up: [replicas,] shards."""
    replicas = "dp_replicate" in (mesh.mesh_dim_names or ())
    return mesh["dp_replicate", "dp_shard"] if replicas else mesh["dp_shard"]


def sequence_group(dims: ParallelDims, device: torch.device) -> dist.ProcessGroup:
    """Return the group of the ranks that share sequences with this one.

    It is the axis `cp`, which is a part of `dp_shard` in the mesh.
    """
    shape = (dims.world_size // (dims.cp * dims.tp), dims.cp, dims.tp)
    return _mesh(device, shape, ("others", "cp", "tp")).get_group("cp")


def _mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a new mesh, whose ranks wait for each other as long as all ranks do, and not for torch's default time."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    assert dist.group.WORLD is not None
    everybody = dist.group.WORLD._get_backend(device)
    for name in names if dist.get_backend() != "fake" else ():  # which has no time-out
        _set_pg_timeout(everybody.options._timeout, mesh.get_group(name))
    return mesh


def _shard(stage: nn.Module, parallel: ParallelConfig, mesh: DeviceMesh, *, keep: bool) -> None:
    """Apply FSDP2, or HSDP on a mesh of two axes; also to replicas of one shard, so that all layouts are treated alike.

    Args:
        keep: keep gathered parameters until the last micro batch is through, since stages would gather them for each.
    """
    free = parallel.reshard_after_forward if parallel.reshard_after_forward is not None else not keep
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, parallel.param_dtype) if parallel.param_dtype else None,
        reduce_dtype=getattr(torch, parallel.reduce_dtype),
    )
    for unit in units(stage, parallel.units):
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=free)
    # The other parameters are used at the beginning and at the end of the forward pass, so they are not freed in
    # between.
    fully_shard(stage, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def _tell_positions(stage: nn.Module, parallel: ParallelConfig, dims: ParallelDims, stretch: int) -> None:
    """Pass a stage its positions in the sequence, if they do not follow from the shape of its input."""
    if dims.cp == 1 and (dims.pp == 1 or dims.tp == 1 or not parallel.sequence_parallel):
        return
    cut = dims.tp if parallel.sequence_parallel else 1  # parts of the stream from the stage before

    def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        length = args[0].shape[1] * (cut if args[0].is_floating_point() else 1)
        positions = torch.arange(stretch * length, (stretch + 1) * length, device=args[0].device)
        return args, {**kwargs, "positions_S": positions}

    stage.register_forward_pre_hook(tell, with_kwargs=True)


# Where a sharded model waits for the parameters and gradients of other ranks, for those who measure it.


# On a GPU, gathering goes on beside the computation, which waits for it and copies what has come in the second; gradients
# are laid together in the third, which also waits. On a CPU, all three hold up the rank.
ON_GPU = ("wait_for_unshard", "post_backward")
ON_CPU = ("unshard", *ON_GPU)


def mark_waits(
    stages: Sequence[nn.Module], waiting: Callable[[], AbstractContextManager[None]], *, on_gpu: bool
) -> bool:
    """Call what gathers parameters and scatters gradients within `waiting()`, from now on.

    FSDP2 has no public place for that: the methods of its groups of parameters are wrapped, one object at a time.

    Returns:
        False if this version of torch has no such calls; nothing is changed then.
    """
    found = [group for stage in stages for module in stage.modules() for group in _groups(module)]
    groups = list({id(group): group for group in found}.values())  # several modules may share one
    names = ON_GPU if on_gpu else ON_CPU
    if not groups or not all(callable(getattr(group, name, None)) for group in groups for name in names):
        return False
    for group in groups:
        for name in names:
            setattr(group, name, _within(getattr(group, name), waiting))
    return True


def _groups(module: nn.Module) -> Sequence[Any]:
    """Return the groups of parameters that FSDP2 gathers together for this module."""
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]


def _within(method: Callable[..., Any], waiting: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with waiting():
            return method(*arguments, **named)

    return wrapped
