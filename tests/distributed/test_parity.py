"""Every layout computes what one process computes, from its first weights on.

All rows, with the measured differences: `python -m tests.parity`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from slurmtrain.models import Decoder
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.runs.run_dir import RunDir
from tests.distributed.test_collectives import laid_out
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
    for row in rows:  # what is exchanged within a layer or between stages is a part of the computation there
        record = next(each for each in reversed(read_metrics(RunDir(root / row.name).metrics_file)) if "loss" in each)
        within = any(f"parallel.{axis}=" in word for word in row.overrides for axis in ("tp", "cp", "pp"))
        assert ("time_communication_s" in record) == ("communication_share" in record) == (not within), row.name
    found = {row: compare(root, row) for row in rows}
    assert {row.name: values for row, values in found.items() if max(values.values()) > row.bound} == {}


# Rows that four ranks do not divide, parts that end within a tile, and more than one tile along both dimensions.
SIZES: dict[str, Any] = {
    "vocab_size": 71, "dim": 36, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "head_dim": 14, "hidden_dim": 2112,
    "max_seq_len": 16, "tie_embeddings": False, "qkv_bias": True, "qk_norm": True,
}  # fmt: skip


LAYOUTS: list[dict[str, int]] = [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}]


def draw_in_all_layouts(distributed: DistributedContext) -> list[list[str]]:
    """By layout, the names of the parameters whose bits differ from those of one rank."""
    whole = Decoder(**SIZES)
    whole.initialize(9)
    different = []
    for layout in LAYOUTS:
        with torch.device("meta"):
            model = Decoder(**SIZES)
        laid_out(distributed, model, layout)
        model.to_empty(device="cpu")
        model.initialize(9)
        held = {name: value.full_tensor() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
        assert held.keys() == whole.state_dict().keys()
        different.append([name for name, value in whole.state_dict().items() if not torch.equal(held[name], value)])
    return different


def test_every_layout_starts_from_the_bits_of_one_rank(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks(4, draw_in_all_layouts) == [[[]] * len(LAYOUTS)] * 4
