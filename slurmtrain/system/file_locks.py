"""Locks on open files (flock(2)), which nobody waits for without end, whatever holds them and however their server is."""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time

FIRST_LOCK_PAUSE_S, LONGEST_LOCK_PAUSE_S = 0.01, 0.16  # between looks whether a lock is free

_held_up: dict[int, threading.Thread] = {}  # by device: the thread that a lock server has not answered


def lock(descriptor: int, at_most_s: float) -> bool:
    """Take the lock on an open file, or go on without it after `at_most_s` seconds, or where there are no locks.

    A thread asks for it: a lock server that does not answer (NFS) holds up whoever has asked, whatever the flags say. Until
    that thread is back, nobody asks for a lock on the same file system.

    Returns:
        Whether somebody else has kept the lock all the time.
    """
    device = os.fstat(descriptor).st_dev
    if at_most_s <= 0 or (device in _held_up and _held_up[device].is_alive()):
        return False
    kept: list[bool] = []
    own = os.dup(descriptor)  # the same lock, which ends when both are closed: the caller may go on before the thread
    asking = threading.Thread(
        target=lambda: kept.append(_ask_for_lock(own, at_most_s)), name="slurmtrain-lock", daemon=True
    )
    try:
        asking.start()
    except RuntimeError:  # this process may not have another thread, as when the interpreter ends
        os.close(own)
        return False
    asking.join(at_most_s + 2 * LONGEST_LOCK_PAUSE_S)
    if asking.is_alive():
        _held_up[device] = asking
    return kept == [True]


def _ask_for_lock(own: int, at_most_s: float) -> bool:
    """Ask until the lock is free; return whether somebody else has kept it all the time. Close the descriptor."""
    give_up, pause_s = time.monotonic() + at_most_s, FIRST_LOCK_PAUSE_S
    try:
        while True:
            try:
                fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    return True
            # Not all at the same moment, and less and less often: to a network file system each look is a request.
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, LONGEST_LOCK_PAUSE_S)
    except OSError:
        return False
    finally:
        os.close(own)
