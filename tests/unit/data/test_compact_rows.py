from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from slurmtrain.data.loading import compact_rows
from slurmtrain.data.loading.batches import merge_batches, num_targets
from slurmtrain.data.loading.compact_rows import CompactRows, RowGroup, merge_groups, row_group

ROWS = CompactRows(
    tokens=torch.tensor([[65535, 1, 2, 3, 4], [5, 6, 7, 0, 0]], dtype=torch.uint16),
    num_targets=6,
    lengths=torch.tensor([4, 2]),
    places=torch.tensor([1, 4]),
    values=torch.tensor([9, 40_000]),
    documents=torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.int32),
)


def test_rows_become_inputs_and_targets_with_other_targets_and_padding() -> None:
    batch = ROWS.batch()
    assert batch["inputs"].tolist() == [[65535, 1, 2, 3], [5, 6, 0, 0]]
    assert batch["targets"].tolist() == [[1, 9, 3, 4], [40_000, 7, -100, -100]]
    assert batch["documents"].tolist() == ROWS.documents.tolist()  # type: ignore[union-attr]
    assert int((batch["targets"] != -100).sum()) == ROWS.num_targets
    assert ROWS._replace(values=None).batch()["targets"].tolist() == [[1, -100, 3, 4], [-100, 7, -100, -100]]


@pytest.mark.parametrize(
    ("dtype", "highest"), [(torch.uint8, 2**8 - 1), (torch.uint16, 2**16 - 1), (torch.uint32, 2**32 - 1)]
)
def test_what_a_gpu_computes_is_what_the_processor_does(dtype: torch.dtype, highest: int) -> None:
    tokens = torch.tensor([[0, 1, highest // 2, highest // 2 + 1, highest]]).to(dtype)
    assert (
        compact_rows.by_signed(tokens).tolist()
        == tokens.long().tolist()
        == [[0, 1, highest // 2, highest // 2 + 1, highest]]
    )


def test_rows_are_padded_to_the_length_that_is_wanted() -> None:
    batch = ROWS._replace(row_length=6).batch()
    assert batch["inputs"].tolist() == [[65535, 1, 2, 3, 0, 0], [5, 6, 0, 0, 0, 0]]
    assert batch["targets"][:, 3:].tolist() == [[4, -100, -100], [-100] * 3]
    assert batch["documents"].tolist() == [[0, 0, 1, 1, 2, 2]] * 2


@st.composite
def parts_of_a_batch(draw: st.DrawFn) -> list[tuple[NDArray[np.int64], RowGroup]]:
    """Rows of some sources, of several lengths, masked or not, in any order."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    places = np.array(draw(st.permutations(range(sum(counts)))))
    return [(np.sort(rows), draw(groups(1, len(rows)))) for rows in np.split(places, np.cumsum(counts)[:-1])]


@st.composite
def groups(draw: st.DrawFn, batches: int, size: int) -> RowGroup:
    random, width, rows = np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(1, 6)), batches * size
    lengths = random.integers(1, width + 1, rows) if draw(st.booleans()) else np.full(rows, width)
    inside = np.flatnonzero(np.arange(width) < lengths[:, None])  # padding has no targets
    places = np.sort(random.choice(inside, random.integers(0, len(inside) + 1), replace=False))
    return row_group(
        random.integers(0, 2**16, (rows, width + 1), dtype=np.uint16),
        lengths,
        places,
        random.integers(0, 2**16, len(places)) if draw(st.booleans()) else None,
        np.sort(random.integers(0, 3, (rows, width)).astype(np.int32)) if draw(st.booleans()) else None,
        batches=batches,
    )


@given(batches=st.integers(1, 4), size=st.integers(1, 3), data=st.data())
def test_a_group_is_split_into_the_batches_that_it_was_made_of(batches: int, size: int, data: st.DataObject) -> None:
    group = data.draw(groups(batches, size))
    whole = group.padded(7).split()
    rows = [row.batch() for row in split_by_row(group)]
    assert len(whole) == batches
    for number, compact in enumerate(whole):
        batch, own = compact.batch(), rows[number * size : (number + 1) * size]
        assert batch.keys() == own[0].keys() and all(values.shape == (size, 7) for values in batch.values())
        assert all(torch.equal(batch[name], torch.cat([row[name] for row in own])) for name in batch)
        assert compact.num_targets == num_targets(batch)


def split_by_row(group: RowGroup) -> list[CompactRows]:
    """Each row by itself, without what a group knows of its batches."""
    width, size = group.tokens_per_row, len(group.tokens) // len(group.num_targets)
    found: list[CompactRows] = []
    for row in range(len(group.tokens)):
        number, of_batch = divmod(row, size)
        own = np.arange(([0, *group.ends])[number], group.ends[number])
        own = own[np.array([], dtype=int) if group.places is None else group.places.numpy()[own] // width == of_batch]
        found.append(
            CompactRows(
                group.tokens[row, None],
                0,
                lengths=None if group.lengths is None else group.lengths[row, None],
                places=None if group.places is None else group.places[own] % width,
                values=None if group.values is None else group.values[own],
                documents=None if group.documents is None else group.documents[row, None],
                row_length=7,
            )
        )
    return found


@given(parts=parts_of_a_batch())
def test_rows_of_several_sources_become_the_batch_that_their_batches_become(parts: Any) -> None:
    masked = any(part.documents is not None for _, part in parts)
    (together,) = merge_groups(parts, batches=1, document_mask=masked).split()
    batch, expected = together.batch(), merge_batches([(rows, part.split()[0].batch()) for rows, part in parts])
    assert batch.keys() == expected.keys() and together.tokens.dtype == torch.uint16
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert together.num_targets == num_targets(expected)
