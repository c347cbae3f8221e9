from __future__ import annotations

import pytest
import torch

from slurmtrain.data import compact
from slurmtrain.data.compact import CompactRows

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


@pytest.mark.parametrize(("dtype", "highest"), [(torch.uint16, 2**16 - 1), (torch.uint32, 2**32 - 1)])
def test_what_a_gpu_computes_is_what_the_processor_does(dtype: torch.dtype, highest: int) -> None:
    tokens = torch.tensor([[0, 1, highest // 2, highest // 2 + 1, highest]]).to(dtype)
    assert (
        compact.by_signed(tokens).tolist()
        == tokens.long().tolist()
        == [[0, 1, highest // 2, highest // 2 + 1, highest]]
    )
