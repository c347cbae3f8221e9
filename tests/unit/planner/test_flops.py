"""The operations of training: the formula counts what the matrix products of forward and backward pass take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from slurmtrain.config.compose import compose
from slurmtrain.config.folders import PACKAGE
from slurmtrain.data.loading.batches import row_counts
from slurmtrain.models import Decoder
from slurmtrain.planner.flops import ModelFlops, attended_pairs, decoder_flops, dense_pairs
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.rank.jobs.build_model import flops_of

LENGTH, ROWS = 48, 2
PRESETS = sorted(
    path.stem
    for path in (PACKAGE.parent / "conf" / "model").glob("*.yaml")
    if path.stem not in ("base", "hf", "huggingface")
)


def preset(name: str) -> dict[str, Any]:
    values = dict(compose([f"model={name}"]).model)
    values.pop("_target_")
    return values


def tiny(name: str) -> dict[str, Any]:
    """A preset with its kind of heads, biases, norms and ties, and small sizes in its proportions."""
    values = preset(name)
    shared = (values["n_kv_heads"] or values["n_heads"]) < values["n_heads"]
    own_heads = bool(values["head_dim"]) and values["head_dim"] * values["n_heads"] != values["dim"]
    small = {"vocab_size": 160, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2 if shared else 4}
    hidden = {"hidden_dim": 160 if values["hidden_dim"] else None, "head_dim": 32 if own_heads else None}
    return {**values, **small, **hidden, "max_seq_len": LENGTH}


def counted(step: Callable[[], Any]) -> int:
    """What torch counts, of attention that is computed by matrix products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        step()
    total: int = counter.get_total_flops()
    return total


def step(model: nn.Module, length: int = LENGTH, *more: Any) -> Callable[[], None]:
    tokens = torch.randint(100, (ROWS, length), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(100, (ROWS * length,), generator=torch.Generator().manual_seed(1))
    return lambda: F.cross_entropy(model(tokens, *more).flatten(0, 1), targets).backward()


@pytest.mark.parametrize("name", PRESETS)
def test_every_presets_dense_count_is_that_of_torch_within_one_percent(name: str) -> None:
    model = Decoder(**tiny(name))
    expected = model.training_flops().of(ROWS * LENGTH, dense_pairs(ROWS, LENGTH))
    assert counted(step(model)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["tiny", "llama3_1b", "llama3_8b", "qwen2_5_0_5b", "qwen3_0_6b"])
def test_login_nodes_count_by_the_config_what_the_model_counts(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(**preset(name))
    assert decoder_flops(DecoderShape.of(preset(name))) == model.training_flops()


def test_llama_8b_takes_what_is_published() -> None:
    flops = decoder_flops(DecoderShape.of(preset("llama3_8b")))
    # 8.03e9 parameters less the embedding of 128,256 x 4,096, and 32 layers of 32 heads of 128 components.
    assert flops.per_token == pytest.approx(6 * (8.030e9 - 128256 * 4096), rel=1e-3)
    assert flops.per_pair == 12 * 32 * 32 * 128
    # torchtitan's table of 2024-12: 5,762 tokens/s on an H100 at 8,192 tokens are "33 % to 39 % MFU" with 7,000 and less.
    assert 5762 * flops.of(1, 8192) / 989.4e12 == pytest.approx(0.33, abs=0.02)


class Counting(nn.Module):
    def flops_per_token(self, seq_len: int) -> int:
        return 600 + 24 * seq_len


def test_a_model_of_ones_own_says_what_a_token_takes() -> None:
    assert flops_of(Counting()) == ModelFlops(600, 24)
    assert flops_of(nn.Linear(2, 2)) is None


def rows(documents: list[list[int]]) -> Tensor:
    return torch.tensor(documents, dtype=torch.int32)


def test_pairs_of_rows_agree_with_the_mask_itself() -> None:
    generator = np.random.default_rng(0)
    cuts = [sorted(generator.choice(np.arange(1, 32), 4, replace=False).tolist()) for _ in range(3)]
    documents = rows([[sum(at >= cut for cut in each) for at in range(32)] for each in cuts])
    same = documents[:, :, None] == documents[:, None, :]
    mask = same & torch.ones(32, 32, dtype=torch.bool).tril()
    batch = {"targets": torch.zeros(3, 32, dtype=torch.int64), "documents": documents}
    assert row_counts(batch).attended_pairs == int(mask.sum())
    lengths = [[end - begin for begin, end in pairwise([0, *each, 32])] for each in cuts]
    assert sum(attended_pairs(each) for each in lengths) == int(mask.sum())
