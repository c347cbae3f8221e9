"""The tensors of .safetensors files that other programs have written: where they lie, and parts of them into memory.

https://github.com/huggingface/safetensors#format. A part is read in pieces of at most 16 MiB by several threads, so that
nothing but the target and these pieces takes memory. Of a matrix whose columns are cut, whole rows are read: a page of the
file holds several of them anyway.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.boxes import Box
from slurmtrain.checkpoint.format.dtypes import SAFETENSORS_NAMES
from slurmtrain.checkpoint.format.headers import read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the names that transformers gives
PIECE_BYTES = 16 << 20
DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its bytes from `begin` on, row by row."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensors_of(source: Path) -> dict[str, StoredTensor]:
    """Return the tensors by name of a .safetensors file, or of a folder with one or several of them.

    Raises:
        CheckpointError: there is none, or one is damaged.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(source):
        found.update(_read_header(file))
    return found


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    if (source / INDEX).is_file():
        try:
            names = {str(name) for name in json.loads((source / INDEX).read_bytes())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{source / INDEX} cannot be read: {error}") from None
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{source / INDEX} names {name!r}, which is not a file in that folder")
        return [source / name for name in sorted(names)]
    if (source / SINGLE).is_file():
        return [source / SINGLE]
    pickled = next(source.glob("*.bin"), None)
    raise CheckpointError(
        f"{source} has neither {SINGLE} nor {INDEX}",
        hint=f"{pickled.name} is a pickle; write the folder again with save_pretrained of a newer transformers"
        if pickled is not None
        else "name a folder written by save_pretrained",
    )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        header, size = read_header(file)
        return {
            name: _stored(file, entry, len(header), size)
            for name, entry in json.loads(header[8:]).items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged, or not a safetensors file: {error}") from None


def _stored(file: Path, entry: Mapping[str, Any], start: int, size: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"torch has no type for its {entry['dtype']!r}")
    begin, end = entry["data_offsets"]
    tensor = StoredTensor(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), start + begin)
    if any(type(number) is not int or number < 0 for number in (*tensor.shape, begin, end)):
        raise ValueError("a tensor has no shape or no place")
    if start + end > size or end - begin != tensor.nbytes:
        raise ValueError("a tensor lies outside of the file: was it copied completely?")
    return tensor


@dataclass(frozen=True)
class Wanted:
    """A part of a stored tensor, and the memory to read it into: `into` has the shape of `box`, and any dtype or device."""

    stored: StoredTensor
    box: Box
    into: Tensor


@dataclass(frozen=True)
class _Piece:
    """Rows `first` to `last` of the first dimension."""

    wanted: Wanted
    first: int
    last: int


def read(wanted: Sequence[Wanted]) -> None:
    """Read all parts, by several threads.

    Raises:
        CheckpointError: a file cannot be read.
    """
    descriptors: dict[Path, int] = {}
    stopped = threading.Event()

    def work(piece: _Piece) -> None:
        if not stopped.is_set():
            _fill(piece, descriptors[piece.wanted.stored.file])

    try:
        for each in wanted:
            if each.stored.file not in descriptors:
                descriptors[each.stored.file] = blocks.open_file(each.stored.file)
        with blocks.threads() as pool:
            try:
                blocks.each(pool, work, [piece for each in wanted for piece in _pieces(each)])
            finally:
                stopped.set()  # leaving the pool waits for what is queued
    except (OSError, EOFError) as error:
        name = getattr(error, "filename", None) or ", ".join(sorted({each.stored.file.name for each in wanted})[:2])
        raise CheckpointError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _pieces(wanted: Wanted) -> Iterator[_Piece]:
    """Cut the rows of a part so that those of a piece fit into a thread's buffer; a single row may be larger."""
    if not wanted.box.numel:
        return
    if not wanted.box.size:
        yield _Piece(wanted, 0, 1)
        return
    row = math.prod(wanted.stored.shape[1:]) * wanted.stored.dtype.itemsize
    rows = max(1, PIECE_BYTES // row)
    first, end = wanted.box.start[0], wanted.box.start[0] + wanted.box.size[0]
    for begin in range(first, end, rows):
        yield _Piece(wanted, begin, min(begin + rows, end))


_local = threading.local()


def _fill(piece: _Piece, descriptor: int) -> None:
    """Read the rows of a piece, and copy the wanted part of them to its place."""
    stored, box = piece.wanted.stored, piece.wanted.box
    row = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    buffer = _buffer((piece.last - piece.first) * row)
    blocks.read_into(descriptor, buffer, stored.begin + piece.first * row)
    rows = torch.frombuffer(buffer, dtype=stored.dtype).view(-1, *stored.shape[1:])
    with torch.no_grad():
        if not box.size:
            piece.wanted.into.copy_(rows[0])
        else:
            part = rows[(slice(None), *box.within(Box.whole(stored.shape))[1:])]
            piece.wanted.into[piece.first - box.start[0] : piece.last - box.start[0]].copy_(part)


def _buffer(size: int) -> memoryview:
    """Return this thread's buffer, which is made once: fresh memory costs a page fault for every page."""
    if not hasattr(_local, "buffer") or len(_local.buffer) < size:
        _local.buffer = memoryview(bytearray(max(size, PIECE_BYTES)))
    return _local.buffer[:size]  # type: ignore[no-any-return]
