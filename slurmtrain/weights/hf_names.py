"""The names that our own decoder's tensors have in folders of Hugging Face, and the config.json of an exported decoder.

All families of `config.known_models` name their tensors alike, and lay out their matrices as the decoder does, so that a
conversion renames tensors and changes no number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slurmtrain.config.known_models import FAMILIES
from slurmtrain.errors import ConfigError

# The file with all weights, or the one that says which of several has which.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Names of modules, outside of the blocks and in them.
OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")


def hugging_face_name(name: str) -> str | None:
    """Return the name in a folder of Hugging Face of a parameter of the decoder; None: the decoder has none of that name."""
    found = _BLOCK.fullmatch(name)
    if found is not None:
        inside = _INSIDE.get(found[2])
        return f"model.layers.{found[1]}.{inside}.{found[3]}" if inside else None
    return f"{OUTSIDE[module]}.weight" if (module := name.removesuffix(".weight")) in OUTSIDE else None


def config_json(
    model: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the config.json of a decoder, but for its type. It has the keys of transformers 4, which later ones read, too.

    Args:
        model: the config group `model` that the decoder was built from.
        shapes: shapes of all its parameters, by the decoder's names.
        base: the config.json of the folder that its weights came from, whose other entries are kept; None: none.

    Raises:
        ConfigError: no family computes what this decoder computes.
    """
    (vocab_size, dim), query = shapes["embedding.weight"], shapes["blocks.0.attention.query.weight"]
    heads = int(model["n_heads"])
    head_dim = query[0] // heads
    layers = 1 + max(int(found[1]) for name in shapes if (found := _BLOCK.fullmatch(name)))
    bias, norm = "blocks.0.attention.query.bias" in shapes, "blocks.0.attention.query_norm.weight" in shapes
    if bias and norm:
        raise ConfigError(
            "model.qkv_bias=true with model.qk_norm=true: no Hugging Face model family has both",
            hint="export to a file: FILE.safetensors",
        )
    kind = "qwen3" if norm else "qwen2" if bias else "llama"
    theta, scaling = float(model.get("rope_theta", 10000.0)), model.get("rope_scaling")
    values: dict[str, Any] = {
        "architectures": [FAMILIES[kind][0]],
        "model_type": kind,
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": shapes["blocks.0.feed_forward.gate.weight"][0],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shapes["blocks.0.attention.key.weight"][0] // head_dim,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(model["max_seq_len"]),
        "rms_norm_eps": float(model.get("norm_eps", 1e-5)),
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else _scaling_json(scaling),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "qwen2":
        values |= {"use_sliding_window": False}
        if head_dim * heads == dim:
            del values["head_dim"]  # which readers of Qwen2 derive
    if kind == "qwen3":
        values |= {"attention_bias": False, "use_sliding_window": False}
    if kind == "llama":
        values |= {"attention_bias": False, "mlp_bias": False}
    if base is None:
        return values
    # Training may have been on longer sequences, and has changed nothing else.
    longest = max(int(base["max_position_embeddings"]), values["max_position_embeddings"])
    return {**base, "max_position_embeddings": longest}


def _scaling_json(scaling: Mapping[str, Any]) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    return {
        "rope_type": "llama3",
        **{name: float(scaling[name]) for name in names},
        "original_max_position_embeddings": int(scaling["original_seq_len"]),
    }
