"""Which nodes differ from most of the others, and whose fault that is.

The majority of the nodes decides what is right. Where there is none, as between two nodes that differ, nobody can tell which
of them is at fault, and the finding is the config's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.facts import GatheredFacts
from slurmtrain.runtime.preflight.findings import Fault, Finding


@dataclass(frozen=True)
class Outlier:
    """Nodes that have the same value, which is not that of the others; `others` is None where no value is right."""

    value: Hashable
    nodes: tuple[str, ...]
    others: Hashable | None

    @property
    def fault(self) -> Fault:
        return Fault.NODE if self.others is not None else Fault.CONFIG


def outliers(values: Mapping[str, Hashable]) -> list[Outlier]:
    """Group the nodes whose value is not that of more than half of them; without such a value, all of them."""
    known = {node: value for node, value in values.items() if value is not None}
    counts = Counter(known.values())
    if len(counts) < 2:
        return []
    ((common, count),) = counts.most_common(1)
    right = common if 2 * count > len(known) else None
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for node, value in known.items():
        if value != right:
            groups[value].append(node)
    return [Outlier(value, tuple(nodes), right) for value, nodes in groups.items()]


def fault_of(nodes: Sequence[str], facts: GatheredFacts) -> Fault:
    """Return whose fault something is that these nodes have: that of all of them, or of most, is the config's."""
    return Fault.NODE if len(facts.nodes) == 1 or 2 * len(nodes) <= len(facts.nodes) else Fault.CONFIG


def wrong_values(
    kind: FindingKind, found: Mapping[str, str], expected: str, facts: GatheredFacts, *, fatal: bool
) -> Iterator[Finding]:
    """Yield a finding for each value in `found`, which has the nodes where something is wrong by itself."""
    fault = fault_of(list(found), facts)
    for value, nodes in _by_value(found).items():
        yield Finding(kind, nodes, value, expected, fatal, fault)


def differing_values(
    kind: FindingKind,
    values: Mapping[str, Hashable],
    facts: GatheredFacts,
    *,
    fatal: bool,
    say: Callable[[Hashable], str],
) -> Iterator[Finding]:
    """Yield a finding for each value that is not that of the majority."""
    for odd in outliers(values):
        others = len([value for value in values.values() if value is not None]) - len(odd.nodes)
        right = "the same on all nodes" if odd.others is None else f"{say(odd.others)}, as on most of the others"
        if odd.others is not None and others == 1:
            right = f"{say(odd.others)}, as on the other node"
        yield Finding(kind, odd.nodes, say(odd.value), right, fatal, odd.fault)


def _by_value(found: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the nodes by what was found on them, so that a hundred alike are one finding."""
    groups: dict[str, list[str]] = defaultdict(list)
    for node, value in found.items():
        groups[value].append(node)
    return {value: tuple(nodes) for value, nodes in groups.items()}
