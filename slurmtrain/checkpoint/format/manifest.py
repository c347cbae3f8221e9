"""What a checkpoint is: its manifest, and the boxes that tensors are held as.

A box is an axis-aligned part of a tensor's global shape, with a name of its own. Imports no torch and no numpy.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from pathlib import Path
from typing import Annotated, Any

import msgspec

from slurmtrain.checkpoint.errors import CheckpointMismatchError, DamagedError
from slurmtrain.checkpoint.format.directory import FINAL_NAME, file_name

Natural = Annotated[int, msgspec.Meta(ge=0)]
Extent = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

FORMAT = 4
DIGEST_LETTERS = 64

# Of a tensor, not counting extents of 0: torch counts the bytes of an empty one's strides in 64 bits, too.
MOST_ELEMENTS = 1 << 59

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


@dataclass(frozen=True)
class Box:
    """A part of a tensor: first index and extent along every dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

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
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def piece_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return the name of a box of a tensor in a safetensors header: the tensor's name, and which part of it."""
    if box.size == tuple(shape):
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
    if math.prod(box.size) * itemsize >= SPLIT_BYTES:
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


@dataclass(frozen=True)
class FileRecord:
    """The size and digests of a file as it was written.

    Attributes:
        size: size in bytes.
        digests: SHA-256 of each of the file's blocks, in hex, one after another.
    """

    size: Annotated[int, msgspec.Meta(ge=0)]
    digests: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint: its contents, and what it belongs to.

    Attributes:
        format: version of the format.
        run_id: the run that has saved it; empty without one.
        step: optimiser steps done.
        incarnation, incarnation_label: the incarnation of the run that has saved it; see `store.commit`.
        world_size: number of ranks that have saved it.
        torch_version: of those ranks.
        files: record of the file of every rank.
        headers: SHA-256, in hex, of the header of every file, with its length in front.
        tensors: global shape and dtype of all tensors by name; what a rank has for itself has its number there (`own_name`).
        state: everything that is not a tensor and the same on all ranks.
        config: config values of the run, so that later changes can be found.
        metrics: metrics of this step, as they were passed to `save`.
        created: unix time of the commit in seconds; for people, nothing is decided by it.
    """

    format: int
    run_id: str
    step: Natural
    incarnation: Natural
    incarnation_label: str
    world_size: Natural
    torch_version: str
    files: Mapping[str, FileRecord]
    headers: Mapping[str, str]
    tensors: Mapping[str, TensorFacts]
    state: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: float = 0.0

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(record.size for record in self.files.values())


def parse_manifest(path: Path, text: str, expected: str) -> Manifest:
    """Return the manifest in `text`, checked against the digest `expected`.

    Raises:
        DamagedError: the manifest is damaged. CheckpointMismatchError: it is of another format.
    """
    if hashlib.sha256(text.encode()).hexdigest() != expected:
        raise DamagedError(f"{path} is damaged: the digest of manifest.json is not the one in COMPLETE")
    try:
        values = json.loads(text)
        if values.get("format") != FORMAT:
            # Not damaged, and nothing to set aside: another version of this package wrote it.
            raise CheckpointMismatchError(
                f"{path} has format {values.get('format')}, expected {FORMAT}",
                hint="read it with the version of slurmtrain that wrote it",
            )
        manifest = msgspec.convert(values, Manifest)
        size = manifest.size
        for name, facts in manifest.tensors.items():
            if facts.dtype not in DTYPE_BYTES:
                raise ValueError(f"{name[:100]} has the unknown dtype {facts.dtype[:100]!r}")
            if facts.nbytes > size or math.prod(filter(None, facts.shape)) >= MOST_ELEMENTS:
                raise ValueError(f"{name[:100]} is larger than the checkpoint")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: manifest.json cannot be read: {error}") from None
    ranks = {file_name(rank) for rank in range(len(manifest.files))}
    if len(ranks) != manifest.world_size or manifest.files.keys() != ranks:
        others = sorted(manifest.files.keys() - ranks)[:1]
        raise DamagedError(
            f"{path} is damaged: manifest.json has other files than one for each of its {manifest.world_size} ranks"
            + "".join(f": {name[:100]!r}" for name in others)
        )
    named = FINAL_NAME.fullmatch(path.name)
    if named is not None and manifest.step != int(named[1]):
        raise DamagedError(
            f"{path} is damaged: manifest.json is of step {manifest.step}, so it belongs to another checkpoint"
        )
    return manifest
