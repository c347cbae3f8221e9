"""Checkpoints: their size against what is published, how often to save and what is lost against sums by hand."""

from __future__ import annotations

import math

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.planner.hardware import hardware_of
from slurmtrain.planner.plan import Saving, saving_of

DAY_S, MINUTE_S = 86400.0, 60.0


def saving(words: list[str], step_s: float | None = None) -> Saving:
    config = compose(words)
    return saving_of(config, step_s, hardware_of(config))


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [("llama3_8b", 16), ("llama3_70b", 140), ("llama3_405b", 810), ("qwen2_5_72b", 145)],
)
def test_weights_in_16_bit_are_as_large_as_published(model: str, gigabytes: float) -> None:
    """The folders on the hub: 16, 140, 810 and 145 GB."""
    found = saving([f"model={model}"])
    assert found.weights / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert found.size == 6 * found.weights  # parameters and two moments in float32


def test_daly_by_hand() -> None:
    """A save is written for 60 s, and there is a failure a day; what counts is the time for which it holds up training."""
    words = ["cluster=h100x8", "model=llama3_8b", "checkpoint.mtbf_hours=24"]
    found = saving([*words, "cluster.storage_gb_per_s=1.606052249"])
    assert found.write_s == pytest.approx(60) and 0 < found.stall_s < 60
    ratio, young_s = found.stall_s / (2 * DAY_S), math.sqrt(2 * found.stall_s * DAY_S)
    assert found.daly_s == pytest.approx(young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - found.stall_s, abs=0.01)


@pytest.mark.parametrize(
    ("interval_min", "restart_s", "left"), [(30, 180 + 121, 0.9884), (30, 188, 0.9895), (5, 188, 0.9967)]
)
def test_what_is_left_on_128_nodes_by_hand(interval_min: float, restart_s: float, left: float) -> None:
    """1 - (u + d / 2) / M with M = 1 / (128 x 6.5e-3 a day) = 103,846 s, and saves that cost nothing."""
    found = Saving(1, 1, 0.0, 0.0, DAY_S / (128 * 6.5e-3), restart_s, 0.0, None)
    assert found.goodput(interval_min * MINUTE_S) == pytest.approx(left, abs=5e-5)
