"""The processes below another one.

/proc/<pid>/task/<task>/children is not asked: a thread that ends between the listing and the reading takes its file
along, and the kernel promises a complete list of those processes only that stand still (`man 5 proc`).
"""

from __future__ import annotations

from slurmtrain.system import process


def children(pid: int) -> list[int]:
    """In the order of their start, zombies included."""
    found = [(known.start, child) for child, known in process.stats().items() if known.parent == pid]
    return [child for _, child in sorted(found)]


def descendants(pid: int) -> list[int]:
    return [below for child in children(pid) for below in (child, *descendants(child))]
