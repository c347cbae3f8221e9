"""The tensors that differ between two checkpoints, independent of the layouts that wrote them. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurmtrain.checkpoint.format.index_file import read_whole_index
from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.checkpoint.format.tensor_index import Box, BoxLocation, Index, TensorFacts
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.tensor_difference import TensorDifference
from slurmtrain.errors import CheckpointError

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


def differences(a: Path, b: Path) -> tuple[list[TensorDifference], list[str]]:
    """Compare everything in two checkpoints.

    Returns:
        The tensors that differ, those of each rank's own last, by name; and the names of the plain values that differ.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    with retention.reading(a), retention.reading(b):
        left, right = _Saved.open(a), _Saved.open(b)
        state = plain_differences(read_manifest(a).state, read_manifest(b).state)
        if (left.index.tables, left.index.digests) == (right.index.tables, right.index.digests):
            return [], state
        tensors = _tensor_differences(left, right, None)
        for file in sorted({*left.index.tables} & {*right.index.tables}):
            tensors += _tensor_differences(left, right, file)
            state += [f"{file}: {name}" for name in plain_differences(left.own_state(file), right.own_state(file))]
        return tensors, state


def plain_differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Return the dotted names of the plain values that differ between two objects of JSON."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        names = dict.fromkeys([*a, *b])
        return [
            each
            for name in names
            for each in plain_differences(a.get(name), b.get(name), f"{where}.{name}".lstrip("."))
        ]
    return [] if json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True) else [where]


def _tensor_differences(left: _Saved, right: _Saved, own_file: str | None) -> list[TensorDifference]:
    facts = [saved.index.facts if own_file is None else saved.index.own_facts(own_file) for saved in (left, right)]
    shown = "" if own_file is None else f"{own_file}: "
    found = []
    for name in sorted({*facts[0], *facts[1]}):
        one, other = facts[0].get(name), facts[1].get(name)
        if one is None or other is None:
            found.append(TensorDifference(shown + name, why=f"only in the {'second' if one is None else 'first'}"))
        elif one != other:
            found.append(TensorDifference(shown + name, why="another shape or type"))
        elif not _equal(left, right, name, one, own_file):
            found.append(TensorDifference(shown + name, _relative_difference(left, right, name, one, own_file)))
    return found


def _relative_difference(left: _Saved, right: _Saved, name: str, fact: TensorFacts, own_file: str | None) -> float:
    """Return the largest absolute difference / the largest absolute value; infinite for types without a distance."""
    whole = Box.whole(fact.shape)
    sources = [saved.index.find({name: whole}, own_file)[name] for saved in (left, right)]
    largest = scale = 0.0
    for piece in _pieces(fact):
        one, other = (
            as_numbers(saved.read(name, source, piece, fact.itemsize).tobytes(), fact.dtype)
            for saved, source in zip((left, right), sources, strict=True)
        )
        if one is None or other is None:
            return math.inf
        with np.errstate(invalid="ignore"):  # infinite values
            apart = float(np.max(np.abs(one - other), initial=0.0))
        if not math.isfinite(apart):
            return math.inf
        largest = max(largest, apart)
        scale = max(scale, float(np.max(np.abs(one), initial=0.0)), float(np.max(np.abs(other), initial=0.0)))
    return largest / scale if scale > 0 else math.inf


def as_numbers(data: bytes, dtype: str) -> NDArray[np.float64] | None:
    """Return the elements of a floating-point tensor as float64; None for other types, by torch's names."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    kinds = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
    return np.frombuffer(data, kinds[dtype]).astype(np.float64) if dtype in kinds else None


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

    def own_state(self, file: str) -> Any:
        """Return the plain state of the rank that wrote `file`, such as that of Python's random numbers.

        Raises:
            CheckpointError: it cannot be read.
        """
        begin, length = self.index.own_state(file)
        try:
            with (self.path / file).open("rb") as opened:
                opened.seek(begin)
                return json.loads(opened.read(length) or b"null")
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / file} cannot be read: {error}") from None

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


def _equal(left: _Saved, right: _Saved, name: str, fact: TensorFacts, own_file: str | None = None) -> bool:
    whole = Box.whole(fact.shape)
    sources = [saved.index.find({name: whole}, own_file)[name] for saved in (left, right)]
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
