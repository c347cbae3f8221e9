"""Bytes per rank: against sums by hand, against what torch's own sharding holds, and against what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slurmtrain.choices import ActivationCheckpointing
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.models import Decoder
from slurmtrain.planner.memory import MemorySettings, layers_of_stages, memory_per_rank
from slurmtrain.planner.shape import DecoderShape

QWEN_72B = DecoderShape(152064, 8192, 80, 64, 8, 128, 29568, tie_embeddings=False, qkv_bias=True, qk_norm=False)
SMALL: dict[str, Any] = {
    "vocab_size": 71, "dim": 36, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 14, "hidden_dim": 45,
    "max_seq_len": 512, "tie_embeddings": False, "qkv_bias": True, "qk_norm": True,
}  # fmt: skip


def stages_of(shape: DecoderShape, work: MemorySettings, dims: ParallelDims) -> list[Any]:
    return list(memory_per_rank(shape, work, dims))


def test_72b_on_16_nodes_of_8_gpus_is_what_one_counts_by_hand() -> None:
    """128 ranks: TP 8 x PP 2 x FSDP 8. Every matrix is cut in 64, all evenly."""
    work = MemorySettings(micro_batch_size=1, seq_len=4096)
    first, last = stages_of(QWEN_72B, work, ParallelDims(dp_shard=8, tp=8, pp=2))

    query_and_out, key_and_value, feed_forward = 2 * 8192 * 8192, 2 * 1024 * 8192, 3 * 29568 * 8192
    biases, norms = 8192 + 2 * 1024, 2 * 8192  # norms are cut by FSDP alone
    layer = (query_and_out + key_and_value + feed_forward + biases) // 64 + norms // 8
    assert layer == 13_715_616
    embedding = 152064 * 8192 // 64
    assert first.parameters == 4 * (40 * layer + embedding) == 4 * 568_088_832
    assert last.parameters == 4 * (40 * layer + embedding + 8192 // 8)
    assert (first.parameters, first.gradients, first.optimizer) == (2_272_355_328, 2_272_355_328, 4_544_710_656)

    # A token in a layer, elements: two pieces of the residual stream, two gathered inputs, q k v and their result, four of F.
    kept = 2 * 8192 // 8 + 2 * 8192 + (64 + 8 + 8 + 64) * 128 // 8 + 4 * 29568 // 8
    assert first.activations == 2 * 40 * 4096 * kept * 2  # two micro batches in flight, bfloat16
    logits = 152064 // 8 * (4 + 4 + 2)
    assert last.activations == 40 * 4096 * kept * 2 + 4096 * (logits + (8192 // 8 + 8192) * 2)

    whole_layer = (query_and_out + key_and_value + feed_forward + biases) // 8 + norms
    assert first.gathered == (152064 * 8192 // 8 + 3 * whole_layer) * 2
    assert first.total == sum((4 * first.parameters, first.gathered, first.activations))


def test_the_ranks_of_context_parallelism_share_the_activations_of_a_sequence() -> None:
    (whole,), (half,) = (
        stages_of(QWEN_72B, MemorySettings(1, 4096), ParallelDims(dp_shard=16 // cp, cp=cp, tp=8)) for cp in (1, 2)
    )
    assert half.parameters == whole.parameters and half.activations == whole.activations / 2


@pytest.mark.parametrize("qk_norm", [False, True])
def test_autograd_keeps_what_is_estimated(qk_norm: bool) -> None:
    """In float32 on a CPU, whose norms keep what they have normalised besides; a GPU's do not."""
    batch, seq_len = 3, 256
    sizes = {**SMALL, "n_layers": 1, "qk_norm": qk_norm}
    block = Decoder(**sizes).blocks["0"]
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(torch.randn(batch, seq_len, 36, requires_grad=True), torch.arange(seq_len))
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / (batch * seq_len)

    work = MemorySettings(batch, seq_len, compute_bytes=4)
    (one,), (recomputed,) = (
        stages_of(DecoderShape.of(sizes), each, ParallelDims())
        for each in (work, MemorySettings(batch, seq_len, compute_bytes=4, checkpointing=ActivationCheckpointing.FULL))
    )
    at_the_end = 2 * 36 * 4 + 71 * 12
    per_token = one.activations / (batch * seq_len) - at_the_end
    heads = 4 + 2 if qk_norm else 0
    normalised, roots = 2 * 36 + heads * 14, 2 + heads
    log_sums, angles = 4, 2 * 14 / batch
    assert found == pytest.approx(per_token + 4 * (normalised + roots + log_sums + angles))
    # Recomputing keeps the block's input besides the one block that is computed again.
    assert recomputed.activations - one.activations == batch * seq_len * 36 * 4


def test_checkpointing_and_the_pipeline_change_what_is_kept() -> None:
    def activations(**changes: Any) -> list[int]:
        return [
            each.activations
            for each in stages_of(QWEN_72B, MemorySettings(1, 4096, **changes), ParallelDims(dp_shard=8, tp=8, pp=4))
        ]

    none, selective, full = (activations(checkpointing=kind) for kind in ("none", "selective", "full"))
    assert all(a > b > c for a, b, c in zip(none, selective, full, strict=True))
    kept = 8192 // 8 + (64 + 8 + 8 + 64) * 128 // 8 + 2 * 29568 // 8 + 2 * 8192  # of a token in a layer, elements
    again = 2 * 8192 // 8 + 2 * 8192 + (64 + 8 + 8 + 64) * 128 // 8 + 4 * 29568 // 8
    assert selective[0] == 4096 * 2 * (4 * 20 * kept + again)  # four micro batches in flight
    assert full[0] == 4096 * 2 * (4 * 20 * 8192 // 8 + again)
    one_in_flight = activations(in_flight=(1, 1, 1, 1))
    assert none[:3] == [4 * one_in_flight[0], 3 * one_in_flight[1], 2 * one_in_flight[2]]
    assert layers_of_stages(80, 4) == [20] * 4 and layers_of_stages(126, 4) == [32, 32, 31, 31]
