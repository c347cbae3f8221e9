"""The memory of this host: how much is left, how to make its first use faster, and how to lock it for copies from a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes that only ask how much memory is left load no torch
    from torch import Tensor

log = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20

# Page-locked memory of this process: its addresses, what nobody uses, and what must stay since a GPU may still copy to it.
_locked: set[int] = set()
_unused: list[Tensor] = []
_written_to: list[Tensor] = []


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


def allocate_pages(size: int, *, for_gpu: bool) -> Tensor:
    """Return at least `size` bytes of new memory that begins at a page and has whole pages.

    torch's own page-locked memory is no place for gigabytes: it rounds their number up to a power of two, and keeps what
    it is given back.

    Args:
        for_gpu: page-locked, so that copies from a GPU run beside the computation. Return it with `give_back`.
    """
    import torch

    while for_gpu and _unused:
        unused = _unused.pop()
        if unused.nbytes >= size:
            return unused
        _page_unlock(unused)
        del unused  # before there is more
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    if for_gpu:
        # Data workers are forks. Where one shares page-locked pages, older kernels give this process others at the next write
        # to them, and the GPU goes on with the old ones. These pages are nothing else's, so no fork misses them.
        pages.madvise(mmap.MADV_DONTFORK)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if for_gpu:
        _page_lock(memory)
    return memory


def give_back(memory: Tensor, *, written_to: bool = False) -> None:
    """Keep memory of `allocate_pages`, if it is page-locked, for the next who needs some.

    To unlock it could wait for the whole GPU, which waits for ever where another rank is gone.

    Args:
        written_to: a GPU may still copy to it, so nobody else may use it.
    """
    if memory.data_ptr() in _locked:
        (_written_to if written_to else _unused).append(memory)


def _page_lock(memory: Tensor) -> None:
    import torch

    runtime = torch.cuda.cudart()
    refused = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(refused) == 0:
        _locked.add(memory.data_ptr())
        return
    log.warning(
        "%.2f GB of host memory cannot be page-locked (%s): training waits for each copy from the GPU",
        memory.nbytes / 1e9,
        runtime.cudaGetErrorString(refused),
    )
    with contextlib.suppress(RuntimeError):  # CUDA tells the error once more, to whoever starts a kernel next
        torch.zeros(1, device="cuda")


def _page_unlock(memory: Tensor) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    _locked.remove(memory.data_ptr())


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
