from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.data.loading.order import permute, sample_ids
from slurmtrain.errors import ConfigError

KEYS = st.integers(-(2**63), 2**64 - 1)
GOLDEN = [517, 963, 794, 370, 811, 819, 612, 513]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), key=KEYS)
def test_every_index_comes_exactly_once(n: int, key: int) -> None:
    assert sorted(permute(np.arange(n), n=n, key=key)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(3001, 10**12) | st.integers(10**12, 2**62), key=KEYS, data=st.data())
def test_huge_domains_stay_one_to_one_and_in_range(n: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=50))
    permuted = permute(np.array(indices), n=n, key=key)
    assert len(set(permuted.tolist())) == len(indices)
    assert permuted.min() >= 0 and permuted.max() < n


def test_each_epoch_holds_every_sample_once_in_an_order_of_its_own() -> None:
    epochs = sample_ids(0, 3 * 1000, n=1000, seed=5).reshape(3, 1000)
    assert all(sorted(epoch) == list(range(1000)) for epoch in epochs)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (epochs[one] == epochs[other]).sum() < 10  # 1 expected by chance


def test_seeds_and_neighbouring_keys_give_unrelated_orders() -> None:
    assert (sample_ids(0, 1000, n=1000, seed=0) == sample_ids(0, 1000, n=1000, seed=1)).sum() < 10
    assert (permute(np.arange(1000), n=1000, key=0) == permute(np.arange(1000), n=1000, key=1)).sum() < 10


def test_the_order_is_fixed_for_good() -> None:
    """A checkpoint names its place by a number: another order in another version would repeat and skip samples."""
    assert sample_ids(0, 8, n=1000, seed=0).tolist() == GOLDEN


def test_neighbours_in_the_order_are_as_far_apart_as_by_chance() -> None:
    n = 100_000
    order = sample_ids(0, n, n=n, seed=1)
    assert np.abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / np.sqrt(n)
    assert np.abs(np.corrcoef(order, np.arange(n))[0, 1]) < 4 / np.sqrt(n)
    distances = np.abs(np.diff(order))
    assert distances.mean() == pytest.approx(n / 3, rel=0.02)
    halves = np.bincount((order[: n // 2] * 16 // n), minlength=16)  # where the first half of the epoch comes from
    assert halves.min() > n / 32 * 0.95 and halves.max() < n / 32 * 1.05


def test_without_shuffling_the_data_set_keeps_its_order() -> None:
    assert sample_ids(8, 5, n=10, seed=3, shuffle=False).tolist() == [8, 9, 0, 1, 2]


def test_what_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 samples"):
        sample_ids(0, 1, n=0, seed=0)
    with pytest.raises(IndexError, match="outside range"):
        permute(np.array([12]), n=12, key=0)
    with pytest.raises(IndexError, match="-1"):
        permute(np.array([3, -1]), n=12, key=0)
