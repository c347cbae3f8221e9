"""Which file systems lie in memory, and roughly how fast a folder takes a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

IN_MEMORY = frozenset({"tmpfs", "ramfs"})  # what lies there takes memory, that of the job which has written it
WRITTEN_MB = 8  # small enough for a login node's shared disk, large enough to be more than one round trip
_MOST_S = 2.0


def write_speed_mb_per_s(folder: Path, *, megabytes: int = WRITTEN_MB) -> float | None:
    """Write a file of some megabytes into a folder, wait until it is on the disk, remove it, and return MB per second.

    That is one process's rate on this machine at this moment, and rough. It stops after two seconds with what is written by
    then. None: the folder cannot be written.
    """
    block = os.urandom(1 << 20)  # some file systems compress
    try:
        descriptor, name = tempfile.mkstemp(prefix=".slurmtrain-probe-", dir=folder)
    except OSError:
        return None
    written = 0
    try:
        began = time.perf_counter()
        while written < megabytes and time.perf_counter() - began < _MOST_S:
            if os.write(descriptor, block) != len(block):
                return None
            written += 1
        os.fsync(descriptor)
        return written * len(block) / 1e6 / max(time.perf_counter() - began, 1e-9)
    except OSError:  # a full disk, a quota
        return None
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name)
