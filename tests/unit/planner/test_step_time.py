"""The time of a step, against sums by hand and against what others have measured and published."""

from __future__ import annotations

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.validate import validate
from slurmtrain.planner.calibration import calibrated
from slurmtrain.planner.hardware import EFFICIENCY, hardware_of
from slurmtrain.planner.step_time import Measured, StepTime, operations_of, step_time

LLAMA = ["cluster=h100x8", "parallel=fsdp", "parallel.param_dtype=bfloat16", "data.seq_len=8192"]
SELECTIVE, FULL = (f"parallel.activation_checkpointing={kind}" for kind in ("selective", "full"))


def planned(words: list[str], measured: Measured | None = None) -> StepTime:
    config = compose(words)
    found = step_time(config, validate(config), hardware_of(config), measured)
    assert found is not None
    return found


def test_8b_on_one_node_is_what_one_counts_by_hand() -> None:
    """Two sequences of 8,192 tokens on each of 8 GPUs: 6 N for 7.5 billion parameters of matrices, and attention halved."""
    found = planned([*LLAMA, "model=llama3_8b", "train.global_batch_size=16"])
    per_token = 6 * 7_504_658_432 + 6 * 32 * 4096 * 8192
    assert found.seconds["computation"] == pytest.approx(2 * 8192 * per_token / (EFFICIENCY * 989.4e12))
    gathering = 8_030_261_248 * 8 * 7 / 8 / (0.8 * 450e9) + 99 * 7 * 3.4e-6  # 99 collectives of 7 hops
    assert found.traffic_s["dp_shard"] == pytest.approx(gathering)
    assert found.seconds["dp_shard"] == pytest.approx(2 * gathering / 99)  # the rest hides behind computation
    assert found.at_best_s == pytest.approx(2 * 8192 * per_token / 989.4e12)
    assert found.tokens == 16 * 8192
    assert found.at_best_s is not None
    assert found.mfu_attended_at_most == pytest.approx(1)
    assert found.flops_per_token == 6 * 7_504_658_432 + 12 * 32 * 4096 * 8192


@pytest.mark.parametrize(
    ("words", "published"),
    [
        # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, compiled: tokens/s on each GPU
        (["model=llama3_8b", "train.global_batch_size=16", SELECTIVE], 6667),
        (["cluster.nodes=16", "model=llama3_8b", "train.global_batch_size=256", SELECTIVE], 6514),
        # torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, without async TP
        (["cluster.nodes=32", "model=llama3_70b", "parallel=fsdp_tp", "parallel.tp=8", "train.global_batch_size=512", FULL],
         597),
    ],
)  # fmt: skip
def test_steps_take_about_as_long_as_published(words: list[str], published: float) -> None:
    found = planned([*LLAMA, *words])
    assert found.tokens_per_s / found.ranks == pytest.approx(published, rel=0.2)


def test_a_pipeline_waits_for_its_slowest_stage() -> None:
    """Qwen2.5 72B on 16 x 8 GPUs, TP 8 x PP 2: 80 layers in two stages, the second with the output."""
    words = ["model=qwen2_5_72b", "cluster.nodes=16", "parallel=fsdp_tp_pp", "parallel.tp=8", "parallel.pp=2"]
    found = planned([*LLAMA, *words, "data.seq_len=4096", "train.global_batch_size=512", "train.micro_batch_size=1"])
    layer = 2 * 8192**2 + 2 * 1024 * 8192 + 3 * 29568 * 8192
    each = 3 * 4096 * 40 * (2 * layer + 2 * 8192 * 4096) / 8  # operations of a micro batch in a rank of the first stage
    output = 3 * 4096 * 2 * 152064 * 8192 / 8
    rate = EFFICIENCY * 989.4e12
    assert found.seconds["computation"] == pytest.approx(64 * (each + output / 2) / rate)
    assert found.seconds["imbalance"] == pytest.approx(64 * (output / 2) / rate)
    assert found.seconds["bubble"] == pytest.approx((each + output) / rate)  # one micro batch: pp - 1
    assert found.bubble_share == pytest.approx(1 / 65)


def test_what_is_computed_again_takes_time_and_is_no_use() -> None:
    words = [*LLAMA, "model=llama3_8b", "train.global_batch_size=16"]
    kept, again = planned(words), planned([*words, FULL])
    blocks = 32 * 218_103_808 * 2 + 2 * 32 * 4096 * 8192
    assert again.seconds["computation"] / kept.seconds["computation"] == pytest.approx(
        1 + blocks / (3 * (blocks + 2 * 128256 * 4096))
    )
    assert again.flops_per_token == kept.flops_per_token


def test_adapters_take_two_thirds_of_the_time() -> None:
    words = [*LLAMA, "model=llama3_8b", "train.global_batch_size=16"]
    whole, adapters = planned(words), planned([*words, "lora.r=16"])
    assert adapters.seconds["computation"] / whole.seconds["computation"] == pytest.approx(2 / 3, abs=0.05)
    assert adapters.flops_per_token / whole.flops_per_token == pytest.approx(2 / 3, abs=0.09)


def test_communication_that_takes_longer_than_computation_shows() -> None:
    """A node with one adapter of 100 Gbit/s: 16 nodes cannot gather 8 billion parameters while they compute."""
    words = [*LLAMA, "cluster.nodes=16", "model=llama3_8b", "train.global_batch_size=128"]
    fast, slow = planned(words), planned([*words, "cluster.network_gb_per_s=12.5"])
    assert fast.seconds["dp_shard"] < 0.01 * fast.expected_s
    hidden = slow.traffic_s["dp_shard"] - slow.seconds["dp_shard"]
    assert slow.seconds["dp_shard"] > slow.seconds["computation"]
    assert hidden == pytest.approx(slow.seconds["computation"], rel=0.2)


def test_without_a_peak_there_is_no_time() -> None:
    config = compose(["experiment=smoke"])
    assert step_time(config, validate(config), hardware_of(config)) is None


# Rates that a run has measured.


def test_the_plan_of_a_measured_run_is_what_was_measured() -> None:
    """Whatever its parts are, they are explained: the same config then takes the time that it took."""
    config = compose([*LLAMA, "cluster.nodes=4", "model=llama3_8b", "parallel=hsdp", "train.global_batch_size=64"])
    dims, hardware = validate(config), hardware_of(config)
    parts = {"data": 0.05, "forward_backward": 2.0, "communication": 0.3, "optimizer": 0.02, "other": 0.01}
    measured = calibrated(config, dims, hardware, sum(parts.values()), parts)
    assert measured.flops == pytest.approx(operations_of(config, dims) / 2.0)
    found = step_time(config, dims, hardware, measured)
    assert found is not None
    assert found.expected_s == pytest.approx(sum(parts.values()))
    assert found.communication_s == pytest.approx(0.3)
    assert found.seconds["data and optimiser"] == pytest.approx(0.08)


def test_communication_that_was_not_measured_apart_is_not_taken_for_computation() -> None:
    words = [*LLAMA, "model=llama3_8b", "parallel=fsdp_tp", "parallel.tp=8", "train.global_batch_size=16"]
    config = compose(words)
    dims, hardware = validate(config), hardware_of(config)
    measured = calibrated(config, dims, hardware, 20.0, {"forward_backward": 20.0})
    found = step_time(config, dims, hardware, measured)
    assert found is not None
    assert found.seconds["tp"] > 0.5
    assert found.expected_s == pytest.approx(20.0, rel=0.01)


def test_a_run_without_phases_is_taken_as_a_whole() -> None:
    config = compose(["experiment=smoke"])
    measured = calibrated(config, validate(config), hardware_of(config), 0.5, {"data": 0.1})
    assert measured.flops == pytest.approx(operations_of(config, validate(config)) / 0.4)
    assert measured.per_sample_s == pytest.approx(0.1 / 8)
