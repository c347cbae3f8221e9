"""Every layout computes what one process computes. All rows, with the measured differences: `python -m tests.parity`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.parity.matrix import ROWS, compare, config_of, train_alone, train_rows
from tests.support.gloo import GlooRanks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of one process lie, each made when it is first asked for."""
    return tmp_path_factory.mktemp("parity")


@cache
def alone(root: Path, model: tuple[str, ...]) -> None:
    train_alone(root, model)


# The rows of one size share their processes: to start eight takes longer than to train a row.
@pytest.mark.parametrize(
    ("size", "slow"),
    [
        pytest.param(size, slow, marks=[pytest.mark.slow] if slow else [])
        for size, slow in sorted({(row.ranks, row.slow) for row in ROWS})
    ],
)
def test_loss_and_gradient_norm_are_those_of_one_process(
    gloo_ranks: GlooRanks, root: Path, size: int, slow: bool
) -> None:
    rows = [row for row in ROWS if row.ranks == size and row.slow == slow]
    for row in rows:
        alone(root, row.model)
    gloo_ranks(size, train_rows, root, {row.name: config_of(row) for row in rows}, timeout_s=400)
    found = {row: compare(root, row) for row in rows}
    assert {row.name: values for row, values in found.items() if max(values.values()) > row.bound} == {}
