from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slurmtrain.data.loading.order import EpochOrder
from slurmtrain.errors import ConfigError

SEEDS = st.integers(-(2**63), 2**64 - 1)
GOLDEN = [517, 963, 794, 370, 811, 819, 612, 513]


def epochs(n: int, seed: int, count: int = 1) -> NDArray[np.int64]:
    """The first epochs of a run, [count, n]."""
    return EpochOrder(n, seed=seed).at(np.arange(count * n)).reshape(count, n)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=SEEDS)
def test_every_epoch_has_every_sample_exactly_once_in_an_order_of_its_own(n: int, seed: int) -> None:
    found = epochs(n, seed, 3)
    assert all(sorted(epoch) == list(range(n)) for epoch in found)
    if n >= 1000:
        others = [*found, epochs(n, seed + 1)[0]]
        for one, other in ((0, 1), (0, 2), (1, 2), (0, 3)):
            assert (others[one] == others[other]).sum() < 12  # 1 expected by chance


@settings(max_examples=60, deadline=None)
@given(n=st.integers(3001, 10**12) | st.integers(10**12, 2**62), seed=SEEDS, data=st.data())
def test_huge_data_sets_stay_one_to_one_and_in_range(n: int, seed: int, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=50))
    found = EpochOrder(n, seed=seed).at(np.array(numbers))
    assert len(set(found.tolist())) == len(numbers)
    assert found.min() >= 0 and found.max() < n


def test_the_order_is_fixed_for_good() -> None:
    """A checkpoint names its place by a number: another order in another version would repeat and skip samples."""
    assert epochs(1000, 0)[0, :8].tolist() == GOLDEN


def test_without_shuffling_the_data_set_keeps_its_order_and_one_without_samples_has_none() -> None:
    assert EpochOrder(10, seed=3, shuffle=False).at(np.arange(8, 13)).tolist() == [8, 9, 0, 1, 2]
    with pytest.raises(ConfigError, match="0 samples"):
        EpochOrder(0, seed=0)
