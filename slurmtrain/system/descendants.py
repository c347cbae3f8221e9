"""The processes below a program: which are left when it has ended, and the wait until none is.

A wrapper (`bash wrap.sh`, torchrun) may die of a stop signal while its child still saves. The kernel is asked to give
such orphans to this process (PR_SET_CHILD_SUBREAPER), so that they stay visible, and within reach of SLURM's signals if
it follows the tree of processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Collection

from slurmtrain.system import process

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
COLLECT_EVERY_S = 30.0
FIRST_LOOK_S, LATER_LOOKS_S = 0.1, 1.0  # the kernel has no event for the end of a grandchild
KILL_AFTER_S = 5.0  # from TERM to KILL of what is left behind


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process, and reap those that have ended.

    If the kernel refuses, orphans are not seen, and so not waited for; nothing else changes.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    threading.Thread(target=_collect, name="collect-orphans", daemon=True).start()


def alive() -> dict[int, str]:
    """Return the processes below this one that have not ended: pid -> command line."""
    return {pid: process.command_line(pid) for pid in process.living_descendants(os.getpid())}


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
    while left := alive():
        if time.monotonic() < until():
            time.sleep(min(LATER_LOOKS_S, FIRST_LOOK_S + (time.monotonic() - began) / 10))
            continue
        send(signal.SIGTERM, left)
        deadline = time.monotonic() + KILL_AFTER_S
        while (still := alive()) and time.monotonic() < deadline:
            time.sleep(FIRST_LOOK_S)
        send(signal.SIGKILL, still)
        return [f"{pid} {words}" for pid, words in left.items()]
    return []


def _collect() -> None:
    """Reap adopted orphans that have ended.

    One that is a zombie in two looks has no other waiter: children that this process has started itself are waited for
    by the code that started them.
    """
    before: set[int] = set()
    while True:
        time.sleep(COLLECT_EVERY_S)
        zombies = {pid for pid, its in process.stats().items() if its.parent == os.getpid() and its.ended}
        for pid in zombies & before:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        before = zombies - before
