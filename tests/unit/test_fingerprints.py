"""What tells replicas apart, cheaply."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.checkpoint.fingerprints import BUFFER, WHOLE, Differing, Replica, find_differing, fingerprint, pack
from slurmtrain.checkpoint.layout import Box, TensorFacts

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


def test_it_does_not_depend_on_where_and_how_a_tensor_lies() -> None:
    tensor = torch.randn(16, 10)
    shifted = torch.cat([torch.zeros(1), tensor.reshape(-1)])[1:].reshape(16, 10)
    assert len({int(fingerprint(each)) for each in (tensor, tensor.t().contiguous().t(), shifted)}) == 1
    assert int(fingerprint(torch.empty(0, 3))) == 0


def test_the_same_integers_in_another_order_are_told_apart() -> None:
    order = torch.arange(1000)
    assert int(fingerprint(order)) != int(fingerprint(order.flip(0)))


@given(
    holders=st.integers(2, 5),
    rows=st.integers(1, 300),
    columns=st.sampled_from([1, 7, 4096]),
    turns=st.sampled_from([1, 8]),
)
def test_after_enough_saves_each_element_was_compared_with_each_other_rank(
    holders: int, rows: int, columns: int, turns: int
) -> None:
    box = Box((5, 0), (rows, columns))
    replicas = [Replica("x", 0, index, holders, box, 4, buffer=False) for index in range(holders)]
    met = np.zeros((holders, holders, rows, columns), dtype=bool)
    for turn in range((holders - 1) * turns):
        looked = [dict(replica.compared(turn, turns)) for replica in replicas]
        for one in range(holders):
            for other in range(holders):
                for part in looked[one].keys() & looked[other].keys():
                    assert looked[one][part] == looked[other][part]
                    met[(one, other, *looked[one][part])] = True
    assert met.all(axis=1).any(axis=0).all()  # by the rank that writes it, with every other


def test_who_differs_from_whom_is_found() -> None:
    catalogue = {name: TensorFacts((4,), "float32", 4) for name in ("a", "b", "c")}
    late = {"c": catalogue["c"]}  # of a rank that holds less
    ranks = [
        (0, pack({("a", 0, WHOLE): 1, ("b", 0, 0): 5, ("c", 0, BUFFER): 7}, catalogue)),
        (0, pack({("a", 0, WHOLE): 1, ("b", 0, 0): 5, ("b", 0, 1): 6, ("c", 0, BUFFER): -7}, catalogue)),
        (0, pack({("a", 0, WHOLE): 2, ("b", 0, 1): 6, ("b", 2, 0): 9, ("c", 0, BUFFER): 7}, catalogue)),
        (1, pack({("c", 0, BUFFER): 7}, late)),
    ]
    found = find_differing(ranks, [catalogue, late])
    assert found == [Differing("a", ((0, 1), (2,)), False), Differing("c", ((0, 2, 3), (1,)), True)]
    assert str(found[0]) == "a is another one on ranks 0, 1 than on rank 2"
    assert find_differing([(0, pack({}, catalogue))], [catalogue]) == []
