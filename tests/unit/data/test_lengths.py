from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.data import BatchLoader
from slurmtrain.data.loading.lengths import ByLength, balance_ranks
from slurmtrain.data.loading.loader import RowLength
from slurmtrain.data.loading.order import EpochOrder
from slurmtrain.errors import ConfigError

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


def stretch(start: int, count: int) -> NDArray[np.int64]:
    return np.arange(start, start + count)


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


def test_every_sample_comes_once_an_epoch() -> None:
    seen = list(itertools.chain(*map(samples, steps(5000 // 64))))
    assert len(set(seen)) == len(seen) == 5000 // 64 * 64


def test_resumed_in_the_middle_of_sorted_steps_it_goes_on_where_it_was() -> None:
    whole = [samples(step) for step in steps(13)]
    assert [samples(step) for step in steps(8, samples_consumed=5 * 64)] == whole[5:]


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


def test_a_round_begins_with_the_longest_and_is_dealt_in_turn() -> None:
    lengths = np.array([5, 9, 1, 7, 3, 8, 2, 6])
    rounds = balance_ranks(lengths, ranks=2, micro_batch_size=2)
    assert lengths[rounds].tolist() == [[[9, 7], [8, 6]], [[5, 2], [3, 1]]]


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


def test_rows_are_as_long_as_what_computes_on_them_can_take() -> None:
    assert {batch["inputs"].shape[1] % 16 for batch in steps(1, row_length=RowLength(multiple=16))[0]} == {0}
    assert {batch["inputs"].shape for batch in steps(1, row_length=RowLength(fixed=True))[0]} == {(4, 512)}
    for one, other in zip(steps(1, row_length=RowLength(fixed=True))[0], steps(1)[0], strict=True):
        assert int((one["targets"] != -100).sum()) == int((other["targets"] != -100).sum())
