"""Checkpoints: their size against what is published, how often to save and what is lost against sums by hand."""

from __future__ import annotations

import math

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.planner.hardware import hardware_of
from slurmtrain.planner.plan import Saving, failure_interval_s, saving_of

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


def test_adapters_are_saved_without_the_frozen_weights() -> None:
    """LoRA of rank 8 beside every matrix of a 1B model: r (rows + columns) parameters each."""
    sums = [2048 + 2048, 512 + 2048, 512 + 2048, 2048 + 2048, 8192 + 2048, 8192 + 2048, 2048 + 8192]
    assert saving(["model=llama3_1b", "lora.r=8"]).size == 12 * 16 * 8 * sum(sums)


def test_daly_by_hand() -> None:
    """A save is written for 60 s, and there is a failure a day; what counts is the time for which it holds up training."""
    words = ["cluster=h100x8", "model=llama3_8b", "checkpoint.mtbf_hours=24"]
    found = saving([*words, "cluster.storage_gb_per_s=1.606052249"])
    assert found.write_s == pytest.approx(60) and 0 < found.stall_s < 60
    ratio, young_s = found.stall_s / (2 * DAY_S), math.sqrt(2 * found.stall_s * DAY_S)
    assert found.daly_s == pytest.approx(young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - found.stall_s, abs=0.01)


def test_failures_grow_with_the_nodes() -> None:
    """6.5 failures in 1,000 node-days: 128 nodes fail every 28.8 h (arXiv:2410.21680)."""
    config = compose(["cluster=h100x8", "cluster.nodes=128"])
    assert failure_interval_s(config, 128) / 3600 == pytest.approx(28.8, abs=0.05)
    config = compose(["cluster=h100x8", "cluster.failures_per_1000_node_days=2.34"])
    assert failure_interval_s(config, 1) / DAY_S == pytest.approx(1000 / 2.34)


@pytest.mark.parametrize(
    ("interval_min", "restart_s", "left"), [(30, 180 + 121, 0.9884), (30, 188, 0.9895), (5, 188, 0.9967)]
)
def test_what_is_left_on_128_nodes_by_hand(interval_min: float, restart_s: float, left: float) -> None:
    """1 - (u + d / 2) / M with M = 1 / (128 x 6.5e-3 a day) = 103,846 s, and saves that cost nothing."""
    found = Saving(1, 1, 0.0, 0.0, DAY_S / (128 * 6.5e-3), restart_s, 0.0, None)
    assert found.goodput(interval_min * MINUTE_S) == pytest.approx(left, abs=5e-5)


def test_saves_that_hold_training_up_cost_their_share() -> None:
    """30 s in every 10 minutes, and no failures: 600 / 630."""
    found = Saving(1, 1, 30.0, 30.0, math.inf, 0.0, 0.0, None)
    assert found.goodput(600) == pytest.approx(600 / 630)


def test_failures_faster_than_restarts_leave_nothing() -> None:
    assert Saving(1, 1, 1.0, 1.0, 100.0, 188.0, 0.0, None).goodput(60) == 0


def test_a_save_in_the_background_holds_training_up_for_the_copy_only() -> None:
    """8 billion parameters x 12 bytes over 8 GPUs at 20 GB/s: 0.6 s; NeMo Automodel measured 0.54 s (its PR 635)."""
    found = saving(["cluster=h100x8", "model=llama3_8b"])
    assert found.stall_s == pytest.approx(0.602, abs=0.001)
    assert found.write_s == pytest.approx(96.4, abs=0.1)  # at 1 GB/s for the node


def test_the_interval_of_the_config_is_the_shorter_of_its_two() -> None:
    words = ["model=llama3_1b", "checkpoint.every_steps=100", "checkpoint.every_minutes=5"]
    assert saving(words, 2.0).interval_s == 200
    assert saving(words, 10.0).interval_s == 300
    assert saving([*words, "checkpoint.auto=true"], 10.0).interval_s is None
