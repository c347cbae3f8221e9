"""What tells replicas apart, cheaply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.checkpoint.format.tensor_index import Box
from slurmtrain.checkpoint.save.fingerprints import (
    BUFFER,
    WHOLE,
    Bundles,
    Differing,
    Key,
    Replica,
    bundles_of,
    digests_of,
    find_differing,
    fingerprint,
    group_number,
    name_differing,
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
    replicas = [Replica("x", 0, 0, index, holders, box, 4, buffer=False) for index in range(holders)]
    met = np.zeros((holders, holders, rows, columns), dtype=bool)
    for turn in range((holders - 1) * turns):
        looked = [dict(replica.compared(turn, turns)) for replica in replicas]
        for one in range(holders):
            for other in range(holders):
                for part in looked[one].keys() & looked[other].keys():
                    assert looked[one][part] == looked[other][part]
                    met[one, other][looked[one][part]] = True
    assert met.all(axis=1).any(axis=0).all()  # by the rank that writes it, with every other


def replica(name: str, ranks: Sequence[int], rank: int, rows: int = 4, *, buffer: bool = False) -> Replica:
    box = Box((0, 0), (rows, 1024))
    return Replica(name, ranks[0], group_number(ranks), ranks.index(rank), len(ranks), box, 4, buffer=buffer)


def ask(ranks: Sequence[Bundles]) -> list[Differing]:
    """As rank 0 does: compare the digests, then ask for what is behind those that differ."""
    return [
        differing
        for bundle in find_differing([digests_of(bundles) for bundles in ranks])
        for differing in name_differing(bundle, [ranks[rank][bundle.group, bundle.part] for rank in bundle.asked])
    ]


def test_who_differs_from_whom_is_found() -> None:
    everyone, first = [0, 1, 2], [0, 1]
    replicas = [
        [replica("a", everyone, rank), replica("c", everyone, rank, buffer=True)]
        + ([replica("b", first, rank)] if rank < 2 else [])
        for rank in everyone
    ]
    values: list[dict[Key, int]] = [
        {("a", 0, WHOLE): 1, ("b", 0, WHOLE): 5, ("c", 0, BUFFER): 7},
        {("b", 0, WHOLE): 5, ("a", 0, WHOLE): 1, ("c", 0, BUFFER): -7},
        {("a", 0, WHOLE): 2, ("c", 0, BUFFER): 7},
    ]
    found = ask([bundles_of(each, its) for each, its in zip(values, replicas, strict=True)])
    assert found == [Differing("a", ((0, 1), (2,)), False), Differing("c", ((0, 2), (1,)), True)]
    assert str(found[0]) == "a is another one on ranks 0, 1 than on rank 2"
    assert ask([bundles_of(values[0], replicas[0])]) == []


def test_of_three_that_differ_in_different_tensors_each_is_named_with_all_that_agree() -> None:
    ranks = list(range(6))
    names = [f"layer {number}" for number in range(3)]
    bundles = []
    for rank in ranks:
        values = {(name, 0, WHOLE): hash(name) % 1000 for name in names}
        if rank in (2, 5):
            values[names[rank // 3], 0, WHOLE] = -1
        bundles.append(bundles_of(values, [replica(name, ranks, rank) for name in names]))
    assert ask(bundles) == [
        Differing("layer 0", ((0, 1, 3, 4, 5), (2,)), False),
        Differing("layer 1", ((0, 1, 2, 3, 4), (5,)), False),
    ]


@pytest.mark.parametrize("rows", [4, 100_000], ids=["small tensors", "tensors that are split"])
def test_a_rank_hands_in_no_more_for_a_thousand_tensors_than_for_one(rows: int) -> None:
    """Were it all of them, rank 0 of 4,096 would gather hundreds of megabytes at each save."""
    ranks = range(4096)
    for rank in (0, 7):
        replicas = [replica(f"layer {number}", ranks, rank, rows) for number in range(1000)]
        values = {(one.name, one.first, part): 1 for one in replicas for part, _ in one.compared(3, 8)}
        assert len(values) >= 1000
        assert digests_of(bundles_of(values, replicas)).nbytes <= 72
