from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.nn import functional as F

from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder
from slurmtrain.models.decoder import rotary_angles, rotate

CONF = Path(__file__).parents[2] / "conf"
SIZES: dict[str, Any] = {
    "vocab_size": 50, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_seq_len": 16,
}  # fmt: skip


def decoder(seed: int = 0, **changes: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(**{**SIZES, **changes})


def tokens(batch: int = 2, seq_len: int = 16) -> torch.Tensor:
    return torch.randint(50, (batch, seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_shipped_configs_build_a_model_that_runs(name: str) -> None:
    model = instantiate(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 256)


def test_a_token_sees_only_those_before_it() -> None:
    model, original = decoder(), tokens()
    changed = original.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    difference = (model(original) - model(changed)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:9] == 0)
    assert torch.all(difference[9:] > 0)


def test_the_loss_starts_at_the_logarithm_of_the_vocabulary() -> None:
    batch = tokens()
    loss = F.cross_entropy(decoder()(batch).flatten(0, 1), batch.roll(-1, dims=1).flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.1)


def test_a_small_text_is_learnt_by_heart() -> None:
    model, batch = decoder(), tokens(batch=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_projections_into_the_residual_stream_start_smaller_with_depth() -> None:
    model = decoder(width=128, layers=8)
    first: Any = model.blocks["0"]
    assert first.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert first.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert first.feed_forward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_grouped_heads_are_multi_head_attention_with_repeated_keys_and_values() -> None:
    grouped, full = decoder(), decoder(kv_heads=4)
    state = grouped.state_dict()
    for name in [name for name in state if ".key." in name or ".value." in name]:
        state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).view(32, 32)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), full(tokens()))


def test_rotary_positions_make_attention_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> float:
        cos, sin = rotary_angles(torch.tensor([query_position, key_position]), 8, 10000.0)
        return (rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum().item()

    assert score(7, 4) == pytest.approx(score(103, 100), abs=1e-4)
    assert score(7, 4) != pytest.approx(score(7, 5), abs=1e-3)
    assert score(0, 0) == pytest.approx((q * k).sum().item())


def test_parameters_and_flops_are_counted_as_published() -> None:
    model = decoder(ffn_width=96)
    per_layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 96 + 2 * 32
    parameters = 50 * 32 + 2 * per_layer + 32
    assert model.num_parameters() == parameters
    assert model.flops_per_token(16) == 6 * parameters + 12 * 2 * 32 * 16
    untied = decoder(ffn_width=96, tie_embeddings=False)
    assert untied.num_parameters() == parameters + 50 * 32
    assert untied.flops_per_token(16) == model.flops_per_token(16)


def test_dropout_acts_in_training_and_never_in_evaluation() -> None:
    model = decoder(dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"heads": 5}, "model.width = 32 cannot be divided among model.heads = 5", "model.heads=4"),
        ({"width": 36, "heads": 4}, "is odd", "model.width=40"),
        ({"kv_heads": 3}, "model.kv_heads = 3", "1, 2, 4"),
        ({"layers": 0}, "model.layers is 0", "1 or more"),
        ({"dropout": 1.0}, "model.dropout is 1.0", "[0, 1)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_a_way_out(changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        decoder(**changes)
    assert message in error.value.message
    assert hint in (error.value.hint or "")


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"17 tokens is longer than model\.max_seq_len = 16"):
        decoder()(torch.zeros(1, 17, dtype=torch.int64))
