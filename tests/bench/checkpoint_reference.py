"""What the checkpoint benchmark compares with: memcpy, dd, plain reads, SHA-256, torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

BLOCK_BYTES = 16 << 20


def copy_into(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """The memcpy that no staging can do without. `buffer` has been touched before: it has its pages."""
    position = 0
    for tensor in tensors:
        buffer[position : position + tensor.numel()].view(tensor.shape).copy_(tensor)
        position += tensor.numel()


def make_source(path: Path, size: int) -> None:
    """A file of random bytes on the disk and in the page cache: a disk may have a short way for zeros."""
    with path.open("wb") as file:
        for _ in range(0, size, BLOCK_BYTES):
            file.write(os.urandom(BLOCK_BYTES))
        os.fsync(file.fileno())


def dd(source: Path, target: Path, size: int) -> None:
    """Copy `size` bytes and wait until they are on the disk; past the page cache, as ours writes, where the file system can."""
    words = ["dd", f"if={source}", f"of={target}", "bs=16M", f"count={size}", "iflag=count_bytes", "conv=fsync"]
    if subprocess.run([*words, "oflag=direct"], check=False, stderr=subprocess.DEVNULL).returncode != 0:
        subprocess.run(words, check=True, stderr=subprocess.DEVNULL)


def read_part(files: Sequence[Path], part: int, parts: int) -> None:
    """Read every `parts`-th part of each file into one buffer, in large blocks."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            position, end = size * part // parts, size * (part + 1) // parts
            while position < end:
                position += os.preadv(descriptor, [buffer[: end - position]], position)
        finally:
            os.close(descriptor)


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """All of the page cache where that is allowed (root), otherwise the given files, which have been synced."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def digest_memory(memory: memoryview, size: int, pool: ThreadPoolExecutor) -> None:
    """SHA-256 of `size` bytes by the pool's threads, block by block, over and over `memory`."""
    last = len(memory) - BLOCK_BYTES
    offsets = [number * BLOCK_BYTES % last for number in range(size // BLOCK_BYTES)]
    for _ in pool.map(lambda offset: hashlib.sha256(memory[offset : offset + BLOCK_BYTES]).digest(), offsets):
        pass


def dcp_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def dcp_save_synced(state: dict[str, Any], directory: Path, group: dist.ProcessGroup) -> None:
    """`dcp.save`, and then what makes it durable: fsync of every file and directory (DCP leaves out some)."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), process_group=group)
    if dist.get_rank() == 0:
        for path in (*directory.iterdir(), directory, directory.parent):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier(group)


class DcpAsync:
    """`dcp.async_save` on its own gloo group.

    Args:
        kind: "thread" and "process" are what DCP does when it is told nothing else: a fresh copy each time, made before
            `async_save` returns. "kept": with a stager of one's own that copies in the background, into the same buffers each
            time, the best that DCP can do.
    """

    KINDS = ("DCP thread", "DCP process", "DCP thread, kept", "DCP process, kept")

    def __init__(self, kind: str, group: dist.ProcessGroup):
        self._group = group
        process = "process" in kind
        self._type = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(StagingOptions(False, process, True, False)) if "kept" in kind else None
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        answer = dcp.async_save(
            dcp_state(model, optimizer),
            storage_writer=dcp.FileSystemWriter(directory),
            process_group=self._group,
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._written = answer.staging_completion, answer.upload_completion
        else:
            self._staged, self._written = None, answer

    def before_optimizer_step(self) -> None:
        """Until the state may be changed."""
        if self._staged is not None:
            self._staged.result()

    def done(self) -> bool:
        assert self._written is not None
        return self._written.done()

    def wait(self) -> None:
        assert self._written is not None
        self._written.result()

    def close(self) -> None:
        """Give back all memory. DCP's process keeps what it has written last, and would stay for good."""
        if self._stager is not None:
            self._stager.close()
        self._staged = self._written = self._stager = None
        _async_process_executor._CHECKPOINT_PROCESS = None
        give_back_memory()


def give_back_memory() -> None:
    """To the system what nobody uses any more: glibc keeps freed blocks of up to 32 MiB, which soon are gigabytes here."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def remove(path: Path) -> None:
    """A folder or file, and wait until the disk has caught up: freeing gigabytes must not fall into the next measurement."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


Action = Callable[[], None]
