"""Where the pieces of all tensors lie: the safetensors headers of the ranks' files say it, and nothing else does.

A header names every box in its file; shape and type of the whole tensors are in the manifest, as is the digest of every
header, so that it can be read without the rest of the block. Anybody may have written a checkpoint whose digests fit: so
boxes have to lie in their tensors and in their file, and to be as many elements as the tensors have. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import sub
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmtrain.checkpoint.errors import DamagedError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.directory import OWN_STATE, file_name, own_name
from slurmtrain.checkpoint.format.manifest import DTYPE_BYTES, Box, Manifest, TensorFacts

# A row for each box, since 1,024 ranks with 3,000 tensors each have three million of them: the rank whose file it is in, the
# number of its tensor in the manifest, its first byte in the file and how many they are, and along each dimension first index
# and end, which are 0 and 1 where it has no such dimension. The JSON of what rank R has for itself is a tensor of bytes, the
# R-th behind those of the manifest.
Table = npt.NDArray[np.int64]
_TENSOR, _BYTES, _EDGES = 1, 3, 4

HEADER_BYTES = 100_000_000  # the format's own limit
_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


@lru_cache(maxsize=4096)
def _edges(text: str) -> list[int]:
    """Return the numbers in "0:8, 64:128"; most tensors of a rank are cut in the same few ways."""
    return [int(edge) for part in text.split(", ") for edge in part.split(":")]


def read_headers(path: Path, manifest: Manifest, names: Sequence[str]) -> Table:
    """Return what is in these files of the checkpoint `path`.

    Raises:
        DamagedError: a file is missing or cut off, or a header is not what was written. UnreadableError: see
            `blocks.patiently`.
    """
    files = {name: number for number, name in enumerate(sorted(manifest.files))}
    tensors = {name: number for number, name in enumerate(manifest.tensors)}
    dimensions = max((len(facts.shape) for facts in manifest.tensors.values()), default=0) or 1
    shapes = np.ones((len(tensors), dimensions), dtype=np.int64)
    for row, facts in enumerate(manifest.tensors.values()):
        shapes[row, : len(facts.shape)] = facts.shape
    whole = [[edge for extent in shape for edge in (0, extent)] for shape in shapes.tolist()]
    itemsizes = np.array([DTYPE_BYTES[facts.dtype] for facts in manifest.tensors.values()], dtype=np.int64)

    def boxes(name: str) -> Table:
        header, size = blocks.patiently(partial(_read_header, path / name), path / name)
        if hashlib.sha256(header).hexdigest() != manifest.headers.get(name):
            raise ValueError("its digest differs")
        entries = json.loads(header[8:])
        entries.pop("__metadata__", None)
        rows, position = [], 0
        for key, entry in entries.items():
            begin, end = entry["data_offsets"]
            if begin != position or type(end) is not int or end < begin:
                raise ValueError(f"{key[:100]} does not follow what is before it")
            position = end
            if key == OWN_STATE:
                number, edges = len(tensors) + files[name], [0, end - begin]
            elif key in tensors:
                number, edges = tensors[key], whole[tensors[key]]
            else:  # see `manifest.piece_name`
                tensor, _, text = key.removesuffix("]").rpartition("[")
                if tensor not in tensors:
                    raise ValueError(f"{key[:100]} is no part of a tensor of the manifest")
                number, edges = tensors[tensor], _edges(text)
                if len(edges) != 2 * len(manifest.tensors[tensor].shape):
                    raise ValueError(f"{key[:100]} has another number of dimensions")
            padding = [0, 1] * (dimensions - len(edges) // 2)
            rows.append([files[name], number, len(header) + begin, end - begin, *edges, *padding])
        if len(header) + position != size:
            raise ValueError(f"it describes {len(header) + position} of {size} bytes")
        table = np.array(rows, dtype=np.int64).reshape(-1, _EDGES + 2 * dimensions)
        of_tensors = table[table[:, _TENSOR] < len(tensors)]
        numbers, firsts, ends = of_tensors[:, _TENSOR], of_tensors[:, _EDGES::2], of_tensors[:, _EDGES + 1 :: 2]
        if not ((firsts >= 0) & (firsts < ends) & (ends <= shapes[numbers])).all():
            raise ValueError("a piece lies outside of its tensor")
        if not ((ends - firsts).prod(axis=1) * itemsizes[numbers] == of_tensors[:, _BYTES]).all():
            raise ValueError("a piece has more or fewer bytes than its elements")
        return table

    def read(name: str) -> Table:
        try:
            return boxes(name)
        except OSError as error:
            raise DamagedError(f"{path} is damaged: {blocks.cannot_be_read(name, error)}") from None
        except _WRONG as error:
            why = f"the header of {name} is not what was written: {error}"
            raise DamagedError(f"{path} is damaged: {why}") from None

    with blocks.threads() as pool:
        empty = np.empty((0, _EDGES + 2 * dimensions), dtype=np.int64)
        return np.concatenate([empty, *blocks.each(pool, read, names)])


def _read_header(file: Path) -> tuple[bytes, int]:
    """Return the header of a safetensors file, with its length in front, and the size of the file."""
    with os.fdopen(blocks.open_file(file), "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        prefix = opened.read(8)
        length = int.from_bytes(prefix, "little")
        if not 0 < length <= min(HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes does not fit into its {size}")
        return prefix + opened.read(length), size


@dataclass(frozen=True)
class Contents:
    """What is in all files of a checkpoint.

    Attributes:
        facts: of its tensors, and of the JSON of each rank (`own_name(rank, "")`), in the order of their numbers.
    """

    facts: Mapping[str, TensorFacts]
    table: Table

    @classmethod
    def whole(cls, path: Path, manifest: Manifest, table: Table) -> Contents:
        """Return the contents of the checkpoint `path`, all of whose files are in `table`.

        Raises:
            DamagedError: they lack elements of a tensor, or have some twice.
        """
        elements = (table[:, _EDGES + 1 :: 2] - table[:, _EDGES::2]).prod(axis=1)
        held = np.zeros(len(manifest.tensors) + len(manifest.files), dtype=np.int64)
        np.add.at(held, table[:, _TENSOR], elements)
        counts = held.tolist()
        for (name, facts), count in zip(manifest.tensors.items(), counts, strict=False):
            wanted = math.prod(facts.shape)
            if count != wanted:
                what = f"its files have {count} of {wanted} elements of {name[:100]}"
                raise DamagedError(f"{path} is damaged: {what}")
        own = counts[len(manifest.tensors) :]
        own_facts = {own_name(rank, ""): TensorFacts((size,), "uint8") for rank, size in enumerate(own)}
        if own_facts.keys() & manifest.tensors.keys():
            raise DamagedError(f"{path} is damaged: a tensor has the name of a rank's own state")
        return cls({**manifest.tensors, **own_facts}, table)

    def find(self, wanted: Mapping[str, Box]) -> Iterator[tuple[str, str, int, Box]]:
        """Yield each box that overlaps with what is wanted of its tensor: tensor, file, the first byte there, and the box."""
        names = list(self.facts)
        dimensions = (self.table.shape[1] - _EDGES) // 2
        edges = np.zeros((len(names), 2 * dimensions), dtype=np.int64)  # what is not wanted overlaps with nothing
        for row, name in enumerate(names):
            if name in wanted:
                box = wanted[name]
                edges[row, 1::2] = 1
                edges[row, : 2 * len(box.size) : 2] = box.start
                edges[row, 1 : 2 * len(box.size) : 2] = np.add(box.start, box.size)
        of_table = self.table[:, _TENSOR]
        overlaps = np.ones(len(self.table), dtype=bool)
        for first in range(0, 2 * dimensions, 2):  # not all at once: that would be as large as the table
            begins = np.maximum(self.table[:, _EDGES + first], edges[of_table, first])
            overlaps &= begins < np.minimum(self.table[:, _EDGES + first + 1], edges[of_table, first + 1])
        for file, tensor, begin, _, *ends in self.table[overlaps].tolist():
            name = names[tensor]
            used = 2 * len(self.facts[name].shape)
            starts = ends[:used:2]
            box = Box(tuple(starts), tuple(map(sub, ends[1:used:2], starts)))
            yield name, file_name(file), begin, box


def parse_own_state(path: Path, text: bytes) -> dict[str, Any]:
    """Return a rank's own plain state, which is in the checkpoint `path`, from its JSON. Raises DamagedError if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: a rank's own state cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path} is damaged: a rank's own state cannot be read: it is not an object")
    return found
