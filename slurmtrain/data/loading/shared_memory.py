"""Shared memory by which a worker hands tensors to its rank, allocated once and used again and again.

Sent the usual way, each tensor opens shared memory of its own, whose descriptor is sent and whose pages are new to both
processes: for a micro batch of tokens, that takes several times as long as reading it. Here a worker copies its tensors
into one of its slots, or makes them there, and the rank copies them out as the message arrives. A tensor that is larger
than a slot is still sent the usual way, by /dev/shm.
"""

from __future__ import annotations

import io
import itertools
import math
import mmap
import pickle
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from slurmtrain.errors import SlurmtrainError

SLOT_BYTES = 16 << 20  # reserved; what no tensor has ever filled takes no memory
_HEADER_BYTES = _ALIGNMENT = 64
_OF_NUMPY = {
    getattr(torch, name): np.dtype(name)
    for name in "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()
}
_PLAIN = {*_OF_NUMPY, torch.bool, torch.bfloat16}  # others are rare, and some have no whole bytes

_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Slots] = weakref.WeakValueDictionary()


class Slots:
    """Memory that a process shares with the workers that it forks afterwards.

    Each worker uses its slots in turn. The caller ensures that a slot is free again when its turn comes: a worker may
    have at most as many messages under way, to be sent or to be received, as it has slots.

    Args:
        workers: number of workers.
        each: number of slots of each worker.
    """

    def __init__(self, workers: int, each: int):
        self._each, self._number = each, next(_numbers)
        self._memory = mmap.mmap(-1, workers * each * SLOT_BYTES)
        self._messages = 0  # begun by this worker
        _known[self._number] = self

    def message(self, worker: int) -> Message:
        """Begin a message, in a worker, whose tensors will lie in the worker's next slot."""
        self._messages += 1
        start = (worker * self._each + self._messages % self._each) * SLOT_BYTES
        self._header(start)[0] = self._messages
        return Message(self._memory, slots=self._number, start=start, message=self._messages)

    def unpacked(self, start: int, message: int, pickled: bytes) -> list[Any]:
        """Return the objects that were added to a message, with copies of their tensors."""
        file, content = io.BytesIO(pickled), []
        while file.tell() < len(pickled):
            content += pickle.load(file)
        if self._header(start)[0] != message:
            raise SlurmtrainError("a worker has overwritten data before they were read: an error of slurmtrain's own")
        return content

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a copy of the tensor at `offset`."""
        return _view(self._memory, offset, shape, dtype).clone()

    def _header(self, start: int) -> Any:
        return np.frombuffer(self._memory, dtype=np.int64, count=1, offset=start)


class Message:
    """A message of objects of any kind, whose tensors are copied into the slot.

    Tensors for which the slot has no room, and those that are not plain numbers in memory, are sent as torch does.

    Args:
        memory: the memory of all slots.
        slots: number of the `Slots` object.
        start: offset of this slot in the memory.
        message: number of this message.
    """

    def __init__(self, memory: mmap.mmap, *, slots: int, start: int, message: int):
        self._memory, self._slots, self._start, self._message = memory, slots, start, message
        self._next, self._end = start + _HEADER_BYTES, start + SLOT_BYTES
        self._address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._file = io.BytesIO()
        self._kept: list[Any] = []  # not pickled yet
        self._in_slot = self._elsewhere = 0  # tensors of what was pickled last: made in the slot, and others

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return a new tensor in the slot, which is not copied when it is added, and must not be used after that."""
        offset = self._reserved(math.prod(shape), dtype)
        return empty(shape, dtype=dtype) if offset is None else _view(self._memory, offset, shape, dtype)

    def add(self, item: Any) -> None:
        """Add one object as it is now. Tensors that were made in the slot must not be changed afterwards."""
        self._kept.append(item)
        # Objects like one that lay wholly in the slot are pickled together, which is faster. Others may share their memory
        # with the next ones.
        if not self._in_slot or self._elsewhere:
            self.flush()

    def flush(self) -> None:
        """Pickle the objects that were added.

        After an error of pickling, the message holds all objects before the one that failed.
        """
        items, self._kept = self._kept, []
        if not items:
            return
        try:
            self._dump(items)
        except Exception:
            if len(items) == 1:
                raise
            for item in items:
                self._dump([item])

    def packed(self) -> Packed:
        self.flush()
        return Packed(self._slots, self._start, self._message, self._file.getvalue())

    def _dump(self, items: list[Any]) -> None:
        before = self._file.tell()
        # A new pickler each time: it remembers what it has pickled, and its table refers to this message.
        pickler = ForkingPickler(self._file, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table[Tensor] = self._reduced
        self._in_slot = self._elsewhere = 0
        try:
            pickler.dump(items)
        except BaseException:
            self._file.seek(before)
            self._file.truncate()
            raise
        finally:
            del pickler.dispatch_table[Tensor]

    def _reduced(self, tensor: Tensor) -> tuple[Any, ...]:
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        plain = plain and not (tensor.is_nested or tensor.requires_grad)
        there = tensor.data_ptr() - self._address if plain else -1
        if self._start <= there < self._next and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            self._in_slot += 1
            return _tensor, (self._slots, there, tuple(tensor.shape), tensor.dtype)
        self._elsewhere += 1
        offset = self._reserved(tensor.numel(), tensor.dtype) if plain else None
        if offset is None:
            reduced: tuple[Any, ...] = reduce_tensor(tensor)
            return reduced
        # Strides are kept if the tensor's memory has no gaps, as in torch.channels_last.
        axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        back = None
        if not tensor.is_contiguous() and tensor.permute(axes).is_contiguous():
            tensor = tensor.permute(axes)
            back = sorted(range(tensor.ndim), key=axes.__getitem__)
        _view(self._memory, offset, tensor.shape, tensor.dtype).copy_(tensor)
        return _tensor, (self._slots, offset, tuple(tensor.shape), tensor.dtype, back)

    def _reserved(self, count: int, dtype: torch.dtype) -> int | None:
        """Reserve room for so many numbers and return its offset.

        The result is None for no numbers, for rare types, and when there is no room.
        """
        offset, end = self._next, self._next + count * dtype.itemsize
        if not count or dtype not in _PLAIN or end > self._end:
            return None
        self._next = -(-end // _ALIGNMENT) * _ALIGNMENT
        return offset


class Packed:
    """A message in the form that is sent.

    Unpickling it in the process that made the slots returns the list of objects added.
    """

    def __init__(self, *parts: Any):
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


def empty(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """Return a new tensor in ordinary memory, with the signature of `Message.empty`."""
    return torch.empty(shape, dtype=dtype)


def _view(memory: mmap.mmap, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype in _OF_NUMPY:  # several times as fast
        return torch.from_numpy(np.ndarray(shape, _OF_NUMPY[dtype], memory, offset))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


def _unpacked(slots: int, *parts: Any) -> Any:
    return _known[slots].unpacked(*parts)


def _tensor(
    slots: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype, axes: list[int] | None = None
) -> Tensor:
    tensor = _known[slots].tensor(offset, shape, dtype)
    return tensor if axes is None else tensor.permute(axes)
