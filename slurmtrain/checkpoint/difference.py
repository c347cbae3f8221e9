"""The tensors that differ between two checkpoints, independent of the layouts that wrote them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurmtrain.checkpoint.format.index_file import read_whole_index
from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.checkpoint.format.tensor_index import Box, BoxLocation, Index, TensorFacts
from slurmtrain.checkpoint.store import retention

PIECE_BYTES = 64 * 2**20  # bytes of a tensor that are compared in one go


def differing_tensors(a: Path, b: Path, of: str = "model") -> list[str]:
    """Return the names of the tensors of the object `of` whose bits, shape or type differ, or that only one checkpoint has.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    with retention.reading(a), retention.reading(b):
        left, right = _Saved.open(a), _Saved.open(b)
        if (left.index.tables, left.index.digests) == (right.index.tables, right.index.digests):
            return []
        facts = [saved.tensors(of) for saved in (left, right)]
        return [
            name
            for name in sorted({*facts[0], *facts[1]})
            if facts[0].get(name) != facts[1].get(name) or not _equal(left, right, name, facts[0][name])
        ]


def size_of(path: Path, of: str = "model") -> int:
    """Return the bytes of the tensors of the object `of`."""
    return sum(fact.nbytes for fact in _Saved.open(path).tensors(of).values())


@dataclass(frozen=True)
class _Saved:
    path: Path
    index: Index

    @classmethod
    def open(cls, path: Path) -> _Saved:
        return cls(path, read_whole_index(path, read_manifest(path)))

    def tensors(self, of: str) -> dict[str, TensorFacts]:
        return {name: fact for name, fact in self.index.facts.items() if name.startswith(f"{of}.") and not fact.own}

    def read(self, name: str, sources: Sequence[BoxLocation], box: Box, itemsize: int) -> NDArray[np.void]:
        """Return the part `box` of a tensor, assembled from what the files hold of it."""
        result = np.empty(box.size, dtype=f"V{itemsize}")
        for source in sources:
            overlap = box.intersection(source.box)
            if overlap is None:
                continue
            held = np.memmap(self.path / source.file, np.uint8, "r", source.offset, (source.box.numel * itemsize,))
            whole = held.view(f"V{itemsize}").reshape(source.box.size)
            result[overlap.within(box)] = whole[overlap.within(source.box)]
        return result


def _equal(left: _Saved, right: _Saved, name: str, fact: TensorFacts) -> bool:
    whole = Box.whole(fact.shape)
    sources = [saved.index.find({name: whole})[name] for saved in (left, right)]
    return all(
        left.read(name, sources[0], piece, fact.itemsize).tobytes()
        == right.read(name, sources[1], piece, fact.itemsize).tobytes()
        for piece in _pieces(fact)
    )


def _pieces(fact: TensorFacts) -> Iterator[Box]:
    """Yield boxes that cut the tensor along its first dimension."""
    if not fact.shape:
        yield Box.whole(fact.shape)
        return
    row = math.prod(fact.shape[1:]) * fact.itemsize
    rows = max(1, PIECE_BYTES // max(1, row))
    for first in range(0, fact.shape[0], rows):
        yield Box((first, *[0] * (len(fact.shape) - 1)), (min(rows, fact.shape[0] - first), *fact.shape[1:]))
