"""Facts about the processes of this host, from the kernel."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.system.redaction import redact


@dataclass(frozen=True)
class Stat:
    """The contents of /proc/<pid>/stat (`man 5 proc`).

    Attributes:
        state: a letter; Z is a zombie, which has ended and waits for its parent to ask.
        parent: pid of the parent.
        session: pid of the process that began its session (setsid(2)).
        start: start time in clock ticks since boot; together with the pid, it is never used twice.
    """

    state: str
    parent: int
    session: int
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
    return Stat(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def stats() -> dict[int, Stat]:
    """Return the facts of every process, including zombies, by pid."""
    found = {int(entry): stat(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    return {pid: known for pid, known in found.items() if known is not None}


def descendants(roots: Iterable[int]) -> dict[int, Stat]:
    """Return the facts of all processes below `roots`, without these, including zombies; a parent comes before its children."""
    known, roots = stats(), set(roots)
    found: dict[int, Stat] = {}
    reached = roots
    while reached := {pid for pid, its in known.items() if its.parent in reached and pid not in found} - roots:
        found |= {pid: known[pid] for pid in sorted(reached)}
    return found


def living_descendants(pid: int) -> dict[int, Stat]:
    """Return the facts of all processes below one that have not ended; a parent comes before its children."""
    return {child: its for child, its in descendants([pid]).items() if not its.ended}


def living_in_sessions(leaders: Collection[int]) -> dict[int, Stat]:
    """Return the facts of all processes that have not ended of the sessions that these processes have begun, by pid."""
    return {pid: its for pid, its in stats().items() if its.session in leaders and not its.ended}


def command_line(pid: int) -> str:
    """Return the words of a process without secrets, up to 200 characters; empty if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return redact(words).strip()[:200]  # a secret that is cut would not be found any more


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
