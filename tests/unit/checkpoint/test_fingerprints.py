"""What tells replicas apart, cheaply."""

from __future__ import annotations

import pytest
import torch

from slurmtrain.checkpoint.save.fingerprints import (
    BUFFERS,
    TENSORS,
    Fingerprints,
    compared_part,
    digests_of,
    find_differing,
    fingerprint,
    group_key,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


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


def test_after_some_saves_each_element_of_a_large_tensor_was_compared() -> None:
    for rows, columns, parts in ((3, 200_000, 3), (8, 200_000, 8), (301, 4096, 8), (1001, 4096, 8)):
        tensor = torch.zeros(rows, columns)
        for number in range(parts):
            compared_part(tensor, number, holders=2).add_(1)
        assert tensor.eq(1).all()
    small = torch.zeros(10)
    assert compared_part(small, 3, holders=2).numel() == 10


def test_who_differs_from_whom_is_found_and_tensors_come_first() -> None:
    everyone, first = group_key(TENSORS, [0, 1, 2]), group_key(TENSORS, [0, 1])
    buffers = group_key(BUFFERS, [0, 1, 2])
    ranks: list[Fingerprints] = [
        {buffers: {"c": 7}, everyone: {"a": 1, "d": 4}, first: {"b": 5}},
        {buffers: {"c": -7}, everyone: {"d": 4, "a": 1}, first: {"b": 5}},
        {buffers: {"c": 7}, everyone: {"a": 2, "d": 4}},
    ]
    found = find_differing([digests_of(each) for each in ranks])
    assert [each.states for each in found] == [[[0, 1], [2]], [[0, 2], [1]]]
    sentences = [each.names([ranks[rank][each.key] for rank in each.asked]) for each in found]
    assert sentences == [["a differs between ranks 0, 1 and rank 2"], ["c differs between ranks 0, 2 and rank 1"]]
    assert find_differing([digests_of(ranks[0])]) == []
