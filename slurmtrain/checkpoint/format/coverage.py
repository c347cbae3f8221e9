"""The check that the boxes of all files together are every tensor, with no element missing. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.tensor_index import (
    FileTable,
    Ints,
    TensorFacts,
    TensorSchema,
    merged_schemas,
    padded,
    shapes_of,
)

PRIME = (1 << 31) - 1  # of a random measure


def check_coverage(schemas: Sequence[TensorSchema], packed: Iterable[bytes]) -> dict[str, TensorFacts]:
    """Check that the boxes of all files together tile every tensor: every element once, none twice, none outside.

    Boxes tile a tensor exactly if, for every measure, theirs add up to that of the whole. One random measure is enough:
    a product over dimensions of F_d(end) - F_d(start), F random modulo a prime, is a polynomial in F which vanishes by
    chance with probability of at most dimensions / 2**31 (Schwartz 1980, Zippel 1979). It takes linear time, whatever
    the layout.

    Args:
        packed: `FileTable.pack()` of every rank; one is unpacked at a time.

    Returns:
        All tensors by name, without the ranks' own ones.

    Raises:
        CheckpointError: a tensor is not complete; the message names it.
    """
    facts, positions = merged_schemas(schemas)
    names = list(facts)
    shapes = shapes_of(facts)
    dimensions = shapes.shape[1]
    wanted = _measure(np.zeros_like(shapes), shapes)
    found = np.zeros(len(names), dtype=np.int64)
    elements = np.zeros(len(names), dtype=np.int64)
    own = [
        ([number for number, fact in enumerate(schema.values()) if fact.own and fact.nbytes > 0], shapes_of(schema))
        for schema in schemas
    ]
    for data in packed:
        table = FileTable.unpack(data)
        numbers = positions[table.schema][table.tensors]
        shared = numbers >= 0
        _check_own(table, ~shared, *own[table.schema])
        numbers, boxes = numbers[shared], table.boxes[shared]
        starts, sizes = padded(boxes[:, 0], dimensions, 0), padded(boxes[:, 1], dimensions, 1)
        outside = ((starts < 0) | (starts + sizes > shapes[numbers])).any(axis=1)
        if outside.any():
            raise CheckpointError(f"a piece of {names[numbers[outside][0]]} lies outside of the tensor")
        np.add.at(elements, numbers, sizes.prod(axis=1))
        np.add.at(found, numbers, _measure(starts, starts + sizes))
        found %= PRIME
    wrong = (found != wanted) | (elements != shapes.prod(axis=1))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise CheckpointError(
            f"{elements[first]} of {shapes[first].prod()} elements of {names[first]} were written"
            + (", some of them twice" if elements[first] >= shapes[first].prod() else "")
            + (f" (and {int(wrong.sum()) - 1} more tensors)" if wrong.sum() > 1 else "")
        )
    return facts


def _check_own(table: FileTable, rows: npt.NDArray[np.bool_], wanted: list[int], shapes: Ints) -> None:
    """Raise CheckpointError unless these rows of a rank's table have each of its own tensors, whole and once.

    Args:
        wanted: numbers of the own tensors in the schema.
        shapes: shapes of all tensors in the schema.
    """
    boxes, dimensions = table.boxes[rows], shapes.shape[1]
    starts, sizes = padded(boxes[:, 0], dimensions, 0), padded(boxes[:, 1], dimensions, 1)
    whole = (starts == 0).all() and (sizes == shapes[table.tensors[rows]]).all()
    if sorted(table.tensors[rows].tolist()) != wanted or not whole:
        raise CheckpointError("a rank's own tensors are not whole")


def _measure(starts: Ints, ends: Ints) -> Ints:
    """Return the product over dimensions of F_d(end) - F_d(start) modulo PRIME, int64 [n]."""
    product = np.ones(len(starts), dtype=np.int64)
    for dimension in range(starts.shape[1]):
        factor = _random(ends[:, dimension], dimension) - _random(starts[:, dimension], dimension)
        product = product * (factor % PRIME) % PRIME
    return product


def _random(index: Ints, dimension: int) -> Ints:
    """Return a fixed random function of (index, dimension), below PRIME: the finaliser of SplitMix64 (Steele et al. 2014)."""
    z = index.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (dimension + 1)) & 0xFFFFFFFFFFFFFFFF)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(PRIME)).astype(np.int64)
