"""What every axis sends in a step, against sums by hand."""

from __future__ import annotations

import math

import pytest

from slurmtrain.choices import PpSchedule
from slurmtrain.config.compose import compose
from slurmtrain.config.rules import validate
from slurmtrain.planner.hardware import Hardware
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.planner.traffic import (
    ALL_REDUCE,
    Traffic,
    Work,
    bubble_passes,
    traffic_of,
)

# A layer of Llama 3.1 8B: query and output, key and value, feed-forward, two norms.
LAYER = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096
ENDS = 2 * 128256 * 4096 + 4096
LLAMA = ["model=llama3_8b", "parallel.param_dtype=bfloat16", "data.seq_len=8192"]


def traffic(words: list[str]) -> dict[str, Traffic]:
    config = compose([*LLAMA, *words])
    dims = validate(config)
    return {each.axis: each for each in traffic_of(Work(config, dims, DecoderShape.of(config.model), 8192))}


def test_parameters_that_stay_gathered_are_gathered_once_a_step() -> None:
    words = ["cluster=h100x8", "parallel=fsdp", "train.global_batch_size=16", "train.micro_batch_size=1"]
    found = traffic([*words, "parallel.reshard_after_forward=false", "parallel.reduce_dtype=bfloat16"])
    assert found["dp_shard"].bytes_sent == pytest.approx((32 * LAYER + ENDS) * (2 + 2 * 2) * 7 / 8)


def test_replicas_add_up_what_a_shard_has() -> None:
    """HSDP on two nodes: an eighth of the gradients, sent and received again, by half each."""
    words = ["cluster=h100x8", "cluster.nodes=2", "parallel=hsdp", "train.global_batch_size=16"]
    found = traffic(words)["dp_replicate"]
    assert (found.kind, found.ranks, found.nodes) == (ALL_REDUCE, 2, 2)
    assert found.bytes_sent == pytest.approx(2 * (32 * LAYER + ENDS) / 8 * 4 / 2)


def test_context_parallelism_gathers_keys_and_values_and_scatters_their_gradients() -> None:
    words = ["cluster=h100x8", "parallel=fsdp", "parallel.cp=2", "train.global_batch_size=4"]
    found = traffic(words)["cp"]
    assert found.bytes_sent == pytest.approx(2 * 32 * 4096 * 2 * 1024 * 2)
    ulysses = traffic([*words, "parallel.cp_method=ulysses"])["cp"]
    assert ulysses.bytes_sent == pytest.approx(2 * 32 * 4096 * (2 * 4096 + 2 * 1024) * 2 / 2)


def test_links_of_which_nothing_is_known_count_as_free() -> None:
    unknown = Hardware(None, "float32", None, math.inf, math.inf, storage=1e9)
    assert Traffic("dp_replicate", ALL_REDUCE, 4, 2, 1e9, 40).seconds(unknown) == 0


@pytest.mark.parametrize(
    ("schedule", "waiting"),
    [
        (PpSchedule.GPIPE, 3),
        (PpSchedule.ONE_F_ONE_B, 3),
        (PpSchedule.INTERLEAVED_1F1B, 1.5),
        (PpSchedule.ZERO_BUBBLE, 0.5),
    ],
)
def test_a_pipeline_of_four_waits_as_papers_say(schedule: PpSchedule, waiting: float) -> None:
    assert bubble_passes(schedule, 4) == waiting
