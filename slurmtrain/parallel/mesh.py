"""The mesh: torch's process groups for the axes of a layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slurmtrain.config.layout import Layout


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The axes that are in use, and always `dp_shard`. Called by all ranks together.

    Ranks that share sequences hold the same parameters and see other tokens, as shards do; they are shards here.
    """
    if not dist.is_initialized():  # a single rank, whose sharding is a formality
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard * layout.cp,
        "tp": layout.tp,
    }
    names = tuple(axis for axis, size in sizes.items() if size > 1 or axis == "dp_shard")
    return init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part over which gradients are added up: [replicas,] shards."""
    replicas = "dp_replicate" in (mesh.mesh_dim_names or ())
    return mesh["dp_replicate", "dp_shard"] if replicas else mesh["dp_shard"]


def sequence_group(layout: Layout, device: torch.device) -> dist.ProcessGroup:
    """The ranks that share sequences with this one: the axis `cp`, which is a part of `dp_shard` in the mesh."""
    shape = (layout.world_size // (layout.cp * layout.tp), layout.cp, layout.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=("others", "cp", "tp")).get_group("cp")
