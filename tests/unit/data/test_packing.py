from __future__ import annotations

import bisect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.data.format.packing import best_fit, best_fit_rows, document_rows
from slurmtrain.errors import ConfigError

lengths_of_documents = st.lists(st.integers(0, 40), max_size=60)


def ends_of(lengths: list[int]) -> np.ndarray:
    return np.cumsum(np.array(lengths, dtype=np.uint64), dtype=np.uint64)


def pairs_of(lengths: list[int], first_token: int) -> list[int]:
    """Positions of all inputs that have their target in the same document."""
    begins = first_token + np.cumsum([0, *lengths])[:-1]
    return [p for begin, length in zip(begins, lengths, strict=True) for p in range(begin, begin + length - 1)]


def pairs_in(pieces: np.ndarray) -> list[int]:
    return sorted(p for start, pairs in pieces.tolist() for p in range(start, start + pairs))


@given(lengths_of_documents, st.integers(1, 30), st.integers(0, 10**12))
def test_best_fit_holds_every_pair_once_in_samples_that_are_not_too_long(
    lengths: list[int], seq_len: int, first: int
) -> None:
    pieces, counts = best_fit_rows(ends_of(lengths), first, seq_len)
    assert pairs_in(pieces) == pairs_of(lengths, first)
    assert counts.sum() == len(pieces) and (counts > 0).all()
    samples = [row["pairs"].sum() for row in np.split(pieces, np.cumsum(counts)[:-1])] if len(counts) else []
    assert all(total <= seq_len for total in samples)


@given(st.lists(st.integers(1, 20), max_size=80), st.integers(20, 40))
def test_best_fit_is_that_of_one_item_after_another(sizes: list[int], capacity: int) -> None:
    bins = best_fit(np.array(sizes, dtype=np.int64), capacity)
    full = np.bincount(bins, weights=sizes).astype(int).tolist() if sizes else []
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        place = bisect.bisect_left(rooms, size)
        room = rooms.pop(place) if place < len(rooms) else capacity
        bisect.insort(rooms, room - size)
    assert sorted(capacity - total for total in full) == rooms


def test_best_fit_of_text_leaves_less_than_a_hundredth_free_and_cuts_only_what_is_too_long() -> None:
    tokens = np.random.default_rng(0).lognormal(6.2, 1.1, 30_000).astype(np.int64) + 2  # about 900 on average
    for seq_len in (512, 2048, 8192):
        pieces, counts = best_fit_rows(np.cumsum(tokens).astype(np.uint64), 0, seq_len)
        assert 1 - (tokens - 1).sum() / (len(counts) * seq_len) < 0.01
        assert len(pieces) == (-(-(tokens - 1) // seq_len)).sum()


def test_samples_follow_the_data_and_do_not_depend_on_chance() -> None:
    ends = np.cumsum(np.random.default_rng(0).integers(1, 300, 5000)).astype(np.uint64)
    pieces, counts = best_fit_rows(ends, 0, 256)
    firsts = pieces["start"][np.cumsum(counts) - counts]
    assert (np.diff(firsts.astype(np.int64)) > 0).all()
    again, counts_again = best_fit_rows(ends, 0, 256)
    assert (again == pieces).all() and (counts_again == counts).all()


@given(lengths_of_documents, st.integers(1, 30))
def test_a_sample_is_one_document(lengths: list[int], seq_len: int) -> None:
    pieces, counts = document_rows(ends_of(lengths), 7, seq_len, "cut")
    assert pieces["pairs"].tolist() == [min(length - 1, seq_len) for length in lengths if length > 1]
    assert (counts == 1).all() and len(counts) == len(pieces)
    split, _ = document_rows(ends_of(lengths), 7, seq_len, "split")
    assert pairs_in(split) == pairs_of(lengths, 7) and (split["pairs"] <= seq_len).all()


def test_long_documents_are_refused_when_asked_for() -> None:
    pieces, _ = document_rows(ends_of([5, 9]), 0, 8, "refuse")
    assert pieces["pairs"].tolist() == [4, 8]
    with pytest.raises(ConfigError, match=r"9 tokens.*data.seq_len=7 \+ 1\n.*data.seq_len=8"):
        document_rows(ends_of([5, 9]), 0, 7, "refuse")
