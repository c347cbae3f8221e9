"""Measure GPUs and network before training (preflight=full): a product of matrices, an all-reduce, and a ring of messages.

All ranks call it together. Rates are the best of some repetitions: whatever else happens on a machine makes one slower, and
never faster. A node is slow if its ranks compute more slowly than the others, or if both of its links are slow. A link is slow
if the two nodes at its ends are not. The median of all decides what is normal, so that nothing has to be known of the hardware.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from slurmtrain.choices import FindingKind
from slurmtrain.config.schema import Config
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.preflight.compare import Fault, Finding

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
        links: the bandwidth between two nodes in the slower direction, in 1e9 bytes per second.
    """

    node_of: Mapping[int, str]
    tflops: Mapping[int, float]
    all_reduce: float | None
    links: Mapping[Link, float]

    def summary(self) -> dict[str, Any]:
        """Return the rates in short, for preflight.json: those of links as [node, node, rate]."""
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
    found = [json.loads(text) for text in distributed.gather_texts(json.dumps(own))]
    if not found:
        return None
    towards: dict[Link, float] = defaultdict(float)
    for rank, partner in ring.items():  # ranks of a node send at the same time
        towards[node_of[rank], node_of[partner]] += found[rank][2]
    links = {(min(link), max(link)): min(rate, towards.get(link[::-1], rate)) for link, rate in towards.items()}
    all_reduce = min(rates[1] for rates in found) if group is not None else None
    return Rates(node_of, {rank: rates[0] for rank, rates in enumerate(found)}, all_reduce, links)


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


def slow(rates: Rates, config: Config, device: torch.device) -> Iterator[Finding]:
    """Yield the nodes and links that are slow, and whether all links are slower than the cluster's file says."""
    known, links, limits = rates.tflops, rates.links, config.preflight

    def node_finding(node: str, value: str, right: str, ranks: tuple[int, ...] = ()) -> Finding:
        return Finding(FindingKind.SLOW_NODE, (node,), value, right, limits.exclude_slow, Fault.NODE, ranks)

    if device.type != "cuda":  # ranks share the CPUs of their node, so that the fastest of each speaks for it
        fastest = {rates.node_of[rank]: rank for rank in sorted(known, key=lambda rank: known[rank])}
        known = {rank: known[rank] for rank in fastest.values()}
    usual = median(known.values())
    behind = [rank for rank in sorted(known) if known[rank] < limits.slow_share * usual]
    for node in dict.fromkeys(rates.node_of[rank] for rank in behind):
        ranks = tuple(rank for rank in behind if rates.node_of[rank] == node)
        value = f"computes {min(known[rank] for rank in ranks):.3g} TFLOP/s"
        yield node_finding(node, value, f"{usual:.3g}, the median", ranks)
    usual = median(links.values()) if links else 0.0
    right = f"{usual:.3g} GB/s, the median of all pairs of nodes"
    late = {pair: rate for pair, rate in sorted(links.items()) if rate < limits.slow_share * usual}
    # Where a node is slow, so are both links to it, and its partners have another one that is not.
    slow_nodes = {node for node, count in Counter(node for pair in late for node in pair).items() if count > 1}
    for node in sorted(slow_nodes):
        rate = max(rate for pair, rate in late.items() if node in pair)
        yield node_finding(node, f"its network gives {rate:.3g} GB/s to its neighbours", right)
    for pair, rate in late.items():
        if not slow_nodes & set(pair):
            yield Finding(FindingKind.SLOW_LINK, pair, f"{rate:.3g} GB/s between them", right)
    stated = config.cluster.network_gb_per_s
    if links and stated is not None and usual < limits.slow_share * stated:
        right = f"at least {limits.slow_share:.0%} of {stated:g} GB/s (cluster.network_gb_per_s)"
        nodes = tuple(dict.fromkeys(rates.node_of.values()))
        yield Finding(FindingKind.SLOW_NETWORK, nodes, f"{usual:.3g} GB/s between two nodes, the median", right)
