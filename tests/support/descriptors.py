"""The files that this process has open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_files() -> list[str]:
    """Paths, or what else they are, one for each descriptor."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or another thread's
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def open_below(folder: Path) -> list[str]:
    """Those in a folder. Others come and go: what earlier tests have left is collected at any moment."""
    return [path for path in open_files() if path.startswith(f"{folder}/")]
