"""The real model on the real mesh, without GPUs, ranks or memory: torch's fake process group, and meta tensors."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from slurmtrain.config.compose import compose
from slurmtrain.config.layout import layout_of
from slurmtrain.parallel.lay import lay
from slurmtrain.runtime.training_job import build_model

LAYER_72B = (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 29568 * 8192 + 8192 + 2 * 1024) // 64 + 2 * 8192 // 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("rank", "overrides", "text", "elements"),
    [
        (
            0,
            ["cluster.nodes=64", "model=llama3_70b", "parallel=fsdp_tp", "parallel.tp=8"],
            "512 ranks = 64 data-parallel groups (64 shards) x TP 8",
            None,
        ),
        (
            511,
            ["cluster.nodes=64", "model=llama3_70b", "parallel.tp=8", "parallel.pp=8"],
            "512 ranks = 8 data-parallel groups x TP 8 x PP 8",
            None,
        ),
        (
            127,
            ["cluster.nodes=16", "model=qwen2_5_72b", "parallel=fsdp_tp", "parallel.tp=8", "parallel.pp=2"],
            "128 ranks = 8 data-parallel groups (8 shards) x TP 8 x PP 2",
            # 40 layers, the output, and the last norm, which tensor parallelism does not cut.
            40 * LAYER_72B + 152064 * 8192 // 64 + 8192 // 8,
        ),
    ],
)
def test_hundreds_of_ranks_are_laid_out_in_seconds(
    rank: int, overrides: list[str], text: str, elements: int | None
) -> None:
    began = time.monotonic()
    config = compose(["cluster=a100x8", "train.global_batch_size=512", *overrides])
    layout = layout_of(config)
    assert str(layout) == text
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        laid = lay(
            build_model(config),
            config.parallel,
            layout,
            rank=rank,
            device=torch.device("cpu"),
            group=dist.group.WORLD,
            fill=lambda held: held,
        )
        parameters = list(laid.model.parameters())
        assert all(isinstance(parameter, DTensor) and parameter.is_meta for parameter in parameters)
        if elements is not None:
            assert sum(parameter.to_local().numel() for parameter in parameters) == elements
    finally:
        dist.destroy_process_group()
    assert time.monotonic() - began < 10
