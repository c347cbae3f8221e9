"""The memory of this host: how much is left, and how to make its first use faster."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes that only ask how much memory is left load no torch
    from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Ask the kernel to back a new tensor, if it is large enough, by pages of 2 MiB (madvise(2), MADV_HUGEPAGE).

    The first access to gigabytes in pages of 4 KiB takes longer than copying into them. The kernel may ignore the
    request.
    """
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    if tensor.device.type == "cpu" and size >= HUGE_PAGE_BYTES:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size // mmap.PAGESIZE * mmap.PAGESIZE), mmap.MADV_HUGEPAGE)


def available_memory() -> int | None:
    """Return the bytes that this process may still use: of the host, and of the control group that SLURM put it in."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
        for limit, used, reclaimable in _cgroup_limits():
            found.append(limit - used + reclaimable)
    except (OSError, ValueError, IndexError):
        pass
    return min(found, default=None)


def _cgroup_limits() -> Iterable[tuple[int, int, int]]:
    """Yield (limit, used, page cache) in bytes of this process's memory cgroup and those above it, version 2 or 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        while folder.is_relative_to(base):
            try:
                limit, used = ((folder / name).read_text().strip() for name in names[:2])
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                if limit != "max":
                    yield int(limit), int(used), int(statistics.get(names[2], 0))
            except (OSError, ValueError):
                pass
            folder = folder.parent
