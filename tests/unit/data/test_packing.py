from __future__ import annotations

import numpy as np

from slurmtrain.data.format.packing import best_fit_rows


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
