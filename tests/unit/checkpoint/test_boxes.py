"""Boxes and headers: whatever the layout, every element is written once, and found again from any other layout."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from slurmtrain.checkpoint.errors import DamagedError
from slurmtrain.checkpoint.format.manifest import Box
from slurmtrain.checkpoint.restore.reader import Contents, read_contents, spans_of
from tests.support.checkpoint_files import part_of, write_files

ITEMSIZE = 4
Tiling = tuple[tuple[int, ...], list[Box]]


@st.composite
def tilings(draw: Any, *, least: int = 0) -> Tiling:
    """A shape, and boxes that need be no grid: some box is cut in two, along any dimension and anywhere, again and again."""
    shape = tuple(draw(st.lists(st.integers(least, 7), max_size=4)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        at, dimension = 0, draw(st.integers(0, max(0, len(shape) - 1)))
        if shape and box.size[dimension] > 1:
            at = draw(st.integers(1, box.size[dimension] - 1))
        boxes += [part(box, dimension, 0, at), part(box, dimension, at, box.size[dimension] - at)] if at else [box]
    return shape, boxes


def part(box: Box, dimension: int, begin: int, extent: int) -> Box:
    starts, sizes = list(box.start), list(box.size)
    starts[dimension] += begin
    sizes[dimension] = extent
    return Box(tuple(starts), tuple(sizes))


def read_back(path: Path, found: list[Tiling], ranks: int = 3, seed: int = 0) -> tuple[Contents, dict[str, Tensor]]:
    """What is in files of these tilings, which are dealt to ranks, and the tensors t0, t1, ... that these hold."""
    dealer, tensors = random.Random(seed), {}
    files: list[list[tuple[str, Box, Tensor]]] = [[] for _ in range(ranks)]
    for number, (shape, boxes) in enumerate(found):
        whole = tensors[f"t{number}"] = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape) + 1000 * number
        for box in boxes:
            if 0 not in box.size:
                files[dealer.randrange(ranks)].append((f"t{number}", box, part_of(whole, box)))
    return read_contents(path, write_files(path, files, tensors)), tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@given(tilings(least=1), tilings(), st.data())
def test_files_that_lack_a_box_or_have_one_twice_are_refused_by_its_name(
    folder: Path, wrong: Tiling, sound: Tiling, data: st.DataObject
) -> None:
    shape, boxes = wrong
    number = data.draw(st.sampled_from([number for number, box in enumerate(boxes) if 0 not in box.size]))
    changed = [box for place, box in enumerate(boxes) if place != number or data.draw(st.booleans())]
    changed = changed if len(changed) < len(boxes) else [*boxes, boxes[number]]
    with pytest.raises(DamagedError, match=r"elements of t1$|t1.* does not follow what is before it"):
        read_back(folder, [sound, (shape, changed)], 1 + len(changed), data.draw(st.integers(0, 99)))


@given(st.lists(tilings(), min_size=1, max_size=3), st.integers(1, 4), st.data())
@example([((), [Box((), ())]), ((0,), []), ((3, 0, 2), [])], 2, None)
def test_any_box_is_read_back_from_any_tiling(
    folder: Path, found: list[Tiling], ranks: int, data: st.DataObject | None
) -> None:
    """As `restore` does. Every element must be read exactly once."""
    contents, tensors = read_back(folder, found, ranks, data.draw(st.integers(0, 99)) if data else 0)
    wanted = {name: Box.whole(tensor.shape) for name, tensor in tensors.items()}
    if data is not None:
        for name, box in wanted.items():
            ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in box.size]
            wanted[name] = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
    read = {name: torch.full(box.size, -1, dtype=torch.int32) for name, box in wanted.items()}
    for span in spans_of(contents, wanted, read):
        assert span.end - span.begin == math.prod(span.rows) * ITEMSIZE
        content = bytearray((folder / span.file).read_bytes()[span.begin : span.end])
        assert (span.place == -1).all()
        span.place.copy_(torch.frombuffer(content, dtype=torch.int32).reshape(span.rows)[span.out])
    for name, box in wanted.items():
        assert torch.equal(read[name], part_of(tensors[name], box))
