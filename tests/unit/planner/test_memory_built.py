"""The arithmetic of memory against sums by hand, and against the real model on the real mesh, without GPUs or other ranks."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.parallel.parallelize import parallelize
from slurmtrain.planner.fit import memory_of
from slurmtrain.planner.memory import StageMemory
from slurmtrain.rank.jobs.build_model import build_model

pytestmark = pytest.mark.filterwarnings("ignore")

FLOAT32 = 4  # bytes of an element: parameter, gradient, two moments of Adam


def counted(config: Config) -> list[StageMemory]:
    stages = memory_of(config, parallel_dims_of(config))
    assert stages is not None
    return stages


def built(config: Config) -> list[tuple[int, int]]:
    """Return the bytes of parameters, and of gradients, that the first rank of each stage holds, by building its part."""
    dims, found = parallel_dims_of(config), []
    for stage in range(dims.pp):
        rank = stage * dims.world_size // dims.pp
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
        try:
            model = parallelize(
                build_model(config),
                msgspec.structs.replace(config.parallel, compile=False),
                dims,
                rank=rank,
                device=torch.device("cpu"),
                group=None,
                fill=lambda held: held,
            ).model
        finally:
            dist.destroy_process_group()
        held = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
        sizes = [(each.nbytes, whole.requires_grad) for each, whole in zip(held, model.parameters(), strict=True)]
        found.append((sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)))
    return found


def test_of_a_model_with_adapters_these_alone_have_gradients() -> None:
    pytest.importorskip("peft")
    config = compose(["cluster=a100x4", "model=llama3_1b", "parallel=fsdp", "lora.r=8"])
    (expected,) = counted(config)
    attention, feed_forward = (2048 + 2048) * 2 + (2048 + 512) * 2, (2048 + 8192) * 3
    adapters = 16 * 8 * (attention + feed_forward) // 4  # 16 layers, on one of four ranks
    assert expected.gradients == FLOAT32 * adapters and expected.optimizer == 2 * FLOAT32 * adapters
    assert expected.parameters == FLOAT32 * (1_235_814_400 // 4 + adapters)
    assert built(config) == [(expected.parameters, expected.gradients)]


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.tp=1"],
        ["parallel=hsdp", "cluster.nodes=2", "parallel.dp_shard=4"],
        ["parallel=fsdp", "parallel.cp=2", "parallel.tp=2", "model.qkv_bias=true", "model.tie_embeddings=true"],
        ["parallel.pp=2", "parallel.pp_schedule=interleaved_1f1b", "model.n_layers=5", "model.tie_embeddings=true"],
    ],
    ids=" ".join,
)
def test_arithmetic_agrees_with_the_model_that_is_built(words: list[str]) -> None:
    base = ["cluster=a100x8", "model.tie_embeddings=false", "model.n_kv_heads=2", "train.global_batch_size=64"]
    config = compose([*base, *words])
    assert built(config) == [(stage.parameters, stage.gradients) for stage in counted(config)]
