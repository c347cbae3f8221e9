from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate

from slurmtrain.config.compose import compose
from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder
from slurmtrain.planner.shape import DecoderShape

CONF = Path(__file__).parents[3] / "conf"
SIZES: dict[str, Any] = {
    "vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 16,
}  # fmt: skip


def decoder(seed: int = 0, **changes: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(**{**SIZES, **changes})


def tokens(batch: int = 2, seq_len: int = 16) -> torch.Tensor:
    return torch.randint(50, (batch, seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_shipped_configs_build_a_model_that_runs(name: str) -> None:
    model = instantiate(compose([f"model={name}"]).model)
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 256)


# Parameters of the published weights, tied matrices counted once.
PUBLISHED = {
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
}


def count(model: torch.nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def test_the_presets_have_the_parameters_of_the_published_models() -> None:
    assert PUBLISHED.keys() == {path.stem for path in (CONF / "model").glob("*.yaml")} - {
        "base",
        "tiny",
        "small",
        "hf",
        "huggingface",
    }
    for name, parameters in PUBLISHED.items():
        config = compose([f"model={name}"])
        with torch.device("meta"):
            model = instantiate(config.model)
        assert (name, count(model)) == (name, parameters)
        assert DecoderShape.of(config.model).num_parameters() == parameters
        if name.startswith("llama3"):
            assert model.blocks["0"].attention.rope_scaling.factor == (32 if name in ("llama3_1b", "llama3_3b") else 8)


def test_parameters_and_flops_are_counted_as_published() -> None:
    model = decoder(hidden_dim=96)
    per_layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 96 + 2 * 32
    parameters = 50 * 32 + 2 * per_layer + 32
    assert count(model) == parameters
    matrices = parameters - 5 * 32  # all but the norms
    assert model.training_flops().of(1, 16) == 6 * matrices + 12 * 2 * 32 * 16
    untied = decoder(hidden_dim=96, tie_embeddings=False)
    assert count(untied) == parameters + 50 * 32
    assert untied.training_flops() == model.training_flops()


def test_dropout_acts_in_training_and_never_in_evaluation() -> None:
    model = decoder(dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"17 tokens is longer than model\.max_seq_len = 16"):
        decoder()(torch.zeros(1, 17, dtype=torch.int64))
