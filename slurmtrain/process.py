"""What the kernel says of the processes of this host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stat:
    """Of /proc/<pid>/stat (`man 5 proc`).

    Attributes:
        state: a letter; Z is a zombie, which has ended and waits for its parent to ask.
        parent: pid.
        start: in clock ticks since boot; with the pid, a name that is not given twice.
    """

    state: str
    parent: int
    start: int

    @property
    def ended(self) -> bool:
        return self.state in "ZX"


def stat(pid: int | str) -> Stat | None:
    """None: there is no such process, or it is somebody else's on a machine that hides those (hidepid=1)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything, also spaces
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def stats() -> dict[int, Stat]:
    """Of every process, zombies included, by pid."""
    found = {int(entry): stat(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    return {pid: known for pid, known in found.items() if known is not None}


def lives(pid: int) -> bool:
    """Whether there is such a process. One that was killed stays as a zombie where nobody collects orphans, as in many
    containers; that is none."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    found = stat(pid)
    return found is not None and not found.ended


def born(pid: int) -> str | None:
    """When a process was started: with its pid, a name that is not given twice. None: it is no more."""
    found = stat(pid)
    return None if found is None or found.ended else str(found.start)
