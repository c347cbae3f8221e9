"""The ports on which ranks meet, as a person writes them: 29000-29100."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurmtrain.errors import ConfigError

PORTS = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?")
UNPRIVILEGED = 1024  # ports below are root's
HIGHEST = 65535


@dataclass(frozen=True)
class PortRange:
    """The TCP ports from `first` to `last`, both of them included."""

    first: int
    last: int

    @classmethod
    def parse(cls, value: str | int) -> PortRange:
        """Return the range that `value`, such as "29000-29100" or 29500, stands for.

        Raises:
            ConfigError: it is no such range, or has ports that a program of a person may not use.
        """
        match = PORTS.fullmatch(str(value))
        if match is None:
            raise ConfigError(
                f"cluster.port_range={value!r} is not a range of ports", hint="cluster.port_range=29000-29100"
            )
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if last < first:
            raise ConfigError(
                f"cluster.port_range={value}: {last} is less than {first}", hint=f"cluster.port_range={last}-{first}"
            )
        if first < UNPRIVILEGED or last > HIGHEST:
            raise ConfigError(
                f"cluster.port_range={value} is outside of the ports from {UNPRIVILEGED} to {HIGHEST}, which a program may use",
                hint="cluster.port_range=29000-29100, or the ports that your site has opened between its nodes",
            )
        return cls(first, last)

    def ports_from(self, start: int) -> list[int]:
        """Return all ports of the range once, beginning with the one at place `start`, and going on at its beginning."""
        ports = range(self.first, self.last + 1)
        at = start % len(ports)
        return [*ports[at:], *ports[:at]]

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"
