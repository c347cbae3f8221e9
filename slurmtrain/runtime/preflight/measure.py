"""Measure GPUs and network before training (preflight=full): a product of matrices, an all-reduce, and rings of messages.

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
from slurmtrain.planner.peaks import BF16, FP32, Peak, peak_of
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.preflight.findings import Fault, Finding

# Of the peak: large products reach half to four fifths of it, and less where a GPU's power is limited (L4).
LEAST_OF_PEAK = 0.4
LEAST_NODES = 3  # that tell how fast a pair of places within a node is
NO_PEAK = Peak(None, "not known")
Link = tuple[Any, Any]  # two ranks, or two nodes


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        matrix: rows and columns of the two matrices.
        dtype: their type.
        message_bytes: of the all-reduce, and of a message between two ranks.
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
        """The bandwidth between nodes: the sum of that of their ranks, which was measured at the same time."""
        between: dict[Link, float] = defaultdict(float)
        for (rank, partner), rate in self.sent.items():
            if self.node_of[rank] != self.node_of[partner]:
                between[self.node_of[rank], self.node_of[partner]] += rate
        return _both_ways(between)

    @property
    def pairs(self) -> dict[Link, float]:
        """The bandwidth between ranks of a node."""
        return _both_ways({pair: rate for pair, rate in self.sent.items() if len({self.node_of[r] for r in pair}) == 1})

    def summary(self) -> dict[str, Any]:
        """Return the rates in short, for preflight.json.

        tflops          for each rank, in 1e12 operations per second
        all_reduce      bus bandwidth over all ranks
        links, pairs    between nodes, [node, node, rate], and between ranks of a node, [rank, rank, rate]
        All rates but tflops are in GB/s.
        """
        return {
            "tflops": {str(rank): round(rate, 4) for rank, rate in self.tflops.items()},
            "all_reduce": None if self.all_reduce is None else round(self.all_reduce, 4),
            "links": [[*link, round(rate, 3)] for link, rate in sorted(self.links.items())],
            "pairs": [[*pair, round(rate, 3)] for pair, rate in sorted(self.pairs.items())],
        }


def _both_ways(rates: Mapping[Link, float]) -> dict[Link, float]:
    """Return the rate of each pair, that of its slower direction."""
    found: dict[Link, float] = {}
    for (one, other), rate in rates.items():
        pair = (min(one, other), max(one, other))
        found[pair] = min(rate, found.get(pair, rate))
    return found


@dataclass(frozen=True)
class Stated:
    """What the cluster's file says.

    Attributes:
        link_gb_per_s: cluster.gpu_link_gb_per_s, from a GPU to the others of its node.
        network_gb_per_s: cluster.network_gb_per_s, of a node with all its adapters.
        peak: the most that a GPU can do in the type that is measured, by cluster.peak_tflops or its data sheet.
        share: preflight.slow_share.
        excludes: preflight.exclude_slow.
        shares_cpus: ranks compute on the CPUs of their node, so that only whole nodes can be compared.
    """

    link_gb_per_s: float | None = None
    network_gb_per_s: float | None = None
    peak: Peak = NO_PEAK
    share: float = 0.7
    excludes: bool = False
    shares_cpus: bool = False


def stated_by(config: Config, device: torch.device) -> Stated:
    """Return what the config and the data sheet of the device say; cluster.peak_tflops is of the type of the training."""
    cluster, preflight = config.cluster, config.preflight
    peak = peak_of(None, FP32)
    if device.type != "cpu":
        stated = cluster.peak_tflops if config.parallel.param_dtype == BF16 else None
        peak = peak_of(torch.cuda.get_device_name(device), BF16, stated_tflops=stated)
    return Stated(
        cluster.gpu_link_gb_per_s,
        cluster.network_gb_per_s,
        peak,
        share=preflight.slow_share,
        excludes=preflight.exclude_slow,
        shares_cpus=device.type == "cpu",
    )


# Measuring.


def measure(distributed: DistributedContext, node_of: Mapping[int, str] | None) -> Rates | None:
    """Measure, and return all rates on rank 0; None on the others. All ranks call it together.

    Args:
        node_of: node of each rank; None on others than rank 0.
    """
    environment, device, group = distributed.environment, distributed.device, distributed.device_group
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    own = [_tflops(device, sizes)]
    rings = rings_of(environment.tasks_per_node)
    if group is not None:
        message = torch.zeros(sizes.message_bytes // 4, dtype=torch.float32, device=device)
        received, ranks = torch.empty_like(message), environment.world_size
        seconds = _best(distributed, sizes, lambda: dist.all_reduce(message, group=group))
        own.append(2 * (ranks - 1) / ranks * sizes.message_bytes / seconds / 1e9)  # nccl-tests, doc/PERFORMANCE.md
        for ring in rings:
            to = ring.get(environment.rank)
            sender = next((rank for rank, partner in ring.items() if partner == environment.rank), None)
            steps = [dist.P2POp(dist.isend, message, to, group)] if to is not None else []
            steps += [dist.P2POp(dist.irecv, received, sender, group)] if sender is not None else []
            seconds = _best(distributed, sizes, lambda steps=steps: _exchange(steps))  # type: ignore[misc]
            own.append(sizes.message_bytes / seconds / 1e9)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the training has other sizes, and its own peak of memory
        torch.cuda.reset_peak_memory_stats(device)
    mine = torch.tensor(own, dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(environment.world_size)]
    if distributed.control_group is not None:
        dist.all_gather(found, mine, group=distributed.control_group)
    else:
        found = [mine]
    if node_of is None:
        return None
    columns = torch.stack(found).T.tolist()
    sent = {
        (rank, partner): columns[2 + index][rank] for index, ring in enumerate(rings) for rank, partner in ring.items()
    }
    return Rates(node_of, dict(enumerate(columns[0])), min(columns[1]) if group is not None else None, sent)


def rings_of(tasks_per_node: Sequence[int]) -> list[dict[int, int]]:
    """Return to whom each rank sends at the same time: the next of its node, that of the next node, and of the one after."""
    firsts = [sum(tasks_per_node[:index]) for index in range(len(tasks_per_node))]
    places = [(node, place) for node, tasks in enumerate(tasks_per_node) for place in range(tasks)]
    rank_at = {(node, place): firsts[node] + place for node, place in places}
    nodes = len(tasks_per_node)
    rings = [{rank_at[node, place]: rank_at[node, (place + 1) % tasks_per_node[node]] for node, place in places}]
    for step in (1, 2) if nodes > 4 else (1,):
        following = {(node, place): ((node + step) % nodes, place) for node, place in places}
        rings.append({rank_at[one]: rank_at[other] for one, other in following.items() if other in rank_at})
    return [{rank: partner for rank, partner in ring.items() if rank != partner} for ring in rings]


def _tflops(device: torch.device, sizes: Sizes) -> float:
    """Return the rate of a product of two square matrices of n rows, which takes 2 n^3 operations."""
    left = torch.randn(sizes.matrix, sizes.matrix, device=device, dtype=sizes.dtype)
    right = torch.randn_like(left)
    best, began = float("inf"), time.monotonic()
    left @ right
    while time.monotonic() - began < sizes.seconds or best == float("inf"):
        best = min(best, _seconds(device, lambda: left @ right))
    return 2 * sizes.matrix**3 / best / 1e12


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


def slow(rates: Rates, stated: Stated) -> list[Finding]:
    """Return the nodes and links that are slow, and what is below that which the cluster's file states."""
    return [*_slow_ranks(rates, stated), *_slow_networks(rates, stated), *_slow_pairs(rates, stated)]


def _slow_node(node: str, value: str, right: str, stated: Stated, ranks: tuple[int, ...] = ()) -> Finding:
    return Finding(FindingKind.SLOW_NODE, (node,), value, right, stated.excludes, Fault.NODE, ranks)


def _slow_ranks(rates: Rates, stated: Stated) -> Iterator[Finding]:
    known = rates.tflops
    if stated.shares_cpus:  # the fastest rank of each node
        fastest = {rates.node_of[rank]: rank for rank in sorted(known, key=lambda rank: known[rank])}
        known = {rank: known[rank] for rank in fastest.values()}
    usual, peak = median(known.values()), stated.peak
    if peak.tflops is not None and usual < LEAST_OF_PEAK * peak.tflops:
        yield Finding(
            FindingKind.BELOW_STATED,
            tuple(dict.fromkeys(rates.node_of.values())),
            f"computes {usual:.3g} TFLOP/s, the median of all ranks",
            f"at least {LEAST_OF_PEAK:.0%} of {peak.tflops:g} TFLOP/s ({peak.why})",
        )
    late = [rank for rank in sorted(known) if known[rank] < stated.share * usual]
    for node in dict.fromkeys(rates.node_of[rank] for rank in late):
        ranks = tuple(rank for rank in late if rates.node_of[rank] == node)
        value = f"computes {min(known[rank] for rank in ranks):.3g} TFLOP/s"
        yield _slow_node(node, value, f"{usual:.3g}, the median", stated, ranks)


def _slow_networks(rates: Rates, stated: Stated) -> Iterator[Finding]:
    links = rates.links
    if not links:
        return
    usual = median(links.values())
    yield from _below("between nodes", usual, stated.network_gb_per_s, "cluster.network_gb_per_s", rates, stated)
    late = {pair: rate for pair, rate in links.items() if rate < stated.share * usual}
    # Where a node is slow, so are the links to it, and its partners have most of theirs to others.
    slow_nodes = set()
    for node in sorted({node for pair in late for node in pair}):
        its = [pair for pair in links if node in pair]
        slow_ones = [late[pair] for pair in its if pair in late]
        if len(its) > 1 and 2 * len(slow_ones) > len(its):
            slow_nodes.add(node)
            value = f"its network gives {median(slow_ones):.3g} GB/s to {len(slow_ones)} other nodes"
            yield _slow_node(node, value, f"{usual:.3g} GB/s, the median of all pairs of nodes", stated)
    for pair, rate in sorted(late.items()):
        if not slow_nodes & set(pair):
            value, right = f"{rate:.3g} GB/s between them", f"{usual:.3g} GB/s, the median of all pairs of nodes"
            yield Finding(FindingKind.SLOW_LINK, pair, value, right, pair=pair)


def _slow_pairs(rates: Rates, stated: Stated) -> Iterator[Finding]:
    pairs = rates.pairs
    if not pairs:
        return
    usual = median(pairs.values())
    yield from _below("within a node", usual, stated.link_gb_per_s, "cluster.gpu_link_gb_per_s", rates, stated)
    # GPUs that NVLink joins two by two, or that are at two sockets, differ by their places on every node alike.
    first = {node: min(r for r in rates.node_of if rates.node_of[r] == node) for node in rates.node_of.values()}
    alike: dict[tuple[int, int], list[float]] = defaultdict(list)
    place = {pair: tuple(rank - first[rates.node_of[rank]] for rank in pair) for pair in pairs}
    for pair, rate in pairs.items():
        alike[place[pair]].append(rate)
    for pair, rate in sorted(pairs.items()):
        same = alike[place[pair]]
        right, of = (
            (median(same), "this pair on all nodes") if len(same) >= LEAST_NODES else (usual, "all pairs within nodes")
        )
        if rate < stated.share * right:
            value = f"{rate:.3g} GB/s between ranks {pair[0]} and {pair[1]}"
            right_words = f"{right:.3g} GB/s, the median of {of}"
            yield Finding(FindingKind.SLOW_LINK, (rates.node_of[pair[0]],), value, right_words, ranks=pair)


def _below(
    where: str, rate: float, stated_rate: float | None, field: str, rates: Rates, stated: Stated
) -> Iterator[Finding]:
    if stated_rate is not None and rate < stated.share * stated_rate:
        yield Finding(
            FindingKind.BELOW_STATED,
            tuple(dict.fromkeys(rates.node_of.values())),
            f"{rate:.3g} GB/s {where}, the median of all pairs",
            f"at least {stated.share:.0%} of {stated_rate:g} GB/s ({field})",
        )
