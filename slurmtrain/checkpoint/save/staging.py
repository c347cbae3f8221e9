"""A copy of the state in host memory, in the very form that the file will have, so that training goes on while it is written.

The buffer is allocated once and reused (page-locked where this process uses a GPU, so that copies to it run beside the
computation). Tensors in host memory are copied before `stage` returns. On a GPU, parameters and an optimiser's own
state are copied in the background, with a hook that makes `optimizer.step()` wait; everything else (buffers, averaged
models) before the next computation. Fingerprints show whether such a copy equals the tensor as it was at the call,
because no hook notices a change by hand, for instance through `.data`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES
from slurmtrain.checkpoint.format.directory import OWN_STATE
from slurmtrain.checkpoint.save.plan import SavePlan
from slurmtrain.checkpoint.tensors import local

log = logging.getLogger(__name__)

RESERVE_BYTES = 1 << 20  # the rank's own plain state may grow
WORD_BYTES = 8
# Of a tensor in host memory that is larger, each save compares another one of so many parts for each rank that holds it:
# reading all of it would take longer than the copy of what this rank writes. A GPU reads a hundred times as fast as it
# copies to the host, and compares all.
LARGE_BYTES, PARTS_PER_RANK = 1 << 20, 4

HUGE_PAGE_BYTES = 2 << 20

# Page-locked memory of this process: its addresses, what nobody uses, and what must stay since a GPU may still copy to it.
_locked: set[int] = set()
_unused: list[Tensor] = []
_written_to: list[Tensor] = []

Fingerprints = dict[str, dict[str, int]]  # by the key of a group that holds the same, by name


@dataclass
class Image:
    """A rank's file in memory. It is complete when `finish` has returned.

    Attributes:
        data: the bytes of the file.
        own: the JSON at its end.
        fingerprints: those of tensors that other ranks hold, too; complete when the image is.
        waited_s: seconds for which `wait` held training up.
        copies, expected, names, event: what a GPU has not finished yet: name and copy of tensors, whose fingerprints are the
            first of `expected` (int64, in host memory), the names of the tensors whose fingerprints follow, and the event
            recorded at the end of all of it.
    """

    data: memoryview
    plan: SavePlan
    own: bytes
    fingerprints: Fingerprints
    waited_s: float = 0.0
    copies: list[tuple[str, Tensor]] = field(default_factory=list)
    expected: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    names: list[str] = field(default_factory=list)
    event: torch.cuda.Event | None = None

    def finish(self) -> None:
        """Wait for the copies and complete the file. Called by the writer's thread.

        Raises:
            CheckpointError: a tensor was changed before it was copied, by other means than an optimiser's step.
        """
        if self.event is not None:
            # Otherwise this thread would make a context on GPU 0, and keep it.
            torch.cuda.set_device(self.event.device)
            self.event.synchronize()
        values = self.expected.tolist()
        for (name, copy), value in zip(self.copies, values, strict=False):
            if int(fingerprint(copy)) != value:
                raise CheckpointError(
                    f"{name} was changed while it was copied",
                    hint="call checkpointer.wait_staged() before changing parameters by hand",
                )
        for name, value in zip(self.names, values[len(self.copies) :], strict=True):
            self.fingerprints[self.plan.compared[name][0]][name] = value
        start, end = self.plan.data_start, self.plan.data_end
        place = [end - start, end - start + len(self.own)]
        own = {OWN_STATE: {"dtype": "U8", "shape": [len(self.own)], "data_offsets": place}}
        header = json.dumps({**self.plan.header, **own}, separators=(",", ":")).encode().ljust(start - 8)
        self.data[:start] = len(header).to_bytes(8, "little") + header
        self.data[end:] = self.own

    def is_copied(self) -> bool:
        """Return whether the GPU is done with all copies, as far as it can be asked."""
        try:
            return self.event is None or self.event.query()
        except RuntimeError:  # a GPU that has failed
            return False

    def wait(self) -> None:
        """Make a GPU's current stream wait until everything is copied."""
        begun = time.monotonic()
        if self.event is not None:
            self.event.wait()
        self.waited_s += time.monotonic() - begun


class Staging:
    """The buffer of one rank, and the hooks that protect tensors while they are copied in the background."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._stream: torch.cuda.Stream | None = None
        self._current: Image | None = None
        self._touching = threading.Thread()  # touches a new buffer's pages; this one has ended
        self._touching.start()
        self._hooked: WeakSet[Optimizer] = WeakSet()
        self._hooks: list[RemovableHandle] = []

    def prepare(self, size: int, *, sharers: int = 1) -> None:
        """Make room for `size` bytes of tensors, before they are needed.

        Args:
            sharers: number of ranks on this host that do the same.

        Raises:
            CheckpointError: the host has not that much memory left.
        """
        wanted = size + RESERVE_BYTES
        if self._buffer.numel() >= wanted:
            return
        left = available_memory()
        if left is not None and sharers * (wanted - self._buffer.numel()) > left:
            raise CheckpointError(
                f"a checkpoint needs {wanted / 1e9:.2f} GB of host memory on each of {sharers} ranks of this host for a copy "
                f"of the state, and {left / 1e9:.2f} GB are left",
                hint="request more memory (cluster.mem_per_node_gb), or spread the ranks over more nodes",
            )
        self._allocate(wanted)
        # The first save must not pay for the pages, nor the first step wait for them.
        self._touching = threading.Thread(target=self._buffer.zero_, name="checkpoint-buffer", daemon=True)
        self._touching.start()

    def missing_bytes(self, size: int) -> int:
        """Return how much memory `prepare` would allocate."""
        wanted = size + RESERVE_BYTES
        return wanted if self._buffer.numel() < wanted else 0

    def stage(
        self,
        plan: SavePlan,
        tensors: Mapping[str, Tensor],
        own: bytes,
        guarded: Collection[str],
        optimizers: Iterable[Optimizer],
        *,
        number: int = 0,
    ) -> Image:
        """Begin to copy the plan's pieces and `own` into the buffer.

        Args:
            guarded: names of the tensors that only the step of one of `optimizers` changes.
            number: that of the save; see `compared_part`.
        """
        size = plan.data_end + len(own)
        if self._buffer.numel() < size:
            self.prepare(size)
        self._touching.join()
        image = Image(self._buffer.numpy().data[:size], plan, own, {key: {} for key, _ in plan.compared.values()})
        on_gpu: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}  # copies, by whether they are guarded
        start = plan.data_start
        for piece in plan.pieces:
            source = local(tensors[piece.name]).detach()[piece.within]
            target = self._buffer[start + piece.begin : start + piece.end].view(piece.dtype).view(piece.box.size)
            if not source.is_cuda:
                target.copy_(source)
                continue
            if source.device.index != torch.cuda.current_device():
                raise CheckpointError(
                    f"{piece.name} is on {source.device}, and this rank's device is cuda:{torch.cuda.current_device()}",
                    hint="one rank drives one GPU; torch.cuda.set_device() says which",
                )
            on_gpu[piece.name in guarded].append((target, source))
            if piece.name in guarded:
                image.copies.append((piece.name, target))
        compared: list[Tensor] = []
        for name, (key, holders) in plan.compared.items():
            part = compared_part(local(tensors[name]).detach(), number, holders)
            if part.is_cuda:
                image.names.append(name)
                compared.append(part)
            else:
                image.fingerprints[key][name] = int(fingerprint(part))
        if on_gpu[False] or on_gpu[True] or compared:
            looked_at = [source for _, source in on_gpu[True]] + compared
            image.expected, image.event = self._copy_from_gpu(on_gpu[False], on_gpu[True], looked_at)
        for optimizer in optimizers if image.event is not None else ():  # of a CPU's tensors, all is copied
            if optimizer not in self._hooked:
                self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
                self._hooked.add(optimizer)
        self._current = image
        return image

    def borrow(self, size: int) -> memoryview:
        """Return `size` bytes of the buffer for reading a checkpoint, while nothing is staged."""
        if self._buffer.numel() < size:
            self._allocate(size + RESERVE_BYTES + 2 * BLOCK_BYTES)
        self._touching.join()
        return self._buffer.numpy().data[:size]

    def _allocate(self, size: int) -> None:
        """Give the buffer back, and take one of `size` bytes; 0: none.

        Page-locked memory is kept for the next who needs some: to unlock it could wait for the whole GPU, which waits for ever
        where another rank is gone. What a GPU may still copy to nobody else may use.
        """
        self._touching.join()
        if self._buffer.data_ptr() in _locked:
            is_written_to = self._current is not None and not self._current.is_copied()
            (_written_to if is_written_to else _unused).append(self._buffer)
        self._current = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old one is freed before there is another
        if size:
            self._buffer = allocate_pages(size, for_gpu=torch.cuda.is_initialized())

    def release(self) -> None:
        """Free the buffer and the hooks, when nothing is written from the buffer any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._allocate(0)

    def wait(self) -> None:
        """Wait until the state may be changed."""
        if self._current is not None:
            self._current.wait()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.wait()

    def _copy_from_gpu(
        self, at_once: list[tuple[Tensor, Tensor]], guarded: list[tuple[Tensor, Tensor]], looked_at: list[Tensor]
    ) -> tuple[Tensor, torch.cuda.Event]:
        """Begin the copies (target, source) beside the computation.

        Returns:
            The fingerprints of `looked_at` as they are at the call (int64 [n], in host memory), and an event recorded
                at the end.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        computation = torch.cuda.current_stream()
        self._stream.wait_stream(computation)
        found = torch.empty(len(looked_at), dtype=torch.int64, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._stream):
            for target, source in at_once:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)  # its memory is not reused before the copy is done
            if looked_at:
                # On the computation's own stream: the next computation there may change them.
                with torch.cuda.stream(computation):
                    fingerprints = torch.stack([fingerprint(tensor) for tensor in looked_at])
                self._stream.wait_stream(computation)
                found.copy_(fingerprints, non_blocking=True)
                fingerprints.record_stream(self._stream)
            if at_once:
                # Buffers may change in the next forward pass: the computation, not this thread, waits for them.
                computation.wait_event(self._stream.record_event())
            for target, source in guarded:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
        return found, self._stream.record_event()


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's 8-byte words modulo 2**64 (int64 [], on its device).

    Made to tell two computations apart: do replicas still agree, and was a tensor changed while it was copied? Words of
    integers are weighted by position, because two tensors often hold the same ones in another order: a permutation of
    the samples.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    whole = data.numel() // WORD_BYTES * WORD_BYTES
    words = data[:whole].view(torch.int64)
    if not tensor.is_floating_point():
        words = words * (2 * torch.arange(words.numel(), device=words.device) + 1)
    total = words.sum()
    if whole < data.numel():
        last = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=data.device)
        last[: data.numel() - whole] = data[whole:]
        total = total + 3 * last.view(torch.int64)[0]
    return total


def compared_part(tensor: Tensor, number: int, holders: int) -> Tensor:
    """Return the part of a tensor that is compared at the save of this number.

    Args:
        holders: number of ranks that hold the tensor.
    """
    if tensor.is_cuda or tensor.nbytes < LARGE_BYTES:
        return tensor
    rows = tensor.shape[0]
    parts = min(rows, PARTS_PER_RANK * holders)
    part = number % parts
    return tensor[rows * part // parts : rows * (part + 1) // parts]


# Memory of this host: how much is left, how to make its first use faster, and how to lock it for copies from a GPU.


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
        for_gpu: page-locked, so that copies from a GPU run beside the computation. See `Staging` for what becomes of it.
    """
    while for_gpu and _unused:
        unused = _unused.pop()
        if unused.nbytes >= size:
            return unused
        torch.cuda.cudart().cudaHostUnregister(unused.data_ptr())
        _locked.remove(unused.data_ptr())
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


def _page_lock(memory: Tensor) -> None:
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


def available_memory() -> int | None:
    """Return the bytes that this process may still use: of the host, and of the control groups that SLURM put it in."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except (OSError, ValueError, IndexError):
        groups = []
    for _, controllers, path in groups:
        if controllers == "":  # version 2
            base, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        while folder.is_relative_to(base):  # one above it may have a lower limit
            try:
                limit, used = ((folder / name).read_text().strip() for name in names[:2])
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                if limit != "max":
                    found.append(int(limit) - int(used) + int(statistics.get(names[2], 0)))
            except (OSError, ValueError):
                pass
            folder = folder.parent
    return min(found, default=None)
