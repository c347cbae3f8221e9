"""The number of nodes as a person writes it: 4, or 2-4 for as many of them as SLURM can give."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.errors import ConfigError

NODES = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


@dataclass(frozen=True)
class NodeRange:
    """The nodes that a job may have: from `least` to `most`. Both are the same for a job of a fixed size."""

    least: int
    most: int

    @classmethod
    def parse(cls, value: int | str) -> NodeRange:
        """Return the range that `value`, such as 4 or "2-4", stands for.

        Raises:
            ConfigError: it is no such number or range.
        """
        if isinstance(value, int):
            return cls(value, value)
        match = NODES.fullmatch(value)
        if match is None:
            raise ConfigError(
                f"cluster.nodes={value!r} is neither a number of nodes nor a range",
                hint="cluster.nodes=4, or cluster.nodes=2-4 for as many of them as SLURM can give",
            )
        least, most = int(match.group(1)), int(match.group(2) or match.group(1))
        if most < least:
            raise ConfigError(
                f"cluster.nodes={value}: {most} is less than {least}", hint=f"cluster.nodes={most}-{least}"
            )
        return cls(least, most)

    @property
    def elastic(self) -> bool:
        """Whether SLURM may choose the number."""
        return self.least != self.most

    @property
    def value(self) -> int | str:
        """The value of the field: a plain number where there is nothing to choose."""
        return str(self) if self.elastic else self.most

    def larger(self, spares: int) -> NodeRange:
        """Return the range with so many nodes more."""
        return NodeRange(self.least + spares, self.most + spares)

    def __str__(self) -> str:
        """Return the text as sbatch takes it: "4" or "2-4"."""
        return f"{self.least}-{self.most}" if self.elastic else str(self.most)


def nodes_to_use(sizes: Sequence[int], given: int) -> int | None:
    """Return the number of nodes that ranks run on, of `given` ones: the largest of `sizes` that is not above them.

    The result is None if there are too few.
    """
    return max((size for size in sizes if size <= given), default=None)
