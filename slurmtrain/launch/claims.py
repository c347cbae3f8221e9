"""Claims: locks by which only one process at a time does something, for several shells on several hosts.

The lock is the kernel's (flock(2), which NFS has, too), so it ends with the process that holds it, however that ends. The file
says who that is, for as long. Where the file system has no locks, nobody is kept out.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.system.process import ProcessMark
from slurmtrain.system.records import open_to_append, read_json

log = logging.getLogger(__name__)

NAME = "claim"
POLL_S = 0.2  # seconds between looks at a lock: another host's has no event to await
UNKNOWN_AFTER = 25  # looks, after which the wait for a lock of which nobody knows the holder is told


@contextlib.contextmanager
def claimed(folder: Path, busy: Callable[[ProcessMark], None]) -> Iterator[None]:
    """Hold the claim of a folder; wait for another process that holds it.

    Args:
        busy: called once with another owner; an error that it raises ends the wait.
    """
    descriptor, held = open_to_append(folder / NAME), False
    try:
        looks, told = 0, False
        while not _lock(descriptor, fcntl.LOCK_EX):
            looks += 1
            owner = _owner(folder)
            # At first somebody may just have looked whether it is claimed, and its file may name the one before.
            if looks > 1 and not told and owner is not None and owner.lives() is not False:
                told = True
                busy(owner)
            if looks == UNKNOWN_AFTER and not told:  # somebody who may read the file, or a child of who is dead
                log.warning("waiting for the lock on %s, which another process holds: `lsof` shows it", folder / NAME)
            time.sleep(POLL_S)
        held = True
        os.ftruncate(descriptor, 0)
        os.write(descriptor, msgspec.json.encode(ProcessMark.own()))
        yield
    finally:
        if held:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for children that have inherited it
        os.close(descriptor)


def is_claimed(folder: Path) -> bool:
    """Return whether some process holds the claim."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def holder_here(folder: Path) -> int | None:
    """Return the id of the process of this machine that holds the claim, with or without a lock; None if there is none."""
    owner = _owner(folder)
    return owner.pid if owner is not None and owner.lives() else None


def _lock(descriptor: int, kind: int) -> bool:
    """Take the lock, if nobody has it; a file system without locks counts as one where nobody has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _owner(folder: Path) -> ProcessMark | None:
    """Return who holds the claim, or was killed while it did; None if its file does not say that."""
    with contextlib.suppress(UnreadableRecordError):
        return ProcessMark.from_json(read_json(folder / NAME))
    return None
