"""What the file RUN/profile asks for: how many steps are profiled, and which ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from slurmtrain.config.fields import PROFILED_MAX
from slurmtrain.errors import ConfigError

DEFAULT_STEPS = 3
HINT = "options of a profile: steps=3 ranks=0,4-7 (or ranks=all) stacks=true"


@dataclass(frozen=True)
class ProfileRequest:
    """What is to be profiled.

    Attributes:
        steps: number of steps, after one that warms the profiler up.
        ranks: ranks that write a trace; None: all.
        stacks: record the Python stack of each operation, which makes steps slower and traces larger.
    """

    steps: int = DEFAULT_STEPS
    ranks: tuple[int, ...] | None = (0,)
    stacks: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the request as plain values."""
        return {"steps": self.steps, "ranks": None if self.ranks is None else list(self.ranks), "stacks": self.stacks}

    def text(self) -> str:
        """Return the content of a file RUN/profile that asks for it."""
        ranks = "all" if self.ranks is None else ",".join(map(str, self.ranks))
        return f"steps={self.steps} ranks={ranks} stacks={str(self.stacks).lower()}"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ProfileRequest:
        """Return the request that `to_json` has described."""
        ranks = values["ranks"]
        return cls(int(values["steps"]), None if ranks is None else tuple(ranks), bool(values["stacks"]))


def parse_request(text: str, default: ProfileRequest) -> ProfileRequest:
    """Return what the content of RUN/profile asks for: words name=value; what they leave out is as in `default`.

    Raises:
        ConfigError: a word cannot be read.
    """
    steps, ranks, stacks = default.steps, default.ranks, default.stacks
    for word in text.split():
        name, equals, value = word.partition("=")
        digits = value.isascii() and value.isdigit() and len(value) < 10
        if name == "steps" and digits and 1 <= int(value) <= PROFILED_MAX:
            steps = int(value)
        elif name == "ranks" and (value == "all" or _ranks(value)):
            ranks = None if value == "all" else _ranks(value)
        elif name == "stacks" and value in ("true", "false"):
            stacks = value == "true"
        else:
            known = name in ("steps", "ranks", "stacks")
            what = f"cannot take {word[:60]!r}" if known or not equals else f"does not know {name[:40]!r}"
            raise ConfigError(f"the file profile {what}", hint=f"{HINT}; at most {PROFILED_MAX} steps")
    return ProfileRequest(steps, ranks, stacks)


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that "0,4-7" names; none if it cannot be read."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (1, 0)
        if last < first:
            return ()
        found.update(range(first, last + 1))
    return tuple(sorted(found))
