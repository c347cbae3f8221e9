from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slurmtrain.data.workers import SENT_WHOLE_BYTES, Workers

MANY = SENT_WHOLE_BYTES // 4 + 1
KINDS = {
    "int64": torch.arange(6).reshape(2, 3),
    "not contiguous": torch.arange(6).reshape(2, 3).T,
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "a number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "gradient wanted": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "negated": torch.tensor([1 + 2j]).conj().imag,
    "one of a column": torch.arange(6).reshape(3, 2)[:1, 1],
    "complex": torch.tensor([1 + 2j]),
    "large": torch.arange(MANY, dtype=torch.int32),
    "large and bfloat16": torch.ones(2 * MANY, dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    "pin_memory", [False, pytest.param(True, marks=pytest.mark.skipif("not torch.cuda.is_available()"))]
)
def test_tensors_of_any_kind_come_as_they_are(pin_memory: bool) -> None:
    workers = Workers(KINDS.__getitem__, iter(KINDS), count=1, ahead=2, seed=0, pin_memory=pin_memory)
    try:
        got = list(zip(KINDS.items(), workers, strict=False))
    finally:
        workers.close()
    assert len(got) == len(KINDS)
    for (name, expected), tensor in got:
        assert (tensor.dtype, tensor.shape, tensor.layout) == (expected.dtype, expected.shape, expected.layout), name
        assert torch.equal(dense(tensor), dense(expected)), name
        if tensor.layout == torch.strided:
            tensor.detach().add_(True if tensor.dtype == torch.bool else 1)  # nobody else's memory, and not read-only


def dense(tensor: Any) -> Tensor:
    return tensor.to_dense() if tensor.layout != torch.strided else tensor.detach()
