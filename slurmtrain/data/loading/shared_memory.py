"""Shared memory by which a worker hands tensors to its rank, allocated once and used again and again.

Sent the usual way, each tensor opens shared memory of its own, whose descriptor is sent and whose pages are new to both
processes: for a micro batch of tokens, that takes several times as long as reading it. Here a worker copies its tensors
into one of its slots, and the rank copies them out as the message arrives. A tensor that is larger than a slot is still
sent the usual way, by /dev/shm.

Measured by processor time, this earned 1.9 times as many rows of tokens as the usual way,
2.5 times as many packed ones, and 4 times as many small images.
"""

from __future__ import annotations

import functools
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
_slots_by_number: weakref.WeakValueDictionary[int, Slots] = weakref.WeakValueDictionary()


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
        _slots_by_number[self._number] = self

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
            content.append(pickle.load(file))
        if self._header(start)[0] != message:
            raise SlurmtrainError("a worker has overwritten data before they were read: an error of slurmtrain's own")
        return content

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a copy of the tensor at `offset`."""
        if dtype in _OF_NUMPY:  # torch copies unsigned types several times as slowly
            return torch.from_numpy(np.ndarray(shape, _OF_NUMPY[dtype], self._memory, offset).copy())
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

    Attributes:
        tensor_bytes: bytes of all tensors so far.
    """

    def __init__(self, memory: mmap.mmap, *, slots: int, start: int, message: int):
        self._memory, self._slots, self._start, self._message = memory, slots, start, message
        self._next, self._end = start + _HEADER_BYTES, start + SLOT_BYTES
        self.tensor_bytes = 0
        self._file = io.BytesIO()
        self._pickler = ForkingPickler(self._file, pickle.HIGHEST_PROTOCOL)
        self._pickler.dispatch_table[Tensor] = self._reduced

    def add(self, item: Any) -> None:
        """Add one object as it is now. After an error of pickling, the message holds the objects before."""
        before = self._file.tell()
        self._pickler.clear_memo()
        try:
            self._pickler.dump(item)
        except BaseException:
            self._file.seek(before)
            self._file.truncate()
            raise

    def packed(self) -> PackedMessage:
        """Return the message in the form that is sent; nothing can be added afterwards."""
        del self._pickler.dispatch_table[Tensor]  # which refers to this message
        return PackedMessage(self._slots, self._start, self._message, self._file.getvalue())

    def _reduced(self, tensor: Tensor) -> tuple[Any, ...]:
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        self.tensor_bytes += tensor.nbytes if plain else 0
        plain = plain and not (tensor.is_nested or tensor.requires_grad)
        if plain and not tensor.numel():
            return functools.partial(torch.empty, dtype=tensor.dtype), (tuple(tensor.shape),)
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
        if tensor.dtype in _OF_NUMPY and not (tensor.is_conj() or tensor.is_neg()):
            np.ndarray(tensor.shape, _OF_NUMPY[tensor.dtype], self._memory, offset)[...] = tensor.numpy()
        else:
            _view(self._memory, offset, tensor.shape, tensor.dtype).copy_(tensor)
        return _tensor, (self._slots, offset, tuple(tensor.shape), tensor.dtype, back)

    def _reserved(self, count: int, dtype: torch.dtype) -> int | None:
        """Reserve room for so many numbers and return its offset.

        The result is None for rare types, and when there is no room.
        """
        offset, end = self._next, self._next + count * dtype.itemsize
        if dtype not in _PLAIN or end > self._end:
            return None
        self._next = -(-end // _ALIGNMENT) * _ALIGNMENT
        return offset


class PackedMessage:
    """A message in the form that is sent.

    Unpickling it in the process that made the slots returns the list of objects added.
    """

    def __init__(self, *parts: Any):
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


def _view(memory: mmap.mmap, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


def _unpacked(slots: int, *parts: Any) -> Any:
    return _slots_by_number[slots].unpacked(*parts)


def _tensor(
    slots: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype, axes: list[int] | None = None
) -> Tensor:
    tensor = _slots_by_number[slots].tensor(offset, shape, dtype)
    return tensor if axes is None else tensor.permute(axes)
