"""Folders while they are being made: hidden, under a name that identifies their maker.

So those of makers that were killed can be removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

from slurmtrain.runs.run_dir import PREPARING
from slurmtrain.system import process

LEFT_AFTER_S = 86400.0  # seconds after which a maker on another host, which cannot be seen from here, counts as dead
MAKER = re.compile(r"\.by-\w+-(?P<pid>\d+)-(?P<born>\d+)-(?P<host>.+)$")


def folder(runs: Path, name: str) -> Path:
    """Return a hidden path for something that will be, or has been, `name`."""
    pid = os.getpid()
    return runs / PREPARING / f"{name}.by-{secrets.token_hex(3)}-{pid}-{process.born(pid)}-{socket.gethostname()}"


def remove_left_over(runs: Path) -> None:
    """Remove what shells that were killed have left."""
    for path in (runs / PREPARING).iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just become what it was to be
            if _is_left(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_left(path: Path) -> bool:
    maker = MAKER.search(path.name)
    if maker is not None and maker["host"] == socket.gethostname():
        return process.born(int(maker["pid"])) != maker["born"]
    return time.time() - path.lstat().st_mtime > LEFT_AFTER_S
