"""The processes below another one."""

from __future__ import annotations

import psutil


def children(pid: int) -> list[int]:
    """In the order of their start, zombies included."""
    try:
        found = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in sorted(found, key=psutil.Process.create_time)]
