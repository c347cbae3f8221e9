"""How a worker hands tensors to its rank: in memory that both share and that is used again and again.

Sent the usual way, each tensor opens shared memory of its own, whose descriptor travels and whose pages are new to both
processes: for a micro batch of tokens that takes several times as long as reading it. Here a worker copies its tensors into one
of its slots, and the rank copies them out as the message arrives. Anonymous memory, so the size of /dev/shm does not matter.
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
_OF_NUMPY = {getattr(torch, name): np.dtype(name) for name in ("uint16", "uint32", "int32", "int64", "float32")}

_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Slots] = weakref.WeakValueDictionary()


class Slots:
    """Shared by a process and the workers that it forks afterwards.

    Each worker uses its slots in turn. That one is free again when its turn comes is for the caller to see to: no more
    messages of a worker may be under way, to be sent or to be received, than it has slots.

    Args:
        workers: how many write.
        each: slots that each of them has.
    """

    def __init__(self, workers: int, each: int):
        self._each, self._number = each, next(_numbers)
        self._memory = mmap.mmap(-1, workers * each * SLOT_BYTES)
        self._sent = 0
        _known[self._number] = self

    def message(self, worker: int) -> Message:
        """In a worker: one whose tensors will lie in its next slot."""
        self._sent += 1
        start = (worker * self._each + self._sent % self._each) * SLOT_BYTES
        self._header(start)[0] = self._sent
        return Message(self._memory, start, (self._number, start, self._sent))

    def unpacked(self, start: int, sent: int, pickled: bytes) -> list[Any]:
        """What was added to a message, with tensors of their own."""
        file, content = io.BytesIO(pickled), []
        while file.tell() < len(pickled):
            content += pickle.load(file)
        if self._header(start)[0] != sent:
            raise SlurmtrainError("a worker has overwritten data before they were read: an error of slurmtrain's own")
        return content

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A copy of the one that lies there."""
        shared = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=offset)
        return shared.clone().reshape(shape)

    def _header(self, start: int) -> Any:
        return np.frombuffer(self._memory, dtype=np.int64, count=1, offset=start)


class Message:
    """Takes objects of any kind, whose tensors it copies into the slot. Those for which there is no room there go torch's way,
    as do those that are not plain numbers in memory.

    Args:
        memory: of all slots.
        start: of this slot in it.
        names: the slots, this one, and the message.
    """

    def __init__(self, memory: mmap.mmap, start: int, names: tuple[int, int, int]):
        self._memory, self._names = memory, names
        self._next, self._end = start + _HEADER_BYTES, start + SLOT_BYTES
        self._address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._kept: list[Any] = []  # not pickled yet
        self._copies = True  # in what was pickled last, or before anything was
        self._file = io.BytesIO()
        self._pickler = ForkingPickler(self._file, pickle.HIGHEST_PROTOCOL)
        self._pickler.dispatch_table[Tensor] = self._reduced

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor in the slot, which need not be copied when it is added. It is of no use after that."""
        offset = self._reserved(math.prod(shape), dtype)
        return torch.empty(shape, dtype=dtype) if offset is None else self._at(offset, shape, dtype)

    def add(self, item: Any) -> None:
        """Take one object. Where its tensors had to be copied it may be let go then, so that the next one finds its memory in
        the cache; others are pickled together, which is faster."""
        self._kept.append(item)
        if self._copies:
            self._dump()

    def packed(self) -> Packed:
        self._dump()
        return Packed(*self._names, self._file.getvalue())

    def _dump(self) -> None:
        before, items = self._file.tell(), self._kept
        self._kept, self._copies = [], False
        try:
            self._pickler.dump(items)
        except BaseException:
            self._file.seek(before)
            self._file.truncate()
            raise
        finally:
            self._pickler.clear_memo()

    def _reduced(self, tensor: Tensor) -> tuple[Any, ...]:
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not plain or tensor.requires_grad:
            return reduce_tensor(tensor)
        shape, dtype = tuple(tensor.shape), tensor.dtype
        there = tensor.data_ptr() - self._address
        as_it_lies = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if self._names[1] <= there < self._next and as_it_lies:
            return _tensor, (self._names[0], there, shape, dtype)
        offset = self._reserved(tensor.numel(), dtype)
        if offset is None:
            return reduce_tensor(tensor)
        self._at(offset, shape, dtype).copy_(tensor)
        self._copies = True
        return _tensor, (self._names[0], offset, shape, dtype)

    def _reserved(self, count: int, dtype: torch.dtype) -> int | None:
        """Where so many numbers may lie; None for none, and when there is no room for them."""
        offset, end = self._next, self._next + count * dtype.itemsize
        if not count or end > self._end:
            return None
        self._next = -(-end // _ALIGNMENT) * _ALIGNMENT
        return offset

    def _at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype in _OF_NUMPY:  # several times as fast
            return torch.from_numpy(np.ndarray(shape, _OF_NUMPY[dtype], self._memory, offset))
        return torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


class Packed:
    """A message on its way. Unpickling it, in the process that made the slots, gives a list of what was added."""

    def __init__(self, *parts: Any):
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


def _unpacked(number: int, *parts: Any) -> Any:
    return _known[number].unpacked(*parts)


def _tensor(number: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return _known[number].tensor(offset, shape, dtype)
