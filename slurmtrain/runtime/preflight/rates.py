"""Which nodes and links are slow, by the rates that ranks have measured: pure functions from rates to findings.

A node is slow if its ranks compute more slowly than the others, or if most of its links are slow. A link is slow if the two
nodes at its ends are not. The median of all decides what is normal, so that nothing has to be known of the hardware.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from slurmtrain.choices import FindingKind
from slurmtrain.planner.peaks import Peak
from slurmtrain.runtime.preflight.facts import distinct_names
from slurmtrain.runtime.preflight.findings import Fault, Finding

MOST_ROUNDS = 8  # of pairs of nodes: each node is measured with so many others at most
NO_PEAK = Peak(None, "not known")
LEAST_LINKS = 2  # of a node, before it can be told from its links
# Of the peak: large products reach half to four fifths of it, and less where a GPU's power is limited (L4).
LEAST_OF_PEAK = 0.4
LEAST_NODES = 3  # that tell how fast a pair of places within a node is


@dataclass(frozen=True)
class RankRates:
    """What a rank has measured.

    Attributes:
        tflops: of a product of two matrices, in 1e12 floating point operations per second; None: not measured.
        all_reduce_gb_per_s, all_gather_gb_per_s: bus bandwidth over all ranks, in 1e9 bytes per second.
        pairs: by partner, the bandwidth one way, in 1e9 bytes per second.
        node_rank: number of its node.
    """

    rank: int
    node: str
    tflops: float | None = None
    all_reduce_gb_per_s: float | None = None
    all_gather_gb_per_s: float | None = None
    pairs: Mapping[int, float] | None = None
    node_rank: int = 0

    def encode(self) -> str:
        """Return it as JSON."""
        pairs = {str(partner): rate for partner, rate in (self.pairs or {}).items()}
        collectives = [self.all_reduce_gb_per_s, self.all_gather_gb_per_s]
        return json.dumps([self.rank, self.node, self.tflops, *collectives, pairs, self.node_rank])

    @classmethod
    def decode(cls, text: str) -> RankRates:
        """Return what `encode` has made."""
        rank, node, tflops, all_reduce, all_gather, pairs, node_rank = json.loads(text)
        by_partner = {int(key): float(rate) for key, rate in pairs.items()}
        return cls(rank, node, tflops, all_reduce, all_gather, by_partner, node_rank)


def by_distinct_nodes(rates: Sequence[RankRates]) -> list[RankRates]:
    """Return the rates of all ranks, in which a node has a name that no other one has."""
    names = distinct_names((each.node_rank, each.node) for each in rates)
    return [replace(each, node=names[each.node_rank, each.node]) for each in rates]


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


def rounds(members: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which each of `members` meets each other once, all pairs of a round at the same time.

    It is the circle method of a round-robin tournament: the first one stays, and the others move on by one place.
    """
    places = list(range(members)) + ([-1] if members % 2 else [])
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def partners(rank: int, nodes: Sequence[Sequence[int]]) -> list[tuple[int | None, bool]]:
    """Return the partner of a rank in each round, and whether it is on the same node; None where it has to wait.

    Args:
        nodes: the ranks of each node.
    """
    mine = next(index for index, ranks in enumerate(nodes) if rank in ranks)
    place = list(nodes[mine]).index(rank)
    found: list[tuple[int | None, bool]] = []
    for pairs in rounds(max(len(ranks) for ranks in nodes)):
        other = next((b if a == place else a for a, b in pairs if place in (a, b)), None)
        there = other is not None and other < len(nodes[mine])
        found.append((nodes[mine][other] if there and other is not None else None, True))
    for pairs in rounds(len(nodes))[:MOST_ROUNDS]:
        other = next((b if a == mine else a for a, b in pairs if mine in (a, b)), None)
        there = other is not None and place < len(nodes[other])
        found.append((nodes[other][place] if there and other is not None else None, False))
    return found


def links_between_nodes(rates: Sequence[RankRates]) -> dict[tuple[str, str], float]:
    """Return the bandwidth between each pair of nodes, the sum of that of their ranks, which was measured at the same time."""
    node_of = {each.rank: each.node for each in rates}
    found: dict[tuple[str, str], float] = defaultdict(float)
    for each in rates:
        for partner, rate in (each.pairs or {}).items():
            if each.rank < partner and node_of.get(partner, each.node) != each.node:
                found[_pair(each.node, node_of[partner])] += rate
    return dict(found)


def links_within_nodes(rates: Sequence[RankRates]) -> dict[tuple[int, int], float]:
    """Return the bandwidth between pairs of ranks of the same node."""
    node_of = {each.rank: each.node for each in rates}
    return {
        (each.rank, partner): rate
        for each in rates
        for partner, rate in (each.pairs or {}).items()
        if each.rank < partner and node_of.get(partner) == each.node
    }


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one <= other else (other, one)


def slow(rates: Sequence[RankRates], stated: Stated) -> list[Finding]:
    """Return the nodes and links that are slow, and what is below that which the cluster's file states."""
    return [*_slow_ranks(rates, stated), *_slow_networks(rates, stated), *_slow_pairs(rates, stated)]


def _slow_ranks(rates: Sequence[RankRates], stated: Stated) -> Iterator[Finding]:
    known = [each for each in rates if each.tflops is not None]
    if stated.shares_cpus:
        best: dict[str, RankRates] = {}
        for each in sorted(known, key=lambda each: each.tflops or 0.0):
            best[each.node] = each
        known = list(best.values())
    if not known:
        return
    usual = median(each.tflops or 0.0 for each in known)
    if stated.peak.tflops is not None and usual < LEAST_OF_PEAK * stated.peak.tflops:
        yield Finding(
            FindingKind.BELOW_STATED,
            tuple(dict.fromkeys(each.node for each in known)),
            f"computes {usual:.3g} TFLOP/s, the median of all ranks",
            f"at least {LEAST_OF_PEAK:.0%} of {stated.peak.tflops:g} TFLOP/s ({stated.peak.why})",
        )
    late: dict[str, list[RankRates]] = defaultdict(list)
    for each in known:
        if (each.tflops or 0.0) < stated.share * usual:
            late[each.node].append(each)
    for node, ranks in late.items():
        least = min(each.tflops or 0.0 for each in ranks)
        yield _slow_node(
            node,
            f"computes {least:.3g} TFLOP/s",
            f"{usual:.3g}, the median",
            stated,
            tuple(each.rank for each in ranks),
        )


def _slow_node(node: str, value: str, expected: str, stated: Stated, ranks: tuple[int, ...] = ()) -> Finding:
    return Finding(FindingKind.SLOW_NODE, (node,), value, expected, stated.excludes, Fault.NODE, ranks)


def _slow_networks(rates: Sequence[RankRates], stated: Stated) -> Iterator[Finding]:
    links = links_between_nodes(rates)
    if not links:
        return
    usual = median(links.values())
    yield from _below("between nodes", usual, stated.network_gb_per_s, "cluster.network_gb_per_s", rates, stated)
    if len(links) < 2:
        return
    late = {pair: rate for pair, rate in links.items() if rate < stated.share * usual}
    of_node: dict[str, list[bool]] = defaultdict(list)
    for pair in links:
        for node in pair:
            of_node[node].append(pair in late)
    slow_nodes = {node for node, each in of_node.items() if len(each) >= LEAST_LINKS and 2 * sum(each) > len(each)}
    # Where a node is slow, so are the links to it, and its partners have most of theirs to others.
    for node in sorted(slow_nodes):
        rate = median(rate for pair, rate in late.items() if node in pair)
        others = len([pair for pair in late if node in pair])
        value = f"its network gives {rate:.3g} GB/s to {others} other nodes"
        yield _slow_node(node, value, f"{usual:.3g} GB/s, the median of all pairs of nodes", stated)
    for pair, rate in sorted(late.items()):
        if not slow_nodes & set(pair):
            value, right = f"{rate:.3g} GB/s between them", f"{usual:.3g} GB/s, the median of all pairs of nodes"
            yield Finding(FindingKind.SLOW_LINK, pair, value, right, pair=pair)


def _slow_pairs(rates: Sequence[RankRates], stated: Stated) -> Iterator[Finding]:
    links = links_within_nodes(rates)
    node_of = {each.rank: each.node for each in rates}
    if not links:
        return
    usual = median(links.values())
    yield from _below("within a node", usual, stated.link_gb_per_s, "cluster.gpu_link_gb_per_s", rates, stated)
    if len(links) < 2:
        return
    # GPUs that NVLink joins two by two, or that are at two sockets, differ by their places on every node alike.
    places = _places(rates)
    alike: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (one, other), rate in links.items():
        alike[places[one], places[other]].append(rate)
    late: dict[str, list[tuple[tuple[int, int], float, float, str]]] = defaultdict(list)
    for pair, rate in links.items():
        same = alike[places[pair[0]], places[pair[1]]]
        known = len(same) >= LEAST_NODES
        right = median(same) if known else usual
        if rate < stated.share * right:
            of = "of this pair on all nodes" if known else "of all pairs within nodes"
            late[node_of[pair[0]]].append((pair, rate, right, of))
    for node, found in sorted(late.items()):
        (one, other), least, right, of = min(found, key=lambda each: each[1] / each[2])
        more = f", and {len(found) - 1} more of its pairs are slow" if len(found) > 1 else ""
        yield Finding(
            FindingKind.SLOW_LINK,
            (node,),
            f"{least:.3g} GB/s between ranks {one} and {other}{more}",
            f"{right:.3g} GB/s, the median {of}",
            ranks=tuple(sorted({rank for pair, *_ in found for rank in pair})),
        )


def _places(rates: Sequence[RankRates]) -> dict[int, int]:
    """Return the place of each rank among those of its node."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for each in rates:
        ranks_of[each.node].append(each.rank)
    return {rank: place for ranks in ranks_of.values() for place, rank in enumerate(sorted(ranks))}


def _below(
    where: str, rate: float, stated_rate: float | None, field: str, rates: Sequence[RankRates], stated: Stated
) -> Iterator[Finding]:
    if stated_rate is not None and rate < stated.share * stated_rate:
        nodes = tuple(dict.fromkeys(each.node for each in rates))
        yield Finding(
            FindingKind.BELOW_STATED,
            nodes,
            f"{rate:.3g} GB/s {where}, the median of all pairs",
            f"at least {stated.share:.0%} of {stated_rate:g} GB/s ({field})",
        )


def summary(rates: Sequence[RankRates]) -> dict[str, Any]:
    """Return the rates of all ranks in short, for preflight.json.

    tflops                       for each rank, in 1e12 operations per second
    all_reduce, all_gather       bus bandwidth over all ranks; the least of all ranks
    links, pairs                 between nodes, [node, node, rate], and between ranks of a node, [rank, rank, rate]
    All rates but tflops are in GB/s.
    """
    reduces = [each.all_reduce_gb_per_s for each in rates if each.all_reduce_gb_per_s is not None]
    gathers = [each.all_gather_gb_per_s for each in rates if each.all_gather_gb_per_s is not None]
    return {
        "tflops": {str(each.rank): each.tflops for each in rates},
        "all_reduce": min(reduces, default=None),
        "all_gather": min(gathers, default=None),
        "links": [[*pair, round(rate, 3)] for pair, rate in sorted(links_between_nodes(rates).items())],
        "pairs": [[*pair, round(rate, 3)] for pair, rate in sorted(links_within_nodes(rates).items())],
    }
