"""The files that this process has open, and who listens on a port."""

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


def listening(port: int) -> list[str]:
    """The addresses on which somebody listens on a port of this machine, or network namespace, as the kernel writes them."""
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                found.append(address.rpartition(":")[0])
    return found
