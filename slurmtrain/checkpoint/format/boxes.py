"""Boxes: the parts of a tensor in which a checkpoint holds it, the names that they have, and which rank writes which.

A box is an axis-aligned part of a tensor's global shape. Imports no torch and no numpy, and knows nothing of storage.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import Annotated

import msgspec

# Smaller tensors are written whole by one of the ranks that hold them; larger ones are split among all of these.
SPLIT_BYTES = 1 << 20
EVEN = 8  # rows per rank from which on one row more or less does not matter
MAX_DIMENSIONS = 64  # greatest number of dimensions of a tensor
# Bytes per element by torch's names, for readers that do not import torch.
DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float4_e2m1fn_x2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    "complex128": 16,
}
Extent = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: first index and extent along every dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def intersection(self, other: Box) -> Box | None:
        """Return the part that both boxes have; None: there is none."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(map(sub, ends, start))
        return Box(start, size) if not size or min(size) > 0 else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the index of this box in an array that holds `other`."""
        firsts = map(sub, self.start, other.start)
        return tuple([slice(first, first + extent) for first, extent in zip(firsts, self.size, strict=True)])


@dataclass(frozen=True)
class TensorFacts:
    """The facts of a tensor that all ranks have to agree on: global shape, and dtype ("float32"), one of `DTYPE_BYTES`."""

    shape: Annotated[tuple[Extent, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    dtype: str

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def piece_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return the name of a box of a tensor in a safetensors header: the tensor's name, and which part of it."""
    if box == Box.whole(shape):
        return name
    return name + "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(box.start, box.size, strict=True)) + "]"


def share(box: Box, itemsize: int, key: str, index: int, holders: int) -> Box | None:
    """Return the part of `box` that the `index`-th of the `holders` ranks that hold it writes; None: nothing.

    Large boxes are cut along the first dimension that is long enough to give even parts, so that every rank writes, and
    has to copy, the same number of bytes. Each smaller box is written by one rank, chosen by a checksum of the name:
    the same on all ranks.
    """
    if holders == 1:
        return box
    if box.numel * itemsize >= SPLIT_BYTES:
        even = [dimension for dimension, extent in enumerate(box.size) if extent >= EVEN * holders]
        dimension = even[0] if even else max(range(len(box.size)), key=lambda one: box.size[one], default=0)
        extent = box.size[dimension] if box.size else 1
        if extent >= holders:
            first, last = extent * index // holders, extent * (index + 1) // holders
            start, size = list(box.start), list(box.size)
            start[dimension] += first
            size[dimension] = last - first
            return Box(tuple(start), tuple(size))
    return box if zlib.crc32(key.encode()) % holders == index else None
