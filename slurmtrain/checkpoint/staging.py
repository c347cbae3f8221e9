"""A copy of the state in host memory, in the very form that the file will have, so that training goes on while it is written.

The buffer is made once and reused (page-locked when there is a GPU, so that copies from it run beside the computation).
What an optimiser alone changes, parameters and its own state, is copied in the background; a hook makes `optimizer.step()`
wait for it. Everything else (buffers, averaged models, random states) is copied before `stage` returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from slurmtrain.checkpoint.blocks import BLOCK_BYTES
from slurmtrain.checkpoint.memory import ask_for_huge_pages, available_memory
from slurmtrain.checkpoint.plan import PAGE_BYTES, Piece, Plan, is_dtensor, local
from slurmtrain.errors import CheckpointError

RESERVE_BYTES = 1 << 20  # the rank's own plain state may grow


# A piece, where it goes, this rank's part of the tensor, the tensor, and its changes so far.
Copy = tuple[Piece, Tensor, Tensor, Tensor, int]


def _changes(tensor: Tensor) -> int:
    """How often it was changed in place, as torch counts it; what writes through `.data` is not seen.

    A DTensor's own operations count on the DTensor alone, an optimiser's on the local tensor.
    """
    return tensor._version + (local(tensor)._version if is_dtensor(tensor) else 0)


class Image:
    """A rank's file in memory. It is complete when `finish` has returned.

    Attributes:
        data: the bytes of the file.
        own_bytes: length of the JSON at its end.
    """

    def __init__(self, data: memoryview, plan: Plan, own: bytes):
        self.data, self.own_bytes = data, len(own)
        self._plan, self._own = plan, own
        self._left: deque[Copy] = deque()
        self._open = 0  # pieces that are not copied yet
        self._changed: str | None = None  # a piece that changed under our hands
        self._event: torch.cuda.Event | None = None
        self._lock, self._copied = threading.Lock(), threading.Event()
        self.waited_s = 0.0  # how long training was held up by `wait`

    def later(self, pieces: list[Copy], event: torch.cuda.Event | None) -> None:
        """What is left to copy, and when the GPU is done with it."""
        self._left.extend(pieces)
        self._open, self._event = len(pieces), event
        if not pieces:
            self._copied.set()

    def finish(self) -> None:
        """Copy what is left and complete the file. Called by the writer's thread.

        Raises:
            CheckpointError: a tensor was changed before it was copied, by other means than an optimiser's step.
        """
        self._copy()
        self._copied.wait()
        if self._event is not None:
            self._event.synchronize()
        if self._changed is not None:
            raise CheckpointError(
                f"{self._changed} was changed while it was copied",
                hint="call checkpointer.wait_staged() before changing parameters by hand",
            )
        header = self._plan.header(self.own_bytes)
        self.data[: len(header)] = header
        self.data[self._plan.data_end :] = self._own

    def wait(self) -> None:
        """Return when nothing has to be copied any more, and help until then; a GPU's current stream waits by itself."""
        begun = time.monotonic()
        self._copy()
        self._copied.wait()
        if self._event is not None:
            self._event.wait()
        self.waited_s += time.monotonic() - begun

    def _copy(self) -> None:
        while True:
            try:
                piece, target, source, whole, changes = self._left.popleft()
            except IndexError:
                return
            try:
                if not source.is_cuda:  # else its copy and the step that changes it are in order on the GPU
                    target.copy_(source[piece.within])
                    if _changes(whole) != changes:
                        self._changed = piece.name
            except BaseException:
                self._changed = piece.name  # it is not known what was copied of it
                raise
            finally:
                with self._lock:
                    self._open -= 1
                    if self._open == 0:
                        self._copied.set()


class Staging:
    """The buffer of one rank, and the hooks that guard what is copied from in the background."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._current: Image | None = None
        self._touching: threading.Thread | None = None
        self._hooked: WeakSet[Optimizer] = WeakSet()
        self._hooks: list[RemovableHandle] = []

    def prepare(self, size: int, *, sharers: int = 1) -> None:
        """Make room for `size` bytes of tensors, before they are needed.

        Args:
            sharers: ranks on this host that do the same.

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
                hint="ask for more memory (cluster.mem_per_node_gb), or spread the ranks over more nodes",
            )
        self._allocate(wanted)
        # The first save must not pay for the pages, nor the first step wait for them.
        self._touching = threading.Thread(target=self._buffer.zero_, name="checkpoint-buffer", daemon=True)
        self._touching.start()

    def stage(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        own: bytes,
        *,
        guarded: Collection[str],
        optimizers: Iterable[Optimizer],
    ) -> Image:
        """Begin to copy the plan's pieces and `own` into the buffer.

        Args:
            guarded: names of the tensors that only the step of one of `optimizers` changes.
        """
        size = plan.data_end + len(own)
        if self._buffer.numel() < size:
            self.prepare(size)
        self._touched()
        image = Image(self._buffer.numpy().data[:size], plan, own)
        later: list[Copy] = []
        on_gpu: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}  # by whether they are guarded
        for piece in plan.pieces:
            source = local(tensors[piece.name]).detach()
            target = self._buffer[piece.begin : piece.end].view(piece.dtype).view(piece.box.size)
            if source.is_cuda:
                if source.device.index != torch.cuda.current_device():
                    raise CheckpointError(
                        f"{piece.name} is on {source.device}, and this rank's device is cuda:{torch.cuda.current_device()}",
                        hint="one rank drives one GPU; torch.cuda.set_device() says which",
                    )
                on_gpu[piece.name in guarded].append((target, source[piece.within]))
            if piece.name in guarded:
                whole = tensors[piece.name]
                later.append((piece, target, source, whole, _changes(whole)))
            elif not source.is_cuda:
                target.copy_(source[piece.within])
        image.later(later, self._copy_from_gpu(on_gpu[False], on_gpu[True]))
        for optimizer in optimizers:
            if optimizer not in self._hooked:
                self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
                self._hooked.add(optimizer)
        self._current = image
        return image

    def borrow(self, size: int) -> memoryview:
        """`size` bytes of the buffer, while nothing is staged: for reading."""
        if self._buffer.numel() < size:
            self._allocate(size + RESERVE_BYTES + 2 * BLOCK_BYTES)
        self._touched()
        return self._buffer.numpy().data[:size]

    def _allocate(self, size: int) -> None:
        self._touched()
        self._buffer = torch.empty(0, dtype=torch.uint8)  # give the old one back first
        # Whole pages, from the beginning of a page on, which writing past the page cache asks for.
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        if not memory.is_pinned():
            ask_for_huge_pages(memory)
        first = -memory.data_ptr() % PAGE_BYTES
        self._buffer = memory[first : first + size]

    def _touched(self) -> None:
        if self._touching is not None:
            self._touching.join()
            self._touching = None

    def release(self) -> None:
        """Give back the buffer and the hooks, when nothing is written from it any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._current = [], None
        self._touched()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def wait(self) -> None:
        """Return when the state may be changed."""
        if self._current is not None:
            self._current.wait()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.wait()

    def _copy_from_gpu(
        self, at_once: list[tuple[Tensor, Tensor]], guarded: list[tuple[Tensor, Tensor]]
    ) -> torch.cuda.Event | None:
        """Begin the copies (target, source) beside the computation. Returns when the GPU is done with all of them."""
        if not at_once and not guarded:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        computation = torch.cuda.current_stream()
        self._stream.wait_stream(computation)
        with torch.cuda.stream(self._stream):
            for copies in (at_once, guarded):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                    source.record_stream(self._stream)  # its memory is not given to others before
                if copies is at_once and copies:
                    # Buffers may change in the next forward pass: the computation, not this thread, waits for them.
                    computation.wait_event(self._stream.record_event())
        return self._stream.record_event()
