"""Facts about the processes of this host, from the kernel."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stat:
    """The contents of /proc/<pid>/stat (`man 5 proc`).

    Attributes:
        state: a letter; Z is a zombie, which has ended and waits for its parent to ask.
        parent: pid of the parent.
        start: start time in clock ticks since boot; together with the pid, it is never used twice.
    """

    state: str
    parent: int
    start: int

    @property
    def ended(self) -> bool:
        return self.state in "ZX"


def stat(pid: int | str) -> Stat | None:
    """Return the facts of a process, or None if it does not exist or is hidden.

    A machine may hide processes of other users (hidepid=1).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything, also spaces
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def stats() -> dict[int, Stat]:
    """Return the facts of every process, including zombies, by pid."""
    found = {int(entry): stat(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    return {pid: known for pid, known in found.items() if known is not None}


def lives(pid: int) -> bool:
    """Return whether there is such a process.

    A process that was killed stays as a zombie if nobody reaps orphans, as in many containers; a zombie does not count.
    """
    try:
        os.kill(pid, 0)
    except PermissionError:  # it belongs to somebody else
        return True
    except (ProcessLookupError, OverflowError):
        return False
    found = stat(pid)
    return found is not None and not found.ended


def born(pid: int) -> str | None:
    """Return the start time of a process, which with its pid is never used twice; None: the process does not exist."""
    found = stat(pid)
    return None if found is None or found.ended else str(found.start)
