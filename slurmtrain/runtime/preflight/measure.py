"""Measure GPUs and network before training (preflight=full): a product of matrices, two collectives, and pairs of ranks.

All ranks call it together. Rates are the best of some repetitions: whatever else happens on a machine makes one slower, and
never faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from slurmtrain.config.schema import Config
from slurmtrain.planner.peaks import BF16, FP32, Peak, peak_of
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.preflight.exchange import Exchange
from slurmtrain.runtime.preflight.findings import Finding
from slurmtrain.runtime.preflight.rates import RankRates, Stated, by_distinct_nodes, partners, slow, summary


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        matrix: rows and columns of the two matrices.
        dtype: their type.
        message_bytes: of a collective, and of a message between two ranks.
        repetitions: of each of them, after one that does not count.
        seconds: for the product of matrices, at least.
    """

    matrix: int
    dtype: torch.dtype
    message_bytes: int
    repetitions: int
    seconds: float


ON_GPU = Sizes(8192, torch.bfloat16, 256 << 20, 5, 1.0)
ON_CPU = Sizes(512, torch.float32, 4 << 20, 3, 0.5)


def measure(
    config: Config, distributed: DistributedContext, exchange: Exchange | None
) -> tuple[list[Finding], dict[str, Any] | None]:
    """Measure, and return on rank 0 what is slow, and all rates; nothing on the others."""
    environment, cluster = distributed.environment, config.cluster
    own = measured_by(distributed, ON_GPU if distributed.device.type == "cuda" else ON_CPU)
    if distributed.device.type == "cuda":
        torch.cuda.empty_cache()  # the training has other sizes, and its own peak of memory
        torch.cuda.reset_peak_memory_stats(distributed.device)
    rates = [own]
    if exchange is not None:
        exchange.send("rates", own.encode())
        if environment.rank != 0:
            return [], None
        rates = by_distinct_nodes([RankRates.decode(each) for each in exchange.collect("rates")])
    stated = Stated(
        cluster.gpu_link_gb_per_s,
        cluster.network_gb_per_s,
        _peak(config, distributed.device),
        share=config.preflight.slow_share,
        excludes=config.preflight.exclude_slow,
        shares_cpus=distributed.device.type == "cpu",
    )
    return slow(rates, stated), summary(rates)


def _peak(config: Config, device: torch.device) -> Peak:
    """Return the most that a GPU can do in the type that is measured; cluster.peak_tflops is of the type of the training."""
    if device.type == "cpu":
        return peak_of(None, FP32)
    stated = config.cluster.peak_tflops if config.parallel.param_dtype == BF16 else None
    return peak_of(torch.cuda.get_device_name(device), BF16, stated_tflops=stated)


def measured_by(distributed: DistributedContext, sizes: Sizes) -> RankRates:
    """Return the rates of this rank. All ranks call it together."""
    environment, device = distributed.environment, distributed.device
    tflops = round(_tflops(device, sizes), 4)
    if distributed.device_group is None:
        return RankRates(environment.rank, environment.node, tflops)
    nodes = ranks_of_nodes(environment.tasks_per_node)
    return RankRates(
        environment.rank,
        environment.node,
        tflops,
        all_reduce_gb_per_s=round(_all_reduce(distributed, sizes), 4),
        all_gather_gb_per_s=round(_all_gather(distributed, sizes), 4),
        pairs=_pairs(distributed, sizes, nodes),
        node_rank=environment.node_rank,
    )


def ranks_of_nodes(tasks_per_node: Sequence[int]) -> list[range]:
    """Return the ranks of each node."""
    found, first = [], 0
    for tasks in tasks_per_node:
        found.append(range(first, first + tasks))
        first += tasks
    return found


def _tflops(device: torch.device, sizes: Sizes) -> float:
    """Return the rate of a product of two square matrices of n rows, which takes 2 n^3 operations."""
    left = torch.randn(sizes.matrix, sizes.matrix, device=device, dtype=sizes.dtype)
    right = torch.randn_like(left)
    best, began = float("inf"), time.monotonic()
    left @ right
    while time.monotonic() - began < sizes.seconds or best == float("inf"):
        best = min(best, _seconds(device, lambda: left @ right))
    return 2 * sizes.matrix**3 / best / 1e12


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    _wait_for(device)
    began = time.perf_counter()
    work()
    _wait_for(device)
    return max(time.perf_counter() - began, 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _message(distributed: DistributedContext, size_bytes: int) -> torch.Tensor:
    return torch.zeros(size_bytes // 4, dtype=torch.float32, device=distributed.device)


def _best(distributed: DistributedContext, sizes: Sizes, work: Callable[[], object]) -> float:
    """Return the least seconds of some repetitions of a collective, each of which all ranks begin together."""
    work()
    best = float("inf")
    for _ in range(sizes.repetitions):
        dist.barrier(group=distributed.control_group)
        best = min(best, _seconds(distributed.device, work))
    return best


def _all_reduce(distributed: DistributedContext, sizes: Sizes) -> float:
    """Return its bus bandwidth: 2 (n - 1) / n times bytes over seconds (nccl-tests, doc/PERFORMANCE.md)."""
    message, ranks = _message(distributed, sizes.message_bytes), distributed.environment.world_size
    seconds = _best(distributed, sizes, lambda: dist.all_reduce(message, group=distributed.device_group))
    return 2 * (ranks - 1) / ranks * sizes.message_bytes / seconds / 1e9


def _all_gather(distributed: DistributedContext, sizes: Sizes) -> float:
    """Return its bus bandwidth: (n - 1) / n times all bytes over seconds (nccl-tests, doc/PERFORMANCE.md)."""
    ranks = distributed.environment.world_size
    part = _message(distributed, max(4, sizes.message_bytes // ranks))
    parts = [torch.empty_like(part) for _ in range(ranks)]
    seconds = _best(distributed, sizes, lambda: dist.all_gather(parts, part, group=distributed.device_group))
    return (ranks - 1) / ranks * ranks * part.nbytes / seconds / 1e9


def _pairs(distributed: DistributedContext, sizes: Sizes, nodes: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return the bandwidth to each partner: first those of this node, then the same place on other nodes."""
    rank, message = distributed.environment.rank, _message(distributed, sizes.message_bytes)
    found: dict[int, float] = {}
    for partner, _ in partners(rank, nodes):
        dist.barrier(group=distributed.control_group)
        if partner is None:
            continue
        best = float("inf")
        for repetition in range(sizes.repetitions + 1):
            work = partial(_there_and_back, message, rank, partner, distributed)
            seconds = _seconds(distributed.device, work)
            best = min(best, seconds) if repetition else best
        found[partner] = round(2 * sizes.message_bytes / best / 1e9, 4)
    return found


def _there_and_back(message: torch.Tensor, rank: int, partner: int, distributed: DistributedContext) -> None:
    """Send a message from the lower of two ranks to the higher, and back."""
    group = distributed.device_group
    for sends in (rank < partner, rank > partner):
        if sends:
            dist.send(message, partner, group=group)
        else:
            dist.recv(message, partner, group=group)
