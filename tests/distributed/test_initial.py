"""Whatever the layout, each rank draws its own part of the same initial weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from slurmtrain.models import Decoder
from slurmtrain.runtime.distributed_context import DistributedContext
from tests.support.gloo import GlooRanks

# Rows that four ranks do not divide, parts that end within a tile, and more than one tile along both dimensions.
SIZES: dict[str, Any] = {
    "vocab_size": 71, "dim": 36, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "head_dim": 14, "hidden_dim": 2112,
    "max_seq_len": 16, "tie_embeddings": False, "qkv_bias": True, "qk_norm": True,
}  # fmt: skip


def sharded(model: Decoder, mesh: DeviceMesh, dimension: int = 0) -> None:
    def place(parameter: nn.Parameter) -> Shard:
        return Shard(min(dimension, parameter.dim() - 1))

    for block in model.blocks.children():
        fully_shard(block, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)


def tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    columns = ["attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"]
    rows = ["attention.out", "feed_forward.down"]
    for block in model.blocks.children():
        parallelize_module(
            block, mesh, dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
        )
    ends: dict[str, ParallelStyle] = {"embedding": RowwiseParallel()}
    if model.output is not None:
        ends["output"] = ColwiseParallel()
    parallelize_module(model, mesh, ends)


def fsdp(model: Decoder) -> None:
    sharded(model, init_device_mesh("cpu", (4,)))


def fsdp_by_columns(model: Decoder) -> None:
    sharded(model, init_device_mesh("cpu", (4,)), dimension=1)


def hsdp(model: Decoder) -> None:
    sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def fsdp_tp(model: Decoder) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    sharded(model, mesh["dp"])


LAYOUTS: list[Callable[[Decoder], None]] = [fsdp, fsdp_by_columns, hsdp, fsdp_tp]


def draw_in_all_layouts(distributed: DistributedContext) -> dict[str, list[str]]:
    """By layout, the names of the parameters whose bits differ from those of one rank."""
    whole = Decoder(**SIZES)
    whole.initialize(9)
    different = {}
    for lay in LAYOUTS:
        with torch.device("meta"):
            model = Decoder(**SIZES)
        lay(model)
        model.to_empty(device="cpu")
        model.initialize(9)
        wrong = []
        for name, expected in whole.state_dict().items():
            value = model.state_dict()[name]
            assert isinstance(value, DTensor)
            if not torch.equal(value.full_tensor(), expected):
                wrong.append(name)
        different[lay.__name__] = wrong
    return different


def test_every_layout_starts_from_the_bits_of_one_rank(gloo_ranks: GlooRanks) -> None:
    for different in gloo_ranks(4, draw_in_all_layouts):
        assert different == {lay.__name__: [] for lay in LAYOUTS}
