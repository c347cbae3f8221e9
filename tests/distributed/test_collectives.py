"""What is sent in a step: so many collectives and no more, for a Decoder of L = 2 blocks, which is L + 1 units of FSDP."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.models import Decoder
from slurmtrain.parallel.parallelize import parallelize
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.training.forward_backward import build_forward_backward
from tests.support.gloo import GlooRanks

L = 2
UNITS = L + 1


def counts(distributed: DistributedContext, names: list[str]) -> dict[str, dict[str, int]]:
    """Of each of these cases, which have the same ranks, one after the other."""
    return {name: counts_of(distributed, *CASES[name][1:4]) for name in names}


def counts_of(
    distributed: DistributedContext, layout: dict[str, int], options: dict[str, Any], micro_batches: int
) -> dict[str, int]:
    """Of the second step: the first finds out shapes."""
    torch.manual_seed(0)
    model = Decoder(
        vocab_size=64,
        dim=32,
        n_layers=L,
        n_heads=4,
        n_kv_heads=2,
        max_seq_len=16,
        tie_embeddings=layout.get("pp", 1) == 1,
    )
    distributed_model = parallelize(
        model,
        ParallelConfig(**options),
        ParallelDims(**layout),
        rank=distributed.environment.rank,
        device=distributed.device,
        group=distributed.device_group,
        fill=lambda held: held,
    )
    tokens = torch.randint(64, (1, 16))
    forward_backward = build_forward_backward(distributed_model, micro_batches, 1)
    for _ in range(2):
        with Collectives() as seen:
            forward_backward.train([{"inputs": tokens, "targets": tokens}] * micro_batches, global_tokens=lambda: 1)
    return dict(seen.found)


# What an operation does, and so its name among those of torch.distributed and those of DTensors.
NAMES = {
    **dict.fromkeys(("_allgather_base_", "all_gather_into_tensor"), "gather"),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor"), "scatter"),
    **dict.fromkeys(("allreduce_", "all_reduce"), "sum"),
    "alltoall_base_": "exchange",
    "send": "send",
    "recv_": "receive",
}
SEND_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it will be back with what it is made of
        name = func.name().partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in SEND_NOTHING:
            self.found[NAMES[name]] += 1
        return func(*args, **(kwargs or {}))


def fsdp(micro_batches: int = 1) -> dict[str, int]:
    """The root's parameters are gathered once, those of the blocks once more for backward."""
    return {"gather": micro_batches * (UNITS + L), "scatter": micro_batches * UNITS}


# Forward: attention and feed-forward gather a block's stretches and scatter their sums, the embedding scatters, the output
# gathers. Backward does the same the other way round. The norms' gradients are sums over stretches; the loss takes two.
TP = {"gather": 2 * (2 * L + 1), "scatter": 2 * (2 * L + 1), "sum": 2 * L + 1 + 2}

CASES: dict[str, tuple[int, dict[str, int], dict[str, Any], int, dict[str, int]]] = {
    "FSDP": (2, {"dp_shard": 2}, {}, 1, fsdp()),
    "FSDP, accumulation": (2, {"dp_shard": 2}, {}, 3, fsdp(3)),
    "FSDP, accumulation, nothing freed": (
        2,
        {"dp_shard": 2},
        {"reshard_after_forward": False},
        3,
        {"gather": UNITS, "scatter": 3 * UNITS},
    ),
    "HSDP": (4, {"dp_replicate": 2, "dp_shard": 2}, {}, 1, {**fsdp(), "sum": UNITS}),
    "HSDP, accumulation": (4, {"dp_replicate": 2, "dp_shard": 2}, {}, 3, {**fsdp(3), "sum": UNITS}),
    "TP": (2, {"tp": 2}, {}, 1, TP),
    "TP without sequence parallel": (2, {"tp": 2}, {"sequence_parallel": False}, 1, {"sum": 2 * (2 * L + 1) + 2}),
    "FSDP x TP": (4, {"dp_shard": 2, "tp": 2}, {}, 1, {name: TP[name] + fsdp().get(name, 0) for name in TP}),
    # Keys and values together, once a block, and back as gradients.
    "CP": (2, {"cp": 2}, {}, 1, {"gather": UNITS + L + L, "scatter": UNITS + L}),
    # Queries, keys and values together, and the result back; the same for gradients.
    "CP, ulysses": (2, {"cp": 2}, {"cp_method": "ulysses"}, 1, {**fsdp(), "exchange": 4 * L}),
    # A stage has one block and one of the ends: two units, gathered once and scattered once, however many micro batches.
    "PP x FSDP": (4, {"dp_shard": 2, "pp": 2}, {}, 3, {"gather": 2, "scatter": 2, "send": 3, "receive": 3}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    """What each rank has counted, by case. Those of one size share their ranks."""
    by_name: dict[str, list[dict[str, int]]] = {}
    with GlooRanks(tmp_path_factory.mktemp("collectives")) as ranks:
        for size in sorted({case[0] for case in CASES.values()}):
            names = [name for name, case in CASES.items() if case[0] == size]
            answers = ranks(size, counts, names)
            by_name |= {name: [answer[name] for answer in answers] for name in names}
    return by_name


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_no_more_than_it_has_to(found: dict[str, list[dict[str, int]]], name: str) -> None:
    ranks, *_, expected = CASES[name]
    assert found[name] == [expected] * ranks
