"""A model of transformers as a plain module: where it is installed, but for what is refused without it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slurmtrain.errors import ConfigError
from slurmtrain.models.huggingface import HuggingFace
from slurmtrain.models.pretrained import load_pretrained
from slurmtrain.runtime.jobs.build_model import fill

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
TOKENS = torch.arange(20).reshape(2, 10)


def test_weights_are_drawn_or_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = HuggingFace(config=LLAMA)
    logits = model(TOKENS)
    assert logits.shape == (2, 10, 61) and logits.requires_grad
    copy.deepcopy(model.model).bfloat16().save_pretrained(tmp_path)  # type: ignore[operator]
    begun = fill(HuggingFace(path=str(tmp_path)), torch.device("cpu"), 1)
    load_pretrained(begun, tmp_path)
    read = begun.state_dict()
    assert read.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(read[name], value.bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "lama"}, "lama"),
        ({"hidden_size": 8}, "model_type"),
        ({"model_type": "vit"}, "vit"),
    ],
)
def test_what_transformers_cannot_build_is_refused(config: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=message) as error:
        HuggingFace(config=config)
    assert "\n" not in error.value.message and len(error.value.message) < 300


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError) as error:
        HuggingFace(config=LLAMA)
    assert error.value.hint == "pip install 'slurmtrain[hf]'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either model.config"),
        ({"config": LLAMA, "path": "/models"}, "either model.config"),
        ({"path": "/nowhere"}, "model.path=/nowhere: there is no such folder"),
    ],
)
def test_it_takes_a_config_or_a_folder(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(ConfigError, match=message):
        HuggingFace(**arguments)
