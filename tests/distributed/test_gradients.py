"""The norm of all gradients is one number, wherever their parts lie."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.models import Decoder
from slurmtrain.parallel.gradients import clip_gradients
from slurmtrain.parallel.parallelize import parallelize
from slurmtrain.runtime.distributed_context import DistributedContext
from tests.support.gloo import GlooRanks

SIZES: dict[str, Any] = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 16}


def norms(distributed: DistributedContext, layout: dict[str, int]) -> list[float]:
    """Of gradients that are all 2: as they are, when they are clipped, and afterwards."""
    distributed_model = parallelize(
        Decoder(**SIZES, tie_embeddings=False),
        ParallelConfig(),
        ParallelDims(**layout),
        rank=distributed.environment.rank,
        device=distributed.device,
        group=distributed.device_group,
        fill=lambda held: held,
    )
    parameters = list(distributed_model.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    return [float(clip_gradients(parameters, limit, distributed.device_group)[0]) for limit in (0.0, 1e6, 3.0, 0.0)]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (3, {"dp_shard": 3}),  # parts of unequal size, some of them empty
        (4, {"dp_replicate": 2, "dp_shard": 2}),
        (4, {"dp_replicate": 2, "tp": 2}),
        (4, {"pp": 2, "dp_shard": 2}),
    ],
)
def test_all_parts_count_once_and_are_clipped_alike(gloo_ranks: GlooRanks, ranks: int, layout: dict[str, int]) -> None:
    whole = 2 * math.sqrt(Decoder(**SIZES, tie_embeddings=False).num_parameters())
    for found in gloo_ranks(ranks, norms, layout):
        assert found == pytest.approx([whole, whole, whole, 3.0], rel=1e-5)
