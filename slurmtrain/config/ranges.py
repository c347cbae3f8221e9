"""What a field alone can be: a range of numbers, a form of text, or a range that a person writes, such as nodes 2-4.

These stand in the types of the schema, as in `Annotated[int, Range(1)]`, and `fields` applies them.
"""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import ConfigError, shown

RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?")
NODES_MAX = 65536  # every size of a range is tried
UNPRIVILEGED = 1024  # ports below are root's
HIGHEST = 65535
PROFILED_MAX = 100  # steps in one profile: the trace of a step has megabytes


@dataclass(frozen=True)
class Range:
    """The numbers that a field takes; `hint` says what to write instead of others."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    hint: str | None = None

    def __str__(self) -> str:
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)

    def check(self, key: str, value: Any) -> None:
        """Raise ConfigError if the value is not in the range."""
        if (
            (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        ):
            raise ConfigError(f"{key}={shown(value)} must be {self}", hint=self.hint)


@dataclass(frozen=True)
class Pattern:
    """The form of a text: a regular expression for all of it, and the same in words."""

    regex: str
    what: str
    hint: str

    def check(self, key: str, value: str) -> None:
        """Raise ConfigError if the text has another form."""
        if not re.fullmatch(self.regex, value):
            raise ConfigError(f"{key}={shown(value)!r} is not {self.what}", hint=self.hint)


@dataclass(frozen=True)
class Share:
    """A default that follows train.steps while a field is null: this fraction of them, at least 1 and at most `most`."""

    fraction: float
    most: int

    def of(self, steps: int) -> int:
        """Return the default for a run of so many steps."""
        return max(1, min(self.most, int(steps * self.fraction)))


def share_in(kind: Any) -> Share | None:
    """Return the share of a field's type, if its default follows the number of steps."""
    return next((each for each in typing.get_args(kind) if isinstance(each, Share)), None)


def _ends(key: str, value: str | int, what: str, hint: str) -> tuple[int, int]:
    """Return both ends of the range that a text such as "2-4" or "4" stands for, or raise ConfigError."""
    match = RANGE.fullmatch(str(value))
    if match is None:
        raise ConfigError(f"{key}={value!r} is not {what}", hint=hint)
    first, last = int(match.group(1)), int(match.group(2) or match.group(1))
    if last < first:
        raise ConfigError(f"{key}={value}: {last} is less than {first}", hint=f"{key}={last}-{first}")
    return first, last


@dataclass(frozen=True)
class NodeRange:
    """The nodes that a job may have: from `least` to `most`. Both are the same for a job of a fixed size."""

    least: int
    most: int

    @classmethod
    def parse(cls, value: int | str) -> NodeRange:
        """Return the range that `value`, such as 4 or "2-4", stands for: as many of these nodes as SLURM can give.

        Raises:
            ConfigError: it is no such number or range.
        """
        hint = "cluster.nodes=4, or cluster.nodes=2-4 for as many of them as SLURM can give"
        least, most = _ends("cluster.nodes", value, "a number of nodes or a range of such numbers", hint)
        if not 1 <= least <= most <= NODES_MAX:
            raise ConfigError(f"cluster.nodes={value} must be at least 1 and at most {NODES_MAX}", hint=hint)
        return cls(least, most)

    @property
    def elastic(self) -> bool:
        """Whether SLURM may choose the number."""
        return self.least != self.most

    def __str__(self) -> str:
        """Return the text as sbatch takes it: "4" or "2-4"."""
        return f"{self.least}-{self.most}" if self.elastic else str(self.most)


def ports_of(value: str | int) -> range:
    """Return the TCP ports that a value such as "29000-29100" or 29500 stands for.

    Raises:
        ConfigError: it is no such range, or has ports that a program of a person may not use.
    """
    first, last = _ends("cluster.port_range", value, "a range of ports", "cluster.port_range=29000-29100")
    if first < UNPRIVILEGED or last > HIGHEST:
        raise ConfigError(
            f"cluster.port_range={value} is outside of the ports from {UNPRIVILEGED} to {HIGHEST}, which a program may use",
            hint="cluster.port_range=29000-29100, or the ports that your site has opened between its nodes",
        )
    return range(first, last + 1)


def profiled_steps(value: str) -> tuple[int, int]:
    """Return the first and the last step of observe.profile_steps.

    Raises:
        ConfigError: it is no range of steps, or too long a one.
    """
    hint = "observe.profile_steps=100-102 profiles three steps"
    what = f"a range of 1 to {PROFILED_MAX} steps"
    first, last = _ends("observe.profile_steps", value, what, hint)
    if first < 1 or last - first >= PROFILED_MAX:
        raise ConfigError(f"observe.profile_steps={value!r} is not {what}", hint=hint)
    return first, last
