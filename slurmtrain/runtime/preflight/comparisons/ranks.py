"""Whether all ranks have been told the same size of the job, and each a number of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import GatheredFacts
from slurmtrain.runtime.preflight.findings import Finding


def compare_ranks(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find ranks that count the ranks of the job differently, and numbers that several processes have."""
    wrong = [each for each in facts.ranks if each.world_size != expected.world_size]
    if wrong:
        sizes = ", ".join(str(size) for size in dict.fromkeys(each.world_size for each in wrong))
        yield Finding(
            FindingKind.RANKS,
            tuple(dict.fromkeys(each.node for each in wrong)),
            f"it was told that the job has {sizes} ranks",
            f"{expected.world_size} ranks",
            fatal=True,
            ranks=tuple(each.rank for each in wrong),
        )
    for rank, count in Counter(each.rank for each in facts.ranks).items():
        if count > 1:
            nodes = tuple(dict.fromkeys(each.node for each in facts.ranks if each.rank == rank))
            yield Finding(
                FindingKind.RANKS, nodes, f"{count} processes are rank {rank}", "one", fatal=True, ranks=(rank,)
            )
