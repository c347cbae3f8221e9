"""The decoder computes what Llama 3, Qwen2.5 and Qwen3 compute, also where transformers is not installed.

The numbers in EXPECTED were computed by transformers with the same weights; test_pretrained compares whole models with it.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.models import Decoder
from slurmtrain.models.decoder import RopeScaling, rotary_angles

SHAPE: dict[str, Any] = {"vocab_size": 61, "dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 80}
LLAMA3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TOKENS = (torch.arange(2 * 40).reshape(2, 40) * 7 + 3) % 61

# Of each family what sets it apart.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {"rope_theta": 500.0, "rope_scaling": {**LLAMA3, "original_seq_len": 16}, "tie_embeddings": False},
    "qwen2_5": {"rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True, "head_dim": 16, "tie_embeddings": False},
}
# Logits of the last position of the second sequence, tokens 0 to 3.
EXPECTED: dict[str, list[float]] = {
    "llama3": [-0.089683, 1.223393, 0.323584, -1.161526],
    "qwen2_5": [-0.187738, -0.463732, 0.099076, 0.482674],
    "qwen3": [-0.100534, 0.984657, 0.288792, -0.929443],
}


def with_weights(model: nn.Module) -> nn.Module:
    """Numbers that follow from the names alone; also of norms and biases, whose own first values would hide mistakes."""
    for name, parameter in model.named_parameters():
        waves = torch.sin(
            torch.arange(parameter.numel(), dtype=torch.float64) * 12.9898 + zlib.crc32(name.encode()) % 1000
        )
        base, scale = (1.0, 0.5) if "norm" in name else (0.0, 0.3)
        parameter.data = (base + scale * waves.reshape(parameter.shape)).float()
    return model


def ours(family: str) -> Decoder:
    model = with_weights(Decoder(**{**SHAPE, **FAMILIES[family]}, max_seq_len=64))
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_that_transformers_computed(family: str) -> None:
    logits = ours(family)(TOKENS)[1, -1, :4]
    torch.testing.assert_close(logits, torch.tensor(EXPECTED[family]), rtol=0, atol=1e-5)


def test_scaled_rotations_are_slowed_down_as_far_as_they_are_slow() -> None:
    """Llama 3.1: periods below 8192 / 4 tokens stay, those above 8192 are 8 times as long."""
    scaling = RopeScaling(**LLAMA3, original_seq_len=8192)
    period = torch.tensor([100.0, 2048.0, 8192.0, 100_000.0], dtype=torch.float64)
    torch.testing.assert_close(
        period / (scaling(1 / period * 2 * torch.pi) ** -1 * 2 * torch.pi), torch.tensor([1, 1, 1 / 8, 1 / 8]).double()
    )
    between = scaling(torch.tensor(2 * torch.pi / 4096.0)) * 4096 / (2 * torch.pi)
    assert between.item() == pytest.approx((1 - 1 / 3) / 8 + 1 / 3)  # two turns: a third of the way from one to four
    cos, _ = rotary_angles(torch.tensor([8192]), 128, 500000.0, scaling)
    slow = 8192 * 500000.0 ** (-126 / 128) / 8
    assert cos[0, 63].item() == pytest.approx(torch.tensor(slow).cos().item(), abs=1e-6)
