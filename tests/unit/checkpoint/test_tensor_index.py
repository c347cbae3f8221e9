"""Boxes and tables: whatever the layout, every element is written once, and found again from any other layout."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, reject
from hypothesis import strategies as st

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.coverage import check_coverage
from slurmtrain.checkpoint.format.tensor_index import (
    SPLIT_BYTES,
    Box,
    Index,
    TensorFacts,
    TensorSchema,
    share,
    table_of,
)
from slurmtrain.checkpoint.restore.reader import spans_of

ITEMSIZE = 4
Tiling = tuple[tuple[int, ...], list[Box]]


# ------------------------------------------------------------------------------------------------------------- tilings


@st.composite
def shapes(draw: Any, *, least: int = 0) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(least, 7), max_size=4)))


@st.composite
def cut_boxes(draw: Any, whole: Box, cuts: int) -> list[Box]:
    """A tiling that need be no grid: some box is cut in two, along any dimension and anywhere, again and again."""
    boxes = [whole]
    for _ in range(cuts):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        long = [dimension for dimension, extent in enumerate(box.size) if extent > 1]
        if not long:
            boxes.append(box)
            continue
        dimension = draw(st.sampled_from(long))
        at = draw(st.integers(1, box.size[dimension] - 1))
        boxes += [moved(box, dimension, 0, at - box.size[dimension]), moved(box, dimension, at, -at)]
    return boxes


@st.composite
def grid_boxes(draw: Any, whole: Box) -> list[Box]:
    """As meshes of ranks lay tensors out: every dimension is cut by itself, unevenly and into empty parts, too."""
    edges = []
    for extent in whole.size:
        inner = sorted(draw(st.lists(st.integers(0, extent), max_size=3)))
        edges.append(list(itertools.pairwise([0, *inner, extent])))
    return [
        Box(tuple(first for first, _ in parts), tuple(last - first for first, last in parts))
        for parts in itertools.product(*edges)
    ]


@st.composite
def tilings(draw: Any, shape: st.SearchStrategy[tuple[int, ...]] = shapes()) -> Tiling:  # noqa: B008
    size = draw(shape)
    whole = Box.whole(size)
    boxes = draw(cut_boxes(whole, draw(st.integers(0, 8))) if draw(st.booleans()) else grid_boxes(whole))
    return size, boxes


def moved(box: Box, dimension: int, start: int, size: int) -> Box:
    """`box` with its start and size along one dimension changed by so much."""
    starts, sizes = list(box.start), list(box.size)
    starts[dimension] += start
    sizes[dimension] += size
    return Box(tuple(starts), tuple(sizes))


def facts(shape: Sequence[int], itemsize: int = ITEMSIZE) -> TensorFacts:
    return TensorFacts(tuple(shape), "float32" if itemsize == 4 else "float64", itemsize)


def deal(named: Sequence[tuple[str, Box]], ranks: int, seed: int) -> list[list[tuple[str, Box]]]:
    """Boxes to ranks, at random."""
    dealer = random.Random(seed)
    files: list[list[tuple[str, Box]]] = [[] for _ in range(ranks)]
    for entry in named:
        files[dealer.randrange(ranks)].append(entry)
    return files


def packed(files: Sequence[Sequence[tuple[str, Box]]], schema: TensorSchema, number: int = 0) -> list[bytes]:
    return [table_of(pieces, schema, number=number, data_start=4096, own_bytes=0).pack() for pieces in files]


def check(boxes: Mapping[str, Tiling], ranks: int = 3, seed: int = 0) -> dict[str, TensorFacts]:
    schema = {name: facts(shape) for name, (shape, _) in boxes.items()}
    named = [(name, box) for name, (_, found) in boxes.items() for box in found]
    return check_coverage([schema], packed(deal(named, ranks, seed), schema))


# ------------------------------------------------------------------------------------------------------------ coverage


@given(st.lists(tilings(), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 99))
@example([((), [Box((), ())]), ((0,), []), ((3, 0, 2), [])], 2, 0)
def test_every_tiling_is_accepted(found: list[Tiling], ranks: int, seed: int) -> None:
    named = {f"t{number}": tiling for number, tiling in enumerate(found)}
    assert {name: fact.shape for name, fact in check(named, ranks, seed).items()} == {
        name: shape for name, (shape, _) in named.items()
    }


@st.composite
def one_box_wrong(draw: Any, damage: Callable[[Any, tuple[int, ...], Box], list[Box] | None]) -> Tiling:
    """A tiling in which `damage` has put other boxes in the place of one that is not empty."""
    shape, boxes = draw(tilings(shapes(least=1)))
    number = draw(st.sampled_from([number for number, box in enumerate(boxes) if box.numel]))
    changed = damage(draw, shape, boxes[number])
    if changed is None:
        reject()
    return shape, [*boxes[:number], *changed, *boxes[number + 1 :]]


def without_one_element(draw: Any, shape: tuple[int, ...], box: Box) -> list[Box]:
    """The rest of the box, once one of its elements is taken out."""
    rest: list[Box] = []
    for dimension, extent in enumerate(box.size):
        at = draw(st.integers(0, extent - 1))
        rest += [moved(box, dimension, 0, at - extent), moved(box, dimension, at + 1, -at - 1)]
        box = moved(box, dimension, at, 1 - extent)
    return [part for part in rest if part.numel]


def shifted(draw: Any, shape: tuple[int, ...], box: Box) -> list[Box] | None:
    """As many elements as before, all inside: some twice, as many not at all."""
    possible = [
        (dimension, by)
        for dimension in range(len(shape))
        for by in (-1, 1)
        if 0 <= box.start[dimension] + by <= shape[dimension] - box.size[dimension]
    ]
    if not possible:
        return None
    dimension, by = draw(st.sampled_from(possible))
    return [moved(box, dimension, by, 0)]


DAMAGES: dict[str, Callable[[Any, tuple[int, ...], Box], list[Box] | None]] = {
    "removed": lambda draw, shape, box: [],
    "one element missing": without_one_element,
    "doubled": lambda draw, shape, box: [box, box],
    "shifted by one": shifted,
    "one element twice": lambda draw, shape, box: [box, Box(box.start, (1,) * len(shape))],
}


@pytest.mark.parametrize("damage", DAMAGES)
@given(data=st.data())
def test_what_is_missing_or_written_twice_is_refused_by_name(damage: str, data: st.DataObject) -> None:
    wrong = data.draw(one_box_wrong(DAMAGES[damage]))
    others = {f"sound{number}": data.draw(tilings()) for number in range(data.draw(st.integers(0, 2)))}
    with pytest.raises(CheckpointError, match=r"elements of wrong\.weight were written"):
        check({**others, "wrong.weight": wrong}, data.draw(st.integers(1, 4)), data.draw(st.integers(0, 99)))


@given(tilings(shapes(least=1)), st.data())
def test_a_box_outside_is_refused_by_name(tiling: Tiling, data: st.DataObject) -> None:
    shape, boxes = tiling
    assume(shape)
    dimension = data.draw(st.integers(0, len(shape) - 1))
    by = data.draw(st.sampled_from([-1, 1]))
    box = moved(Box.whole(shape), dimension, by, 0)
    with pytest.raises(CheckpointError, match=r"a piece of far\.off lies outside of the tensor"):
        check({"near": ((2,), [Box((0,), (2,))]), "far.off": (shape, [*boxes, box])})


def test_ranks_with_different_tensors_make_one_whole() -> None:
    """Pipeline stages: schemas differ, their common tensors are counted together, positions are each one's own."""
    first = {"a": facts((2,)), "shared": facts((4, 3))}
    second = {"shared": facts((4, 3)), "z": facts(())}
    tables = [
        *packed([[("shared", Box((0, 0), (1, 3))), ("a", Box((0,), (2,)))]], first, number=0),
        *packed([[("z", Box((), ())), ("shared", Box((1, 0), (3, 3)))]], second, number=1),
    ]
    assert set(check_coverage([first, second], tables)) == {"a", "shared", "z"}
    with pytest.raises(CheckpointError, match="3 of 12 elements of shared"):
        check_coverage([first, second], [tables[0], *packed([[("z", Box((), ()))]], second, number=1)])


def test_a_rank_s_own_tensors_are_no_part_of_the_whole() -> None:
    schema = {"a": facts((2,)), "own/random": TensorFacts((3, 1), "uint8", 1, own=True)}
    files = [
        [("a", Box((0,), (2,))), ("own/random", Box((0, 0), (3, 1)))],
        [("own/random", Box((0, 0), (3, 1)))],
    ]
    assert set(check_coverage([schema], packed(files, schema))) == {"a"}


@pytest.mark.parametrize("other", [TensorFacts((3,), "float32", 4), TensorFacts((2,), "float64", 8)])
def test_ranks_that_disagree_about_a_tensor_are_refused(other: TensorFacts) -> None:
    with pytest.raises(CheckpointError, match=r"layer\.weight is .* on one rank and float32 \[2\] on another"):
        check_coverage([{"layer.weight": facts((2,))}, {"layer.weight": other}], [])


# ------------------------------------------------------------------------------------------------------------- sharing


@given(tilings(), st.integers(1, 9), st.sampled_from([1, 4, SPLIT_BYTES]))
def test_holders_share_every_box_exactly(tiling: Tiling, holders: int, itemsize: int) -> None:
    """Itemsize 1 MiB stands for large tensors: each box is above the limit then."""
    shape, boxes = tiling
    shared = []
    for box in boxes:
        parts = [share(box, itemsize, "name", index, holders) for index in range(holders)]
        shared += [part for part in parts if part is not None and part.numel]
    assert set(check({"name": (shape, shared)}, holders)) == {"name"}


def test_small_tensors_are_spread_over_all_holders() -> None:
    for holders in range(2, 10):
        counts = [0] * holders
        for number in range(200 * holders):
            written = [share(Box.whole((16,)), 4, f"layers.{number}.norm", index, holders) for index in range(holders)]
            (owner,) = (index for index, part in enumerate(written) if part is not None)
            counts[owner] += 1
        assert min(counts) > 100 and max(counts) < 300


# ------------------------------------------------------------------------------------------------------ tables and index


def index_of(files: Mapping[str, Sequence[tuple[str, Box]]], schema: TensorSchema) -> Index:
    tables = dict(zip(files, packed(list(files.values()), schema), strict=True))
    return Index([schema], tables, {name: bytes([number] * 32) for number, name in enumerate(files)})


# ------------------------------------------------------------------------------------------------------------ way back


def files_as_bytes(
    files: Mapping[str, Sequence[tuple[str, Box]]], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, bytes]:
    """What the ranks would write: 4,096 bytes of header, then the boxes one after another."""
    return {
        file: b"?" * 4096
        + b"".join(
            np.ascontiguousarray(
                arrays[name][tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
            ).tobytes()
            for name, box in pieces
        )
        for file, pieces in files.items()
    }


def read_box(index: Index, contents: Mapping[str, bytes], wanted: Mapping[str, Box]) -> dict[str, torch.Tensor]:
    """As `restore` does, from bytes in memory. Every element must be read exactly once."""
    found = {}
    for name, sources in index.find(wanted).items():
        tensor = torch.full(wanted[name].size, -1, dtype=torch.int32)
        times = torch.zeros(wanted[name].size, dtype=torch.int32)
        for span in spans_of(name, wanted[name], torch.int32, sources):
            assert span.end - span.begin == math.prod(span.rows) * ITEMSIZE
            rows = torch.frombuffer(bytearray(contents[span.file][span.begin : span.end]), dtype=torch.int32)
            tensor[span.into] = rows.reshape(span.rows)[span.out]
            times[span.into] += 1
        assert (times == 1).all()
        found[name] = tensor
    return found


@st.composite
def boxes_within(draw: Any, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))) for extent in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@given(st.lists(tilings(), min_size=1, max_size=3), st.data())
def test_any_box_is_read_back_from_any_tiling(found: list[Tiling], data: st.DataObject) -> None:
    arrays, schema, named = {}, {}, []
    for position, (shape, boxes) in enumerate(found):
        name = f"t{position}"
        arrays[name] = np.arange(math.prod(shape), dtype=np.int32).reshape(shape) + 1000 * position
        schema[name] = facts(shape)
        named += [(name, box) for box in boxes if box.numel]
    ranks = data.draw(st.integers(1, 4))
    dealt = deal(named, ranks, data.draw(st.integers(0, 99)))
    files = {f"rank{rank:05d}": pieces for rank, pieces in enumerate(dealt)}
    index = index_of(files, schema)
    wanted = {name: data.draw(boxes_within(array.shape)) for name, array in arrays.items()}
    read = read_box(index, files_as_bytes(files, arrays), wanted)
    for name, box in wanted.items():
        expected = arrays[name][tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        assert np.array_equal(read[name].numpy(), expected)
