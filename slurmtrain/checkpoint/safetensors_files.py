"""The tensors of .safetensors files that other programs have written: where they lie, and parts of them into memory.

https://github.com/huggingface/safetensors#format. Parts are read as those of our own checkpoints, in pieces of at most 16 MiB
by several threads, so that nothing but the target and these pieces takes memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.headers import BoxLocation, read_header
from slurmtrain.checkpoint.format.manifest import Box
from slurmtrain.checkpoint.restore.reader import Files, Span, spans_of
from slurmtrain.checkpoint.tensors import SAFETENSORS_NAMES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the names that transformers gives
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


def read(wanted: Sequence[Wanted]) -> None:
    """Read all parts, by several threads, as the boxes of a checkpoint of ours, but without digests.

    Raises:
        CheckpointError: a file cannot be read.
    """
    spans: list[Span] = []
    for number, each in enumerate(wanted):
        stored = each.stored
        whole = BoxLocation(str(stored.file), stored.begin, Box.whole(stored.shape))
        spans += spans_of(str(number), each.box, stored.dtype, [whole])
    try:
        with blocks.threads() as pool, closing(Files(Path(), pool)) as files:
            files.fill(spans, {str(number): each.into for number, each in enumerate(wanted)})
    except (OSError, EOFError) as error:
        name = getattr(error, "filename", None) or ", ".join(sorted({each.stored.file.name for each in wanted})[:2])
        raise CheckpointError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
