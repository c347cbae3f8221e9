"""Small models of transformers with random weights, one of each family that our decoder computes, in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# An odd vocabulary, and fewer key/value heads than heads.
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Of each family what sets it apart; tied and untied.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 16}}),
    "llama3_tied": (
        "Llama",
        {
            "rope_parameters": {**LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 16},
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 32, "head_dim": 16}),
    "qwen2_5": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 16}),
}
TOKENS = (torch.arange(2 * 24).reshape(2, 24) * 7 + 3) % 61


def write_small_model(folder: Path) -> None:
    """A config.json of a small Qwen3, without weights, for commands that name a folder with a model."""
    folder.mkdir()
    described = {**SIZES, "model_type": "qwen3", "max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(described))


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """Write a model of this family to `folder`, in several files, and return it."""
    import transformers

    kind, changes = FAMILIES[family]
    torch.manual_seed(len(family))
    described = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes, **sizes}, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, f"{kind}ForCausalLM")(described)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, whose own first values would hide mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits


def read(folder: Path) -> Any:
    """What transformers reads from a folder."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()
