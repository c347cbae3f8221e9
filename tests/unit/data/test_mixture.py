from __future__ import annotations

import itertools
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

from slurmtrain.data.loading.batches import concatenate
from slurmtrain.data.loading.loader import BatchLoader, RowLength
from slurmtrain.data.loading.order import ByLength, EpochOrder, sample_ids
from slurmtrain.data.sources.mixture import MixedSamples, Mixture, MixtureOrder
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


class Marked(MixedSamples):
    def get_batch(self, indices: NDArray[np.int64]) -> Any:
        return {**super().get_batch(indices), "marked": torch.ones(len(indices))}


def test_a_class_may_build_on_the_batches_of_a_mixture() -> None:
    mixed = Marked({"left": _Rows(1, 3, 4), "right": _Rows(2, 5, 4)})
    batch = next(BatchLoader(mixed, seed=0, shuffle=False, global_batch_size=4, micro_batch_size=4)).micro_batches[0]
    assert batch["marked"].tolist() == [1.0] * 4 and batch["inputs"][:, 0].tolist() == [1, 1, 1, 2]


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
@given(weights=st.lists(st.integers(1, 50), min_size=2, max_size=6), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_a_mixture_read_in_pieces_is_the_mixture_read_at_once(weights: list[int], cuts: list[int]) -> None:
    order, at, pieces = interleaved(weights), 7, []
    for count in cuts:
        pieces.append(order.at(stretch(at, count)))
        at += count
    assert np.concatenate([np.empty(0, dtype=np.int64), *pieces]).tolist() == order.at(stretch(7, at - 7)).tolist()


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


def test_in_order_means_every_part_in_its_own() -> None:
    ids = interleaved([3, 1], shuffle=False).at(stretch(0, 40))
    assert ids[ids < 1000].tolist() == list(range(30)) and ids[ids >= 1000].tolist() == list(range(1000, 1010))


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
    assert len(mixture.train) == 50 and mixture.valid is not None and len(mixture.valid) == 5 and mixture.evals == {}
    batches = BatchLoader(mixture.train, seed=0, global_batch_size=8, micro_batch_size=4)
    steps = [torch.cat([batch["inputs"][:, 0] for batch in next(batches).micro_batches]) for _ in range(10)]
    assert [int((step == 2).sum()) for step in steps] == [2] * 10
    assert batches.order.once == 42  # sample 42 is the eleventh of code


def test_without_weights_all_samples_come_once_an_epoch() -> None:
    train = Mixture({"a": Source(1, 7), "b": Source(2, 5)}).train
    assert train.order(3, True).at(stretch(0, 24)).tolist() == sample_ids(0, 24, n=12, seed=3).tolist()


def test_rows_of_different_length_are_filled_up_beside_each_other() -> None:
    train = Mixture({"a": Source(1, 3, length=2), "b": Source(2, 3, length=4)}).train
    batch = train.get_batch(np.array([4, 0, 5]))
    assert batch["inputs"].tolist() == [[2, 2, 2, 2], [1, 1, 0, 0], [2, 2, 2, 2]]
    assert batch["targets"].tolist() == [[1, 1, 1, 1], [0, 0, -100, -100], [2, 2, 2, 2]]


def test_micro_batches_become_one_though_only_some_tell_documents_apart() -> None:
    masked = {name: torch.zeros(1, 4, dtype=torch.int64) for name in ("inputs", "targets")}
    masked["documents"] = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    plain = {name: masked[name] for name in ("inputs", "targets")}
    for batches in ([masked, plain], [plain, masked]):
        rows = [batch.get("documents", torch.zeros(1, 4)).tolist() for batch in batches]
        assert concatenate(batches)["documents"].tolist() == rows[0] + rows[1]


def test_valid_each_names_the_held_out_samples_of_every_source() -> None:
    mixture = Mixture({"a": Source(1, 3, valid=2), "b": Source(2, 3)}, valid_each=True)
    assert {name: len(data) for name, data in mixture.evals.items()} == {"a": 2}


def test_evaluation_sets_of_a_source_are_the_mixtures_too() -> None:
    web = Source(1, 3, valid=2)
    web.evals = {"short": _Rows(1, 1, 4)}  # type: ignore[attr-defined]
    assert set(Mixture({"web": web}).evals) == {"web_short"}
    assert set(Mixture({"web": web}, valid_each=True).evals) == {"web", "web_short"}
    with pytest.raises(ConfigError, match=r"data\.sources\.valid with data\.valid_each=true"):
        Mixture({"valid": web}, valid_each=True)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0}, "differ in b"),
        ({"a": 1.0, "b": 0.0}, r"data\.weights\.b is 0\.0"),
        ({"a": 1.0, "b": float("nan")}, r"data\.weights\.b is nan"),
        ({"a": 1.0, "b": "x"}, r"data\.weights\.b is x"),
        ({"a": 1.0, "b": 1e-12}, "less than a billionth"),
    ],
)
def test_weights_that_are_no_shares_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture({"a": Source(1, 3), "b": Source(2, 3)}, weights)


def test_weights_finer_than_any_stretch_can_show_are_rounded() -> None:
    train = Mixture({"a": Source(1, 1000), "b": Source(2, 1000)}, {"a": 1234567890123, "b": 987654321}).train
    ids = train.order(0, True).at(stretch(0, 10_000))
    assert abs(int((ids >= 1000).sum()) - 10_000 * 987654321 / (1234567890123 + 987654321)) <= 1


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


LENGTHS = np.clip(np.random.default_rng(0).lognormal(4.0, 1.0, 5000), 1, 512).astype(np.int64)


class Documents:
    """Sample i has LENGTHS[i] tokens, all of them i."""

    seq_len = 512

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.full((int(LENGTHS[index]),), index)
        return {"inputs": row, "targets": row}

    def lengths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return LENGTHS[indices]


def steps(count: int, **changes: Any) -> list[list[dict[str, Tensor]]]:
    arguments: dict[str, Any] = {
        "seed": 3,
        "global_batch_size": 64,
        "micro_batch_size": 4,
        "sorted_steps": 32,
        **changes,
    }
    batches = BatchLoader(Documents(), **arguments)
    try:
        return [next(batches).micro_batches for _ in range(count)]
    finally:
        batches.close()


def samples(step: list[dict[str, Tensor]]) -> list[int]:
    return [int(row[0]) for batch in step for row in batch["inputs"]]


def test_a_step_has_the_same_samples_under_any_layout() -> None:
    alone = [sorted(samples(step)) for step in steps(12)]
    for dp_size, micro, workers in ((2, 4, 0), (4, 1, 2), (8, 8, 0)):
        ranks = [
            steps(12, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro, num_workers=workers)
            for rank in range(dp_size)
        ]
        assert [sorted(itertools.chain(*map(samples, step))) for step in zip(*ranks, strict=True)] == alone


def test_all_ranks_have_as_much_to_do_and_little_of_it_is_padding() -> None:
    ranks = [steps(40, dp_rank=rank, dp_size=8) for rank in range(8)]
    slots = np.array([[sum(batch["inputs"].numel() for batch in step) for step in rank] for rank in ranks])
    real = sum(int((batch["targets"] != -100).sum()) for rank in ranks for step in rank for batch in step)
    slowest = slots.max(axis=0).sum() / slots.mean(axis=0).sum()
    plain = LENGTHS[: 64 * 40].reshape(-1, 4)
    assert slowest < 1.03
    assert 1 - real / slots.sum() < 0.1 < 1 - plain.sum() / (plain.max(axis=1).sum() * 4)


def test_what_takes_rows_of_one_length_has_to_be_told_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {batch["inputs"].shape[1] for batch in steps(1, row_length=RowLength(fixed=True))[0]} == {512}
    monkeypatch.delattr(Documents, "seq_len")
    with pytest.raises(ConfigError, match="samples differ in length"):
        steps(1, row_length=RowLength(fixed=True))


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(1, 12), window=st.integers(1, 5), cuts=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_sorted_steps_read_in_pieces_are_those_read_at_once(batch: int, window: int, cuts: list[int]) -> None:
    def order() -> ByLength:
        epochs = EpochOrder(97, seed=1)
        return ByLength(epochs, lambda ids: ids % 7, global_batch_size=batch, steps=window, seed=1)

    total = sum(cuts)
    pieces, at = [], 0
    for count in cuts:
        pieces.append(order().at(stretch(at, count)))
        at += count
    assert np.concatenate(pieces).tolist() == order().at(stretch(0, total)).tolist()
    together = -(-total // (batch * window)) * batch * window
    assert sorted(order().at(stretch(0, together))) == sorted(EpochOrder(97, seed=1).at(stretch(0, together)))
    assert len(set(order().at(stretch(0, order().once)).tolist())) == order().once
