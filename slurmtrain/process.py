"""What the kernel says of a process of this host."""

from __future__ import annotations

import os
from pathlib import Path

STATE, START = 0, 19  # man 5 proc, /proc/pid/stat: state and starttime, counted from behind the name


def stat(pid: int | str) -> list[str] | None:
    """The fields of /proc/<pid>/stat behind the process's name, which may hold anything. None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def lives(pid: int) -> bool:
    """Whether there is such a process. One that was killed stays as a zombie where nobody collects orphans, as in many
    containers; that is none."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    fields = stat(pid)
    return fields is not None and fields[STATE] != "Z"


def born(pid: int) -> str | None:
    """When a process was started, in ticks since boot: with its pid, a name that is not given twice. None: it is no more."""
    fields = stat(pid)
    return None if fields is None or fields[STATE] == "Z" else fields[START]
