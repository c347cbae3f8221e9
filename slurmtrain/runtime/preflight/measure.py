"""Measure GPUs and network before training (preflight=full): a product of matrices, an all-reduce, and a ring of messages.

All ranks call it together. Rates are the best of some repetitions: whatever else happens on a machine makes one slower, and
never faster. A node is slow if its ranks compute more slowly than the others, or if most of its links are slow. A link is slow
if the two nodes at its ends are not. The median of all decides what is normal, so that nothing has to be known of the hardware.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from slurmtrain.choices import FindingKind
from slurmtrain.config.schema import Config
from slurmtrain.planner.gpus import BF16, peak_of
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.preflight.findings import Fault, Finding

# Of the peak: large products reach half to four fifths of it, and less where a GPU's power is limited (L4).
LEAST_OF_PEAK = 0.4
Link = tuple[str, str]  # two nodes


@dataclass(frozen=True)
class Sizes:
    """How much is measured: rows of a matrix and its type, bytes of a message, repetitions, least seconds of the product."""

    matrix: int
    dtype: torch.dtype
    message_bytes: int
    repetitions: int
    seconds: float


ON_GPU = Sizes(8192, torch.bfloat16, 256 << 20, 5, 1.0)
ON_CPU = Sizes(512, torch.float32, 4 << 20, 3, 0.5)


@dataclass(frozen=True)
class Rates:
    """What all ranks have measured.

    Attributes:
        node_of: node of each rank.
        tflops: of each rank, in 1e12 floating point operations per second.
        all_reduce: bus bandwidth over all ranks, in 1e9 bytes per second; None: there is one rank.
        sent: by (rank, partner), the bandwidth from one to the other, in 1e9 bytes per second.
    """

    node_of: Mapping[int, str]
    tflops: Mapping[int, float]
    all_reduce: float | None
    sent: Mapping[tuple[int, int], float]

    @property
    def links(self) -> dict[Link, float]:
        """The bandwidth between two nodes in the slower direction: the sum over their ranks, which send at the same time."""
        between: dict[Link, float] = defaultdict(float)
        for (rank, partner), rate in self.sent.items():
            between[self.node_of[rank], self.node_of[partner]] += rate
        found: dict[Link, float] = {}
        for link, rate in between.items():
            pair = (min(link), max(link))
            found[pair] = min(rate, found.get(pair, rate))
        return found

    def summary(self) -> dict[str, Any]:
        """Return the rates in short, for preflight.json.

        tflops          for each rank, in 1e12 operations per second
        all_reduce      bus bandwidth over all ranks
        links           between nodes, [node, node, rate]
        All rates but tflops are in GB/s.
        """
        return {
            "tflops": {str(rank): round(rate, 4) for rank, rate in self.tflops.items()},
            "all_reduce": None if self.all_reduce is None else round(self.all_reduce, 4),
            "links": [[*link, round(rate, 3)] for link, rate in sorted(self.links.items())],
        }


# Measuring.


def measure(distributed: DistributedContext, node_of: Mapping[int, str]) -> Rates | None:
    """Measure, and return all rates on rank 0; None on the others. All ranks call it together.

    Args:
        node_of: node of each rank; it counts on rank 0 alone.
    """
    environment, device, group = distributed.environment, distributed.device, distributed.device_group
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    left = torch.randn(sizes.matrix, sizes.matrix, device=device, dtype=sizes.dtype)
    right = torch.randn_like(left)
    best, began = _seconds(device, lambda: left @ right), time.monotonic()
    while time.monotonic() - began < sizes.seconds:
        best = min(best, _seconds(device, lambda: left @ right))
    own = [2 * sizes.matrix**3 / best / 1e12]
    ring = ring_of(environment.tasks_per_node)
    if group is not None:
        message = torch.zeros(sizes.message_bytes // 4, dtype=torch.float32, device=device)
        received, ranks = torch.empty_like(message), environment.world_size
        seconds = _best(distributed, sizes, lambda: dist.all_reduce(message, group=group))
        own.append(2 * (ranks - 1) / ranks * sizes.message_bytes / seconds / 1e9)  # nccl-tests, doc/PERFORMANCE.md
        to = ring.get(environment.rank)
        sender = next((rank for rank, partner in ring.items() if partner == environment.rank), None)
        steps = [dist.P2POp(dist.isend, message, to, group)] if to is not None else []
        steps += [dist.P2POp(dist.irecv, received, sender, group)] if sender is not None else []
        own.append(sizes.message_bytes / _best(distributed, sizes, lambda: _exchange(steps)) / 1e9)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the training has other sizes, and its own peak of memory
        torch.cuda.reset_peak_memory_stats(device)
    mine = torch.tensor(own, dtype=torch.float64)
    found = [mine]
    if distributed.control_group is not None:
        found = [torch.empty_like(mine) for _ in range(environment.world_size)]
        dist.all_gather(found, mine, group=distributed.control_group)
    if environment.rank != 0:
        return None
    columns = torch.stack(found).T.tolist()
    sent = {(rank, partner): columns[2][rank] for rank, partner in ring.items()}
    return Rates(node_of, dict(enumerate(columns[0])), min(columns[1]) if group is not None else None, sent)


def ring_of(tasks_per_node: Sequence[int]) -> dict[int, int]:
    """Return to whom each rank sends, all at the same time: to the one at its place on the next node."""
    firsts = [sum(tasks_per_node[:index]) for index in range(len(tasks_per_node))]
    nodes = len(tasks_per_node)
    return {
        firsts[node] + place: firsts[(node + 1) % nodes] + place
        for node in range(nodes if nodes > 1 else 0)
        for place in range(min(tasks_per_node[node], tasks_per_node[(node + 1) % nodes]))
    }


def _exchange(steps: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(steps) if steps else ():
        work.wait()


def _best(distributed: DistributedContext, sizes: Sizes, work: Callable[[], object]) -> float:
    """Return the least seconds of some repetitions, each of which all ranks begin together."""
    work()
    best = float("inf")
    for _ in range(sizes.repetitions):
        dist.barrier(group=distributed.control_group)
        best = min(best, _seconds(distributed.device, work))
    return best


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - began, 1e-9)


# Judging.


def slow(rates: Rates, config: Config, device: torch.device) -> list[Finding]:
    """Return the nodes and links that are slow, and what is below that which the cluster's file or the data sheet states."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return [*_slow_ranks(rates, config, name), *_slow_links(rates, config), *_below_stated(rates, config, name)]


def _slow_node(node: str, value: str, right: str, config: Config, ranks: tuple[int, ...] = ()) -> Finding:
    return Finding(FindingKind.SLOW_NODE, (node,), value, right, config.preflight.exclude_slow, Fault.NODE, ranks)


def _slow_ranks(rates: Rates, config: Config, gpu: str | None) -> Iterator[Finding]:
    known = rates.tflops
    if gpu is None:  # ranks share the CPUs of their node, so that the fastest of each speaks for it
        fastest = {rates.node_of[rank]: rank for rank in sorted(known, key=lambda rank: known[rank])}
        known = {rank: known[rank] for rank in fastest.values()}
    usual = median(known.values())
    late = [rank for rank in sorted(known) if known[rank] < config.preflight.slow_share * usual]
    for node in dict.fromkeys(rates.node_of[rank] for rank in late):
        ranks = tuple(rank for rank in late if rates.node_of[rank] == node)
        value = f"computes {min(known[rank] for rank in ranks):.3g} TFLOP/s"
        yield _slow_node(node, value, f"{usual:.3g}, the median", config, ranks)


def _slow_links(rates: Rates, config: Config) -> Iterator[Finding]:
    share, links = config.preflight.slow_share, rates.links
    usual = median(links.values()) if links else 0.0
    right = f"{usual:.3g} GB/s, the median of all pairs of nodes"
    late = {pair: rate for pair, rate in links.items() if rate < share * usual}
    # Where a node is slow, so are the links to it, and its partners have most of theirs to others.
    slow_nodes = set()
    for node in sorted({node for pair in late for node in pair}):
        its = [pair for pair in links if node in pair]
        slow_ones = [late[pair] for pair in its if pair in late]
        if len(its) > 1 and 2 * len(slow_ones) > len(its):
            slow_nodes.add(node)
            value = f"its network gives {median(slow_ones):.3g} GB/s to {len(slow_ones)} other nodes"
            yield _slow_node(node, value, right, config)
    for pair, rate in sorted(late.items()):
        if not slow_nodes & set(pair):
            yield Finding(FindingKind.SLOW_LINK, pair, f"{rate:.3g} GB/s between them", right, pair=pair)


def _below_stated(rates: Rates, config: Config, gpu: str | None) -> Iterator[Finding]:
    cluster, nodes = config.cluster, tuple(dict.fromkeys(rates.node_of.values()))
    # cluster.peak_tflops is of the type of the training.
    stated = cluster.peak_tflops if gpu is not None and config.parallel.param_dtype == BF16 else None
    peak, usual = peak_of(gpu, BF16, stated_tflops=stated), median(rates.tflops.values())
    if peak.tflops is not None and usual < LEAST_OF_PEAK * peak.tflops:
        value = f"computes {usual:.3g} TFLOP/s, the median of all ranks"
        right = f"at least {LEAST_OF_PEAK:.0%} of {peak.tflops:g} TFLOP/s ({peak.why})"
        yield Finding(FindingKind.BELOW_STATED, nodes, value, right)
    network, share = cluster.network_gb_per_s, config.preflight.slow_share
    if network is not None and rates.links and (usual := median(rates.links.values())) < share * network:
        value = f"{usual:.3g} GB/s between nodes, the median of all pairs"
        right = f"at least {share:.0%} of {network:g} GB/s (cluster.network_gb_per_s)"
        yield Finding(FindingKind.BELOW_STATED, nodes, value, right)
