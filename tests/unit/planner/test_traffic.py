"""What every axis sends in a step, against sums by hand; and where its groups stand."""

from __future__ import annotations

import math

import pytest

from slurmtrain.choices import PpSchedule
from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.validate import validate
from slurmtrain.planner.hardware import Hardware
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.planner.traffic import (
    ALL_REDUCE,
    ONE_WAY,
    SEND,
    Traffic,
    Work,
    bubble_passes,
    ranks_in_node,
    traffic_of,
)

DGX = Hardware("H100", "bfloat16", 1e15, link=400e9, network=50e9, storage=1e9, link_share=1.0)
# A layer of Llama 3.1 8B: query and output, key and value, feed-forward, two norms.
LAYER = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096
ENDS = 2 * 128256 * 4096 + 4096
LLAMA = ["model=llama3_8b", "parallel.param_dtype=bfloat16", "data.seq_len=8192"]


def traffic(words: list[str]) -> dict[str, Traffic]:
    config = compose([*LLAMA, *words])
    dims = validate(config)
    return {each.axis: each for each in traffic_of(Work(config, dims, DecoderShape.of(config.model), 8192))}


def test_fsdp_gathers_twice_and_scatters_once_for_each_micro_batch() -> None:
    """8.03 billion parameters: gathered in bfloat16, gradients scattered in float32; a ring sends 7 / 8 of it."""
    found = traffic(["cluster=h100x8", "parallel=fsdp", "train.global_batch_size=16", "train.micro_batch_size=1"])
    parameters = 32 * LAYER + ENDS
    assert parameters == 8_030_261_248
    assert list(found) == ["dp_shard"]
    assert found["dp_shard"].bytes_sent == pytest.approx(2 * parameters * (2 + 2 + 4) * 7 / 8)
    assert found["dp_shard"].messages == 2 * 33 * (2 + 1)  # 32 layers, and the rest of the model


def test_parameters_that_stay_gathered_are_gathered_once_a_step() -> None:
    words = ["cluster=h100x8", "parallel=fsdp", "train.global_batch_size=16", "train.micro_batch_size=1"]
    found = traffic([*words, "parallel.reshard_after_forward=false", "parallel.reduce_dtype=bfloat16"])
    assert found["dp_shard"].bytes_sent == pytest.approx((32 * LAYER + ENDS) * (2 + 2 * 2) * 7 / 8)


def test_tensor_parallelism_sends_four_times_the_stream_in_each_layer_and_pass() -> None:
    """Two micro batches of one sequence on each of two groups; and the ends of the model, once each way."""
    words = ["cluster=h100x8", "cluster.nodes=2", "parallel=fsdp_tp", "parallel.tp=8", "train.global_batch_size=4"]
    found = traffic([*words, "train.micro_batch_size=1"])
    stream = 8192 * 4096 * 2
    assert found["tp"].bytes_sent == pytest.approx(2 * 2 * (4 * 32 + 2) * stream * 7 / 8)
    assert (found["tp"].ranks, found["tp"].nodes) == (8, 1)
    shard = found["dp_shard"]  # one rank of each of two nodes, with an eighth of every matrix
    assert (shard.ranks, shard.ranks_in_node, shard.nodes) == (2, 1, 2)
    eighth = 32 * ((LAYER - 2 * 4096) // 8 + 2 * 4096) + (ENDS - 4096) // 8 + 4096
    assert shard.bytes_sent == pytest.approx(2 * eighth * (2 + 2 + 4) / 2)


def test_recomputed_blocks_exchange_their_activations_again() -> None:
    words = ["cluster=h100x8", "parallel=fsdp_tp", "parallel.tp=8", "train.global_batch_size=1"]
    kept, again = traffic(words), traffic([*words, "parallel.activation_checkpointing=full"])
    stream = 8192 * 4096 * 2 * 7 / 8
    assert again["tp"].bytes_sent - kept["tp"].bytes_sent == pytest.approx(2 * 2 * 32 * stream)


def test_replicas_add_up_what_a_shard_has() -> None:
    """HSDP on two nodes: an eighth of the gradients, sent and received again, by half each."""
    words = ["cluster=h100x8", "cluster.nodes=2", "parallel=hsdp", "train.global_batch_size=16"]
    found = traffic(words)["dp_replicate"]
    assert (found.kind, found.ranks, found.nodes) == (ALL_REDUCE, 2, 2)
    assert found.bytes_sent == pytest.approx(2 * (32 * LAYER + ENDS) / 8 * 4 / 2)


def test_a_pipeline_sends_the_stream_forward_and_its_gradient_back() -> None:
    words = ["cluster=h100x8", "cluster.nodes=2", "parallel=fsdp_tp_pp", "parallel.tp=8", "parallel.pp=2"]
    found = traffic([*words, "train.global_batch_size=4", "train.micro_batch_size=1"])["pp"]
    assert (found.kind, found.nodes) == (SEND, 2)
    # Each of 8 ranks sends its part of the sequence.
    assert found.bytes_sent == pytest.approx(2 * 4 * 8192 * 4096 * 2 / 8)


def test_context_parallelism_gathers_keys_and_values_and_scatters_their_gradients() -> None:
    words = ["cluster=h100x8", "parallel=fsdp", "parallel.cp=2", "train.global_batch_size=4"]
    found = traffic(words)["cp"]
    assert found.bytes_sent == pytest.approx(2 * 32 * 4096 * 2 * 1024 * 2)
    ulysses = traffic([*words, "parallel.cp_method=ulysses"])["cp"]
    assert ulysses.bytes_sent == pytest.approx(2 * 32 * 4096 * (2 * 4096 + 2 * 1024) * 2 / 2)


def test_ring_over_nodes_uses_the_adapters_of_all_its_ranks() -> None:
    """1 GB: in a node at 400 GB/s; over nodes with 8 ranks each at 8 x 50 GB/s, with one rank each at 50 GB/s."""
    inside = Traffic("dp_shard", ONE_WAY, ranks=8, ranks_in_node=8, bytes_sent=1e9, messages=1)
    wide = Traffic("dp_shard", ONE_WAY, ranks=16, ranks_in_node=8, bytes_sent=1e9, messages=1)
    alone = Traffic("dp_shard", ONE_WAY, ranks=2, ranks_in_node=1, bytes_sent=1e9, messages=1)
    assert inside.seconds(DGX) == pytest.approx(1 / 400 + 7 * 3.4e-6)
    assert wide.seconds(DGX) == pytest.approx(1 / 400 + 14 * 3.4e-6 + 14e-6)
    assert alone.seconds(DGX) == pytest.approx(1 / 50 + 14e-6)


def test_links_of_which_nothing_is_known_count_as_free() -> None:
    unknown = Hardware(None, "float32", None, math.inf, math.inf, storage=1e9)
    assert Traffic("dp_replicate", ALL_REDUCE, 4, 2, 1e9, 40).seconds(unknown) == 0


def test_groups_of_the_inner_axes_share_a_node() -> None:
    """16 nodes of 8: TP 8 fills a node, so that shards and stages are on different ones."""
    dims = ParallelDims(pp=2, dp_shard=8, tp=8)
    assert [ranks_in_node(dims, axis, 8) for axis in ("tp", "dp_shard", "pp")] == [8, 1, 1]
    half = ParallelDims(dp_replicate=2, dp_shard=8, tp=4)
    assert [ranks_in_node(half, axis, 8) for axis in ("tp", "dp_shard", "dp_replicate")] == [4, 2, 1]


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
