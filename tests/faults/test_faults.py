"""The fault matrix in short, and that it finds what it is there to find. In full: `python -m tests.faults`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.matrix import Matrix
from tests.faults.rows import BAD, ROWS, Outcome, Tally, load, table

load()


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(tmp_path_factory.mktemp("faults"), lanes=4, skew_s=0.2) as matrix:
        yield matrix


def clean(tally: Tally) -> bool:
    return not any(tally[outcome] for outcome in BAD)


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_silently_wrong_and_nothing_is_lost(matrix: Matrix, name: str) -> None:
    row = ROWS[name]
    tally = matrix.run(row, row.short)
    if tally.skipped:
        pytest.skip(tally.skipped)
    assert clean(tally), table([tally])
    assert tally.trials == row.short
    if row.kind == "trials":  # the moments were spread over the whole save
        assert tally[Outcome.NEWEST] and tally[Outcome.OLDER]


# The detector detects.


def test_a_restore_that_does_not_verify_is_found_out_as_silently_wrong(matrix: Matrix) -> None:
    assert matrix.run(ROWS["a flipped bit"], 60, mutant="any digest")[Outcome.WRONG] > 2
