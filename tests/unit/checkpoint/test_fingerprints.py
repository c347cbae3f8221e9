"""What tells replicas apart, cheaply."""

from __future__ import annotations

import pytest
import torch

from slurmtrain.checkpoint.save.staging import compared_part, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def test_after_some_saves_each_element_of_a_large_tensor_was_compared() -> None:
    for rows, columns, parts in ((3, 200_000, 3), (8, 200_000, 8), (301, 4096, 8), (1001, 4096, 8)):
        tensor = torch.zeros(rows, columns)
        for number in range(parts):
            compared_part(tensor, number, holders=2).add_(1)
        assert tensor.eq(1).all()
    small = torch.zeros(10)
    assert compared_part(small, 3, holders=2).numel() == 10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (64, 33)])
def test_any_changed_element_changes_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    before = int(fingerprint(tensor))
    assert int(fingerprint(tensor.clone())) == before
    flat = tensor.reshape(-1)
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        other = flat.clone()
        other[place] = 1 - other[place].real.to(torch.float32)
        assert int(fingerprint(other.reshape(shape))) != before, place


def test_it_depends_on_the_order_of_the_elements_and_not_on_where_and_how_they_lie() -> None:
    tensor = torch.randn(16, 10)
    shifted = torch.cat([torch.zeros(1), tensor.reshape(-1)])[1:].reshape(16, 10)
    assert len({int(fingerprint(each)) for each in (tensor, tensor.t().contiguous().t(), shifted)}) == 1
    assert int(fingerprint(torch.empty(0, 3))) == 0
    order = torch.arange(1000)
    assert int(fingerprint(order)) != int(fingerprint(order.flip(0)))
