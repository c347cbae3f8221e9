"""The machine that each rank runs on: its clock, its memory, and which of its CPUs the rank may use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.comparisons.majority import wrong_values
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import GatheredFacts, RankFacts
from slurmtrain.runtime.preflight.findings import Fault, Finding


def compare_clocks(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the clocks that are off: each node knows what its clock showed just before and after one moment.

    A clock is off only where that is certain: where its whole interval is away from the others' median. So a process that was
    held up in between is none.
    """
    known = {each.node: each.clock for each in facts.nodes if each.clock is not None}
    if len(known) < 2:
        return
    right = f"at most {expected.clock_offset_s:g} s (preflight.clock_offset_s)"
    if len(known) == 2:  # nobody knows which of the two is right
        (first, one), (second, other) = known.items()
        apart = max(one[0] - other[1], other[0] - one[1])
        if apart > expected.clock_offset_s:
            yield Finding(FindingKind.CLOCK, (first, second), f"their clocks are {apart:.1f} s apart", right)
        return
    middle = median((before + after) / 2 for before, after in known.values())
    for node, interval in known.items():
        off = _distance(interval, middle)
        if abs(off) > expected.clock_offset_s:
            value = f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            yield Finding(FindingKind.CLOCK, (node,), value, right, False, Fault.NODE)


def _distance(interval: tuple[float, float], moment: float) -> float:
    """Return how far an interval is after a moment, or, negative, before it; 0 when the moment is within."""
    before, after = interval
    return before - moment if before > moment else min(0.0, after - moment)


def compare_memory(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes that have less memory than the job has asked for."""
    asked = expected.mem_per_node_gb
    if not asked or not expected.managed:
        return
    found = {
        each.node: f"{each.memory_gb:.0f} GB of memory are available"
        for each in facts.nodes
        if each.memory_gb is not None and each.memory_gb < 0.8 * asked
    }
    yield from wrong_values(FindingKind.MEMORY, found, f"{asked:g} GB (cluster.mem_per_node_gb)", facts, fatal=False)


def compare_cpus(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find ranks that are bound to few CPUs, to those of other ranks, or to those far from their GPU."""
    if not expected.managed:
        return
    few: dict[tuple[str, int], list[int]] = defaultdict(list)
    for each in facts.ranks:
        count = count_of(each.cpus)
        # A rank that may use the whole machine is not bound, and the machine of a sandbox has what it has.
        if count is not None and count < expected.cpus_per_task and count < (each.cpus_of_machine or 0):
            few[each.node, count].append(each.rank)
    for (node, count), ranks in few.items():
        value = f"{'they' if len(ranks) > 1 else 'it'} may run on {count} CPU{'s' if count > 1 else ''}"
        right = f"{expected.cpus_per_task} (cluster.cpus_per_task)"
        yield Finding(FindingKind.CPUS, (node,), value, right, False, Fault.CONFIG, tuple(ranks))
    yield from _sharing_cpus(facts)
    far: dict[tuple[str, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for each in facts.ranks:
        own = each.gpu_numa_node
        if own is not None and own >= 0 and each.numa_nodes and own not in each.numa_nodes:
            far[each.node, own, each.numa_nodes].append(each.rank)
    for (node, own, nodes), ranks in far.items():
        value = f"may run on the socket of NUMA node {', '.join(map(str, nodes))} only"
        right = f"that of node {own}, where its GPU is"
        yield Finding(FindingKind.NUMA, (node,), value, right, False, Fault.CONFIG, tuple(ranks))


def _sharing_cpus(facts: GatheredFacts) -> Iterator[Finding]:
    """Find ranks of a node that are bound to the very same CPUs, fewer than there are ranks: all on the first core, say."""
    sharing: dict[tuple[str, str], list[RankFacts]] = defaultdict(list)
    for each in facts.ranks:
        if each.cpus is not None:
            sharing[each.node, each.cpus].append(each)
    for (node, cpus), ranks in sharing.items():
        count = count_of(cpus) or 0
        bound = count < (ranks[0].cpus_of_machine or 0)
        if bound and len(ranks) > count:
            yield Finding(
                FindingKind.CPUS,
                (node,),
                f"{len(ranks)} ranks share CPU {cpus}",
                "CPUs of their own",
                False,
                Fault.CONFIG,
                tuple(each.rank for each in ranks),
            )


def count_of(cpus: str | None) -> int | None:
    """Return how many CPUs a list of the kernel has, such as "0-3,8"; None if it is none."""
    if not cpus:
        return None
    total = 0
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return None
        total += int(last or first) - int(first) + 1
    return total
