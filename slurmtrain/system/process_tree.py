"""Processes identified so that a reused pid is never mistaken for them, and trees of them killed without losing one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from slurmtrain.system import process

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


@dataclass(frozen=True)
class Process:
    """A pid with the kernel's start time of its process, in clock ticks since boot."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        stat = process.stat(pid)
        return cls(pid, stat.start) if stat else None

    @classmethod
    def mine(cls) -> Process:
        this = cls.of(os.getpid())
        assert this is not None, "/proc is not mounted"
        return this

    def alive(self) -> bool:
        """Return whether the process still runs; a zombie does not."""
        stat = process.stat(self.pid)
        return stat is not None and stat.start == self.start and not stat.ended

    def signal(self, signum: int) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # a job may run a set-uid program
                os.kill(self.pid, signum)


def descendants(roots: Iterable[Process]) -> set[Process]:
    """Return all processes below `roots`, without them, including zombies."""
    return {Process(pid, its.start) for pid, its in process.descendants(each.pid for each in roots).items()}


def kill_trees(roots: Iterable[Process]) -> None:
    """Kill `roots` and all processes below them, at one instant as seen from outside.

    All are stopped first, again and again until there are no new ones: a child forked between the look and the kill
    would lose its parent and with it the only trace to it. Then children are killed before their parents: a process group
    that is stopped and loses its last parent gets SIGHUP and SIGCONT from the kernel, and would run for a moment more.
    """
    doomed = {p for p in roots if p.alive()}
    for one in doomed:
        one.signal(signal.SIGSTOP)
    while newcomers := descendants(doomed) - doomed:
        for one in newcomers:
            one.signal(signal.SIGSTOP)
        doomed |= newcomers
    parents = {pid: its.parent for pid, its in process.stats().items()}
    for one in sorted(doomed, key=lambda one: _ancestors(one.pid, parents), reverse=True):
        one.signal(signal.SIGKILL)
    wait_until(lambda: not any(p.alive() for p in doomed), timeout_s=5.0)


def _ancestors(pid: int, parents: Mapping[int, int]) -> int:
    number = 0
    while pid in parents and number < len(parents):  # numbers used again during the look could make a circle
        pid, number = parents[pid], number + 1
    return number


def wait_until(done: Callable[[], bool], *, timeout_s: float) -> bool:
    """Poll `done`, and return False when the time is up before it is true."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def become_subreaper() -> None:
    """Adopt every descendant whose parent ends, so that a daemon's double fork does not take a process out of our tree."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def set_name(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show for this process, instead of `python`."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
