"""Boxes and headers: whatever the layout, every element is written once, and found again from any other layout."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.headers import Contents
from slurmtrain.checkpoint.format.manifest import Box
from slurmtrain.checkpoint.restore.reader import read_contents, spans_of
from tests.support.checkpoint_files import part_of, write_files

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


def deal(named: Sequence[tuple[str, Box]], ranks: int, seed: int) -> list[list[tuple[str, Box]]]:
    """Boxes to ranks, at random."""
    dealer = random.Random(seed)
    files: list[list[tuple[str, Box]]] = [[] for _ in range(ranks)]
    for entry in named:
        files[dealer.randrange(ranks)].append(entry)
    return files


def read_back(path: Path, found: Sequence[Tiling], ranks: int = 3, seed: int = 0) -> tuple[Contents, dict[str, Tensor]]:
    """What is in files of these tilings, which are dealt to ranks, and the tensors t0, t1, ... that these hold."""
    tensors = {
        f"t{number}": torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape) + 1000 * number
        for number, (shape, _) in enumerate(found)
    }
    named = [(f"t{number}", box) for number, (_, boxes) in enumerate(found) for box in boxes if box.numel]
    files = [[(name, box, part_of(tensors[name], box)) for name, box in some] for some in deal(named, ranks, seed)]
    manifest = write_files(path, files, tensors)
    return read_contents(path, manifest), tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


# ------------------------------------------------------------------------------------------------------------ coverage


@given(tilings(shapes(least=1)), tilings(), st.data())
def test_files_that_lack_a_box_or_have_one_twice_are_refused_by_its_name(
    folder: Path, wrong: Tiling, sound: Tiling, data: st.DataObject
) -> None:
    shape, boxes = wrong
    number = data.draw(st.sampled_from([number for number, box in enumerate(boxes) if box.numel]))
    changed = [box for place, box in enumerate(boxes) if place != number or data.draw(st.booleans())]
    changed = changed if len(changed) < len(boxes) else [*boxes, boxes[number]]
    seed = data.draw(st.integers(0, 99))
    with pytest.raises(CheckpointError, match=r"elements of t1$|t1.* does not follow what is before it"):
        read_back(folder, [sound, (shape, changed)], ranks=1 + len(changed), seed=seed)


# ------------------------------------------------------------------------------------------------------------ way back


def read_box(contents: Contents, path: Path, wanted: Mapping[str, Box]) -> dict[str, Tensor]:
    """As `restore` does. Every element must be read exactly once."""
    found = {name: torch.full(box.size, -1, dtype=torch.int32) for name, box in wanted.items()}
    times = {name: torch.zeros(box.size, dtype=torch.int32) for name, box in wanted.items()}
    for span in spans_of(contents, wanted):
        assert span.end - span.begin == math.prod(span.rows) * ITEMSIZE
        content = bytearray((path / span.file).read_bytes()[span.begin : span.end])
        found[span.name][span.into] = torch.frombuffer(content, dtype=torch.int32).reshape(span.rows)[span.out]
        times[span.name][span.into] += 1
    assert all((each == 1).all() for each in times.values())
    return found


@st.composite
def boxes_within(draw: Any, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))) for extent in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@given(st.lists(tilings(), min_size=1, max_size=3), st.integers(1, 4), st.data())
@example([((), [Box((), ())]), ((0,), []), ((3, 0, 2), [])], 2, None)
def test_any_box_is_read_back_from_any_tiling(
    folder: Path, found: list[Tiling], ranks: int, data: st.DataObject | None
) -> None:
    contents, tensors = read_back(folder, found, ranks, data.draw(st.integers(0, 99)) if data else 0)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: data.draw(boxes_within(shape)) if data else Box.whole(shape) for name, shape in shapes.items()}
    read = read_box(contents, folder, wanted)
    for name, box in wanted.items():
        assert torch.equal(read[name], part_of(tensors[name], box))
