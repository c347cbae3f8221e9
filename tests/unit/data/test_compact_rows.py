from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from slurmtrain.data.loading import compact_rows
from slurmtrain.data.loading.batches import joined, num_targets
from slurmtrain.data.loading.compact_rows import CompactRows, joined_rows
from slurmtrain.data.loading.shared_memory import empty

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


@st.composite
def parts_of_a_batch(draw: st.DrawFn) -> list[tuple[NDArray[np.int64], CompactRows]]:
    """Rows of some sources, of several lengths, masked or not, in any order."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    places = np.array(draw(st.permutations(range(sum(counts)))))
    return [(np.sort(rows), draw(rows_of_a_source(len(rows)))) for rows in np.split(places, np.cumsum(counts)[:-1])]


@st.composite
def rows_of_a_source(draw: st.DrawFn, count: int) -> CompactRows:
    random, width = np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(1, 6))

    def maybe(values: NDArray[Any]) -> torch.Tensor | None:
        return torch.from_numpy(values) if draw(st.booleans()) else None

    lengths = maybe(random.integers(1, width + 1, count))
    ends = np.full(count, width) if lengths is None else lengths.numpy()
    inside = np.flatnonzero(np.arange(width) < ends[:, None])  # padding has no targets
    others = np.sort(random.choice(inside, random.integers(1, len(inside) + 1), replace=False))
    rows = CompactRows(
        tokens=torch.from_numpy(random.integers(0, 2**16, (count, width + 1), dtype=np.uint16)),
        num_targets=0,
        lengths=lengths,
        places=maybe(others),
        documents=maybe(np.sort(random.integers(0, 3, (count, width)).astype(np.int32))),
    )
    if rows.places is not None:
        rows = rows._replace(values=maybe(random.integers(0, 2**16, len(others))))
    return rows._replace(num_targets=num_targets(rows.batch()))


@given(parts=parts_of_a_batch())
def test_rows_of_several_sources_become_the_batch_that_their_batches_become(parts: Any) -> None:
    masked = any(part.documents is not None for _, part in parts)
    (together,) = joined_rows(parts, empty, document_mask=masked).apart(1, empty)
    batch, expected = together.batch(), joined([(torch.from_numpy(rows), part.batch()) for rows, part in parts])
    assert batch.keys() == expected.keys() and together.tokens.dtype == torch.uint16
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert together.num_targets == num_targets(expected)
