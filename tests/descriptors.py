"""The files that this process has open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """Paths, one for each descriptor. Others come and go: what earlier tests have left is collected at any moment."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or another thread's
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(f"{folder}/")]
