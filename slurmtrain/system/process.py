"""The processes of this host, by the kernel's own words: who lives, who is below whom, and how they are ended.

A pid alone proves nothing: after a reboot, or some million processes, it belongs to another one. So a process is told from
others by its start time as well, and for readers on other hosts and in other containers by more (`ProcessMark`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from slurmtrain.system.records import Count, typed_or_none
from slurmtrain.system.redaction import redact

_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may be, since a thread may have held the lock
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
POLL_S = 0.02
FIRST_LOOK_S, LATER_LOOKS_S = 0.1, 1.0  # the kernel has no event for the end of a grandchild
KILL_AFTER_S = 5.0  # from TERM to KILL of what is left behind
ENDED = (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # as `state` says it


def state(pid: int) -> str | None:
    """Return what a process does, as psutil calls it ("running", "stopped", "zombie"); None: it is not there, or hidden."""
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return None


def descendants(roots: Collection[int]) -> list[int]:
    """Return all processes below `roots`, without these, including zombies; a parent comes before its children."""
    parents: dict[int, int] = {}
    for pid in psutil.pids():  # process_iter() may leave out a process that has the pid of one it has seen before
        with contextlib.suppress(psutil.Error):
            if pid not in roots:
                parents[pid] = psutil.Process(pid).ppid()
    found: list[int] = []
    reached = set(roots)
    while reached := {pid for pid, parent in parents.items() if parent in reached}:
        found += sorted(reached)
    return found


def living_descendants(pid: int) -> list[int]:
    """Return all processes below one that have not ended; a parent comes before its children."""
    return [each for each in descendants([pid]) if state(each) not in ENDED]


def living_in_sessions(leaders: Collection[int]) -> list[int]:
    """Return all processes that have not ended of the sessions that these have begun."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) in leaders and state(pid) not in ENDED:
                found.append(pid)
    return found


def command_line(pid: int) -> str:
    """Return the words of a process without secrets, up to 200 characters; empty if it is gone."""
    try:
        words = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
    return redact(words).strip()[:200]  # a secret that is cut would not be found any more


def caught_signals(pid: int) -> frozenset[int]:
    """Return the numbers of the signals for which a process has handlers (SigCgt of /proc/PID/status, `man 5 proc`)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                mask = int(line.split()[1], 16)
                return frozenset(number for number in range(1, 65) if mask >> (number - 1) & 1)
    return frozenset()


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
    return state(pid) not in ENDED


def born(pid: int) -> str | None:
    """Return the start of a process in seconds after the machine's, with its pid never used twice; None: there is none.

    It is read here (`man 5 proc`): psutil tells a start by the clock, which may be set while it is asked.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else f"{int(after_name[19]) / os.sysconf('SC_CLK_TCK'):.2f}"


@dataclass(frozen=True)
class ProcessMark:
    """The mark that a process leaves in a file, so that others, on this host or another, can tell whether it still lives.

    Who cannot see the process decides by what the file shows besides: heartbeats, or its age.

    Attributes:
        host: name of its host.
        born: its start time, see `born`; None: not on record.
        namespace: that of its pid, as in "pid:[4026531836]"; None: not on record, so it is taken for this process's own.
    """

    host: str
    pid: Count
    born: str | None = None
    namespace: str | None = None

    @classmethod
    def own(cls) -> ProcessMark:
        """Return the mark of this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessMark:
        """Return the mark of a process of this machine."""
        return cls(socket.gethostname(), pid, born(pid), pid_namespace())

    @classmethod
    def from_json(cls, values: object) -> ProcessMark | None:
        """Return the mark in a record; None if it names no process, as a torn one."""
        return typed_or_none(cls, values)

    def to_json(self) -> dict[str, Any]:
        """Return the mark as values of a record."""
        return asdict(self)

    @property
    def can_be_seen(self) -> bool:
        """Whether its process would be seen from here, if it lives."""
        return self.host == socket.gethostname() and self.namespace in (None, pid_namespace())

    def lives(self) -> bool | None:
        """Return whether its process lives; None: that cannot be seen from here.

        A machine may hide the processes of other users (hidepid): one that is there and hidden counts as alive.
        """
        if not self.can_be_seen:
            return None
        if not lives(self.pid):
            return False
        start = born(self.pid)
        return start is None or self.born is None or start == self.born


def pid_namespace() -> str | None:
    """Return the namespace of the pids that this process sees; None if the kernel does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def below(roots: Iterable[ProcessMark]) -> list[ProcessMark]:
    """Return all processes below `roots`, without them, including zombies; a parent comes before its children."""
    return [ProcessMark.of(pid) for pid in descendants([each.pid for each in roots])]


def kill_trees(roots: Iterable[ProcessMark]) -> None:
    """Kill `roots`, parents first, and all processes below them, at one instant as seen from outside.

    All are stopped first, again and again until there are no new ones: a child forked between the look and the kill
    would lose its parent and with it the only trace to it. Then children are killed before their parents: a process group
    that is stopped and loses its last parent gets SIGHUP and SIGCONT from the kernel, and would run for a moment more.
    """
    doomed, newcomers = list[ProcessMark](), [each for each in roots if each.lives()]
    while newcomers:
        send(signal.SIGSTOP, [each.pid for each in newcomers if each.lives()])
        doomed += newcomers
        newcomers = [each for each in below(doomed) if each not in doomed]
    send(signal.SIGKILL, [each.pid for each in reversed(doomed) if each.lives()])
    wait_until(lambda: not any(each.lives() for each in doomed), timeout_s=5.0)


def wait_until(done: Callable[[], bool], *, timeout_s: float) -> bool:
    """Poll `done`, and return False when the time is up before it is true."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


# What the kernel does when a process ends.


def set_name(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show for this process, instead of `python`."""
    _LIBC.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def end_with_parent(number: int) -> None:
    """Have the kernel send this signal to the calling process when its parent is killed. For a new process, before exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def be_killed_with(parent: int) -> None:
    """Have the kernel kill the calling process when the process `parent`, which has started it, ends for whatever reason."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os._exit(1)


def become_subreaper() -> None:
    """Adopt every descendant whose parent ends, so that it stays visible, and within reach of signals.

    If the kernel refuses, orphans are not seen, and so not waited for; nothing else changes.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# A program that this process runs, and what it leaves behind.


def send(number: int, pids: Collection[int]) -> None:
    """Send a signal to each of these processes that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def wait_until_gone(until: Callable[[], float]) -> list[str]:
    """Block until no process is left below this one; end those that stay longer than allowed.

    Args:
        until: returns until when they may stay, by the monotonic clock; called repeatedly, since a stop may come meanwhile.

    Returns:
        The processes that were left and have been ended, as "pid command line"; none when all ended by themselves.
    """
    began = time.monotonic()
    while left := living_descendants(os.getpid()):
        if time.monotonic() < until():
            time.sleep(min(LATER_LOOKS_S, FIRST_LOOK_S + (time.monotonic() - began) / 10))
            continue
        named = [f"{pid} {command_line(pid)}" for pid in left]
        send(signal.SIGTERM, left)
        deadline = time.monotonic() + KILL_AFTER_S
        while (still := living_descendants(os.getpid())) and time.monotonic() < deadline:
            time.sleep(FIRST_LOOK_S)
        send(signal.SIGKILL, still)
        return named
    return []
