"""The time of a step, against sums by hand and against what others have measured and published."""

from __future__ import annotations

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.folders import PACKAGE
from slurmtrain.config.rules import validate
from slurmtrain.planner.hardware import UNCOMPILED, hardware_of
from slurmtrain.planner.step_time import SLOWED, StepTime, step_time

LLAMA = ["cluster=h100x8", "parallel=fsdp"]
NONE, SELECTIVE, FULL = (f"parallel.activation_checkpointing={kind}" for kind in ("none", "selective", "full"))


def planned(words: list[str]) -> StepTime:
    config = compose(words)
    found = step_time(config, validate(config), hardware_of(config))
    assert found is not None
    return found


def test_8b_on_one_node_is_what_one_counts_by_hand() -> None:
    """Two sequences of 8,192 tokens on each of 8 GPUs: 6 N for 7.5 billion parameters of matrices, and attention halved."""
    found = planned([*LLAMA, "model=llama3_8b", "train.global_batch_size=16"])
    per_token = 6 * 7_504_658_432 + 6 * 32 * 4096 * 8192
    reached = 0.70 / (1 + 2450 / 4096)  # of the peak, for a width of 4,096
    assert found.seconds["computation"] == pytest.approx(2 * 8192 * per_token / (reached * UNCOMPILED * 989.4e12))
    gathering = 8_030_261_248 * 8 * 7 / 8 / (0.8 * 450e9) + 99 * 7 * 3.4e-6  # 99 collectives of 7 hops
    assert found.traffic_s["dp_shard"] == pytest.approx(gathering)
    assert found.seconds["dp_shard"] == pytest.approx(
        (SLOWED + 2 / 99) * gathering
    )  # the rest hides behind computation
    assert found.tokens == 16 * 8192
    assert found.flops_per_token == 6 * 7_504_658_432 + 12 * 32 * 4096 * 8192


COMPILED = "parallel.compile=true"
EIGHT = ["model=llama3_8b", SELECTIVE, "train.micro_batch_size=2"]
NODE_OF_4 = ["cluster.gpu_type=h200", "cluster.gpus_per_node=4", "cluster.tasks_per_node=4", "data.seq_len=4096"]
H200 = [*NODE_OF_4, FULL, COMPILED]
TP_4 = [*H200, "parallel=fsdp_tp", "parallel.tp=4"]
THIRTEEN = ["model=llama3_8b", "model.dim=5120", "model.n_layers=40", "model.n_heads=40", "model.hidden_dim=17920"]
BIG = ["model=llama3_8b", "model.dim=12288", "model.n_layers=96", "model.n_heads=96", "model.hidden_dim=39680"]
TP_8 = ["parallel.tp=8", FULL, COMPILED]
STAGES = ["model=llama3_405b", "cluster.nodes=64", "parallel=fsdp_tp_pp", *TP_8, "parallel.pp=8"]


SEVEN = ["model=llama3_8b", "model.vocab_size=32000", "model.n_kv_heads=32", "model.hidden_dim=11008"]
LLAMA_2 = [*SEVEN, "data.seq_len=4096"]
A100 = ["cluster.gpu_type=a100", *LLAMA_2, SELECTIVE]
SMOL = ["model=llama3_1b", "model.vocab_size=49152", "model.n_layers=24", "model.n_kv_heads=32", "data.seq_len=2048"]
GPT_3 = [*BIG, "model.n_kv_heads=96", "model.hidden_dim=32768", "data.seq_len=4096", SELECTIVE, COMPILED]
MEGATRON = [*GPT_3, "parallel=fsdp_tp_pp", "parallel.tp=8", "parallel.pp_schedule=interleaved_1f1b"]


def gpus(count: int) -> list[str]:
    return [f"cluster.gpus_per_node={count}", f"cluster.tasks_per_node={count}"]


def batch(nodes: int, micro: int, whole: int) -> list[str]:
    return [f"cluster.nodes={nodes}", f"train.micro_batch_size={micro}", f"train.global_batch_size={whole}"]


# As the page has them: tokens/s on each GPU, or what is published as a share of the peak. torchtitan's
# benchmarks/llama3_h100_202412_torchtitan.md, tables 1, 3 and 5, and asyncTP_llama3_h100_2025-06_torchtitan.md (without async
# TP); KempnerForge's benchmarks/mfu_scaling, weak_scaling_160gpu and 175b_360gpu; the others as the page says.
PUBLISHED: dict[str, tuple[list[str], float]] = {
    "torchtitan, 8B, 8 H100": ([*EIGHT, *batch(1, 2, 16)], 5762),
    "torchtitan, 8B, 128 H100": ([*EIGHT, *batch(16, 2, 256)], 5605),
    "torchtitan, 8B, 8 H100, compiled": ([*EIGHT, COMPILED, *batch(1, 2, 16)], 6667),
    "torchtitan, 8B, 128 H100, compiled": ([*EIGHT, COMPILED, *batch(16, 2, 256)], 6514),
    "torchtitan, 70B, 256 H100, TP 8": (["model=llama3_70b", "parallel=fsdp_tp", *TP_8, *batch(32, 16, 512)], 597),
    "torchtitan, 405B, 512 H100, TP 8, PP 8 *": ([*STAGES, *batch(64, 1, 256)], 100),
    "torchtitan, 405B, 512 H100, interleaved *": (
        [*STAGES, *batch(64, 1, 256), "parallel.pp_schedule=interleaved_1f1b"], 128),
    "KempnerForge, 8B, 32 H200, TP 4": ([*TP_4, "model=llama3_8b", *batch(8, 4, 64)], 155_917 / 32),
    "KempnerForge, 13B, 32 H200, TP 4": ([*TP_4, *THIRTEEN, *batch(8, 4, 128)], 110_373 / 32),
    "KempnerForge, 13B, 160 H200, TP 4": ([*TP_4, *THIRTEEN, *batch(40, 4, 640)], 534_644 / 160),
    "KempnerForge, 70B, 32 H200, TP 4": ([*TP_4, "model=llama3_70b", *batch(8, 2, 64)], 18_688 / 32),
    "KempnerForge, 70B, 160 H200, TP 4": ([*TP_4, "model=llama3_70b", *batch(40, 2, 320)], 85_571 / 160),
    "KempnerForge, 8B, 4 H200": ([*H200, "model=llama3_8b", *batch(1, 4, 32)], 38_983 / 4),
    "KempnerForge, 8B, 2 H200": ([*H200, *gpus(2), "model=llama3_8b", *batch(1, 4, 16)], 0.517),
    "KempnerForge, 8B, 1 H200": ([*H200, *gpus(1), "parallel=ddp", "model=llama3_8b", *batch(1, 4, 8)], 10_471),
    "KempnerForge, 175B, 360 H200, TP 4": ([*TP_4, *BIG, *batch(90, 8, 720)], 154_523 / 360),
    "fms-fsdp, 7B, 128 H100, compiled": ([*LLAMA_2, SELECTIVE, COMPILED, *batch(16, 2, 256)], 9600),
    "PyTorch, 7B, 128 A100": ([*A100, *batch(16, 2, 256)], 0.57),
    "PyTorch, 7B, 128 A100, compiled": ([*A100, COMPILED, *batch(16, 2, 256)], 0.68),
    "Megatron-LM, 175B, 96 H100, TP 8, PP 4": ([*MEGATRON, "parallel.pp=4", *batch(12, 1, 1152)], 0.47),
    "Megatron-LM, 175B, 4,608 H100, TP 8, PP 8": ([*MEGATRON, "parallel.pp=8", *batch(576, 1, 1152)], 0.42),
    "NeMo, 8B, LoRA, 1 H100": (
        ["model=llama3_8b", *gpus(1), "data.seq_len=4096", "parallel=ddp", NONE, COMPILED, "lora.r=16",
         *batch(1, 2, 32)], 12_473),
    "picotron, 7B, 64 H100": ([*LLAMA_2, NONE, COMPILED, *batch(8, 1, 64)], 0.38),
    "picotron, 1.7B, 8 H100": ([*SMOL, NONE, COMPILED, *batch(1, 4, 256)], 0.50),
    "nanotron, 1B, 8 H100": (["model=llama3_1b", "data.seq_len=2048", NONE, COMPILED, *batch(1, 8, 64)], 42_000),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_take_about_as_long_as_published(name: str) -> None:
    words, published = PUBLISHED[name]
    found = planned([*LLAMA, *words])
    predicted = found.tokens_per_s / found.ranks
    if published < 1:
        assert found.peak_flops is not None
        published *= found.peak_flops / found.flops_per_token
    assert 0.8 <= round(predicted / published, 2) <= 1.25
    row = f"| {name} | {published:,.0f} | {predicted:,.0f} | {predicted / published:.2f} |"
    assert row in (PACKAGE / "docs" / "planning.md").read_text(), row


def test_communication_that_takes_longer_than_computation_shows() -> None:
    """A node with one adapter of 100 Gbit/s: 16 nodes cannot gather 8 billion parameters while they compute."""
    words = [*LLAMA, "cluster.nodes=16", "model=llama3_8b", "train.global_batch_size=128"]
    fast, slow = planned(words), planned([*words, "cluster.network_gb_per_s=12.5"])
    assert fast.seconds["dp_shard"] < 0.1 * fast.expected_s
    hidden = slow.traffic_s["dp_shard"] - slow.seconds["dp_shard"]
    assert slow.seconds["dp_shard"] > slow.seconds["computation"]
    assert hidden == pytest.approx((1 - SLOWED) * slow.seconds["computation"], rel=0.2)
