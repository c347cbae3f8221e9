from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.data.loading.loader import BatchLoader
from slurmtrain.data.loading.order import EpochOrder
from slurmtrain.data.sources.mixture import Mixture, MixtureOrder
from slurmtrain.errors import ConfigError


class Source:
    """`n` samples of `length` tokens, all of them `token`."""

    def __init__(self, token: int, n: int, length: int = 4, valid: int = 0):
        self.train = _Rows(token, n, length)
        self.valid = _Rows(token, valid, length) if valid else None
        self.vocab_size, self.fingerprint, self.description = 256, f"{token} {n}", f"token {token}"


class _Rows:
    num_bytes = None

    def __init__(self, token: int, n: int, length: int):
        self.token, self.n, self.seq_len = token, n, length

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.full((self.seq_len,), self.token)
        return {"inputs": row, "targets": torch.full((self.seq_len,), index)}


def stretch(start: int, count: int) -> NDArray[np.int64]:
    return np.arange(start, start + count)


def interleaved(weights: list[int], sizes: list[int] | None = None, **changes: Any) -> MixtureOrder:
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    return MixtureOrder(sizes or [1000] * len(weights), shares, list(range(len(weights))), **changes)


def part_of(ids: NDArray[np.int64], size: int = 1000) -> NDArray[np.int64]:
    return ids // size


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=9),
    start=st.integers(0, 10**12),
    count=st.integers(1, 500),
)
def test_any_stretch_of_the_run_has_every_parts_share_to_a_few_samples(
    weights: list[int], start: int, count: int
) -> None:
    seen = Counter(part_of(interleaved(weights).at(stretch(start, count))).tolist())
    levels = (len(weights) - 1).bit_length()
    for part, weight in enumerate(weights):
        assert abs(seen[part] - count * weight / sum(weights)) <= levels


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.integers(1, 20), min_size=1, max_size=5), size=st.integers(1, 30))
def test_each_part_goes_through_all_its_samples_before_it_begins_again(weights: list[int], size: int) -> None:
    order = interleaved(weights, [size] * len(weights))
    ids = order.at(stretch(0, 6 * size * sum(weights)))
    for part in range(len(weights)):
        own = ids[part_of(ids, size) == part]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size] - part * size) == list(range(size))
    assert len(set(ids[: order.once].tolist())) == order.once
    assert len(set(ids[: order.once + 1].tolist())) == order.once


def test_what_a_part_gives_depends_on_its_own_name_alone() -> None:
    def order_of_b(sources: dict[str, Any], weights: dict[str, float]) -> list[int]:
        train = Mixture(sources, weights).train
        ids = train.order(5, True).at(stretch(0, 60))
        batch = train.get_batch(ids)
        return batch["targets"][batch["inputs"][:, 0] == 2, 0].tolist()[:12]

    two = order_of_b({"a": Source(1, 30), "b": Source(2, 50)}, {"a": 0.5, "b": 0.5})
    three = order_of_b({"b": Source(2, 50), "c": Source(3, 9), "a": Source(1, 30)}, {"a": 1, "b": 2, "c": 5})
    assert two == three


def test_a_mixture_from_a_loader_has_the_shares_and_the_samples_it_says() -> None:
    mixture = Mixture({"web": Source(1, 40, valid=3), "code": Source(2, 10, valid=2)}, {"web": 0.75, "code": 0.25})
    assert len(mixture.train) == 50 and mixture.valid is not None and len(mixture.valid) == 5
    batches = BatchLoader(mixture.train, seed=0, global_batch_size=8, micro_batch_size=4)
    steps = [torch.cat([batch["inputs"][:, 0] for batch in next(batches).micro_batches]) for _ in range(10)]
    assert [int((step == 2).sum()) for step in steps] == [2] * 10
    assert batches.order.once == 42  # sample 42 is the eleventh of code


def test_without_weights_all_samples_come_once_an_epoch() -> None:
    train = Mixture({"a": Source(1, 7), "b": Source(2, 5)}).train
    assert train.order(3, True).at(stretch(0, 24)).tolist() == EpochOrder(12, seed=3).at(stretch(0, 24)).tolist()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0}, "differ in b"),
        ({"a": 1.0, "b": 0.0}, r"data\.weights\.b is 0\.0"),
        ({"a": 1.0, "b": "x"}, r"data\.weights\.b is x"),
        ({"a": 1.0, "b": 1e-12}, "less than a billionth"),
    ],
)
def test_weights_that_are_no_shares_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture({"a": Source(1, 3), "b": Source(2, 3)}, weights)


def test_a_source_without_samples_and_other_vocabularies_are_refused() -> None:
    mixture = Mixture({"a": Source(1, 3), "b": Source(2, 0)}, {"a": 1, "b": 1})
    with pytest.raises(ConfigError, match=r"data\.sources\.b holds no samples"):
        mixture.train.order(0, True)
    other = Source(2, 3)
    other.vocab_size = 300
    with pytest.raises(ConfigError, match="differ in vocab_size: a 256, b 300"):
        Mixture({"a": Source(1, 3), "b": other})
    with pytest.raises(ConfigError, match="is empty"):
        Mixture({})
