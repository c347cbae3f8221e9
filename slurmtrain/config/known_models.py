"""The models that a config may name: our own decoder, and the families of Hugging Face's folders that it computes.

Those are Llama 2 and 3, Mistral, Qwen2 and 2.5, Qwen3. A folder's config.json has the decoder's sizes. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.choices import DECODERS
from slurmtrain.errors import ConfigError

SIZES = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "max_seq_len")
CONFIG = "config.json"
HUGGING_FACE = "slurmtrain.models.huggingface.HuggingFace"  # the _target_ of a model of transformers
ROPE_TYPES = ("default", "llama3")
ANY_FAMILY = "model=huggingface model.path=... takes any family that transformers has"
LINEAR_LAYERS = ("query", "key", "value", "out", "gate", "up", "down", "output")  # of the decoder
OUTPUTS = ("output", "lm_head")  # layers that predict tokens, which get no adapters unless they are named


# The class of transformers that has a language model's head, and fields of the decoder, by model_type.
FAMILIES: dict[str, tuple[str, dict[str, bool]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True}),
}


def is_our_decoder(model: Any) -> bool:
    """Return whether this is the config of our own decoder."""
    return isinstance(model, Mapping) and model.get("_target_") in DECODERS


def check_sizes(model: Mapping[str, Any]) -> None:
    """Check the sizes of a decoder, as far as the config group `model` has them.

    Raises:
        ConfigError: a size is not possible, or two do not fit together.
    """
    sizes = {name: size for name in SIZES if (size := model.get(name)) is not None}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"model.{name}={size!r} is not a whole number of at least 1", hint=f"set model.{name}")
    heads, groups = sizes.get("n_heads"), sizes.get("n_kv_heads")
    if heads and "dim" in sizes and "head_dim" not in sizes and sizes["dim"] % (2 * heads):
        dim = sizes["dim"]
        fitting = [n for n in range(1, dim + 1) if dim % (2 * n) == 0] or [1]
        raise ConfigError(
            f"model.dim={dim} cannot be divided among model.n_heads={heads} into parts of an even size, which rotary "
            "positions need",
            hint=f"set model.n_heads={min(fitting, key=lambda n: abs(n - heads))}, or "
            f"model.dim={-(-dim // (2 * heads)) * 2 * heads}, or model.head_dim",
        )
    if heads and groups and heads % groups:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"model.n_heads={heads} cannot share model.n_kv_heads={groups} evenly",
            hint=f"set model.n_kv_heads to one of {', '.join(map(str, fitting))}",
        )
    if "head_dim" in sizes and sizes["head_dim"] % 2:
        raise ConfigError(
            f"model.head_dim={sizes['head_dim']} is odd; rotary positions turn pairs of components",
            hint=f"set model.head_dim={sizes['head_dim'] + 1}",
        )
    dropout = model.get("dropout", 0.0)
    if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise ConfigError(f"model.dropout={dropout!r} is not a probability", hint="write a value in [0, 1), often 0")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the values of config.json in `folder`.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    hint = "name a folder written by save_pretrained, or a snapshot from the Hub, that is also visible here"
    try:
        values = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"model.path={folder}: its {CONFIG} cannot be read: {why}", hint=hint) from None
    if not isinstance(values, dict):
        raise ConfigError(f"model.path={folder}: its {CONFIG} is no object", hint=hint)
    return values


def with_sizes(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config group `model` with the fields that the folder model.path has, if it is our decoder without sizes.

    Raises:
        ConfigError: the decoder does not compute what the folder's model computes, or a field says otherwise.
    """
    path = model.get("path")
    if not is_our_decoder(model) or not isinstance(path, str) or model.get("vocab_size") is not None:
        return dict(model)
    values = read_config(Path(path).expanduser())
    fields = decoder_fields(values, path)
    given = {name: value for name, value in model.items() if value is not None}
    check_agrees(given, fields, path)
    window, longest = window_of(values), given.get("max_seq_len")
    if window is not None and isinstance(longest, int) and longest > window:
        raise ConfigError(
            f"model.max_seq_len={longest}, but the layers of model.path={path} attend to the last {window} tokens only",
            hint=f"model.max_seq_len={window} at most: up to that length, our decoder computes the same",
        )
    return {**fields, **given}


def check_agrees(model: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if the config group `model` says otherwise than `fields`, those of the folder `where`."""
    for name, value in fields.items():
        if name != "max_seq_len" and model.get(name) not in (None, value):
            raise ConfigError(
                f"model.{name}={model[name]}, but the weights in model.path={where} are of a model with {value}",
                hint=f"leave model.{name} out: model=hf takes it from there",
            )


def decoder_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of the decoder that computes what the model of a config.json computes.

    Args:
        values: what is in config.json.
        where: its folder, for messages.

    Raises:
        ConfigError: the decoder does not; the message says what it does.
    """
    kind = values.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise _refusal(where, f"its model_type is {kind!r}", f"one of {', '.join(FAMILIES)}")
    if values.get("quantization_config"):
        raise ConfigError(
            f"model.path={where}: its quantization_config is set: quantised weights cannot be read",
            hint="name a folder with the unquantised weights, for example in bfloat16",
        )
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
    for name, value in wanted.items():
        if values.get(name) not in (None, value):
            raise _refusal(where, f"its {name} is {values[name]}", f"{name}={json.dumps(value)}")
    try:
        heads, dim, window = int(values["num_attention_heads"]), int(values["hidden_size"]), window_of(values)
        longest = int(values["max_position_embeddings"])
        return {
            "vocab_size": int(values["vocab_size"]),
            "dim": dim,
            "n_layers": int(values["num_hidden_layers"]),
            "n_heads": heads,
            "n_kv_heads": int(values.get("num_key_value_heads") or heads),
            "head_dim": int(values.get("head_dim") or dim // heads),
            "hidden_dim": int(values["intermediate_size"]),
            # Within a sliding window, every token attends to all before it, as the decoder's do.
            "max_seq_len": longest if window is None else min(longest, window),
            **_rope(values, where),
            "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
            "qkv_bias": False,
            "qk_norm": False,
            **family[1],
            "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        }
    except KeyError as error:
        raise ConfigError(f"model.path={where}: its {CONFIG} lacks {error.args[0]}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"model.path={where}: its {CONFIG} has a value that is not a number: {error}") from None


def window_of(values: Mapping[str, Any]) -> int | None:
    """Return the number of tokens that some layer of a config.json's model attends to at most; None: to all."""
    used = values.get("use_sliding_window", values.get("model_type") == "mistral")
    if not used or "sliding_attention" not in (values.get("layer_types") or ["sliding_attention"]):
        return None
    window = values.get("sliding_window", 4096)
    return int(window) if window is not None else None


def _rope(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return rope_theta and rope_scaling, which transformers 5 writes as one entry, rope_parameters."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise _refusal(where, f"its rope_type is {kind!r}", f"one of {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refusal(where, f"its partial_rotary_factor is {rope['partial_rotary_factor']}", "1.0")
    theta = float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    scaling = {name: float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    original = rope.get("original_max_position_embeddings")
    original = values["max_position_embeddings"] if original is None else original
    return {"rope_theta": theta, "rope_scaling": {**scaling, "original_seq_len": int(original)}}


def _refusal(where: str, what: str, expected: str) -> ConfigError:
    return ConfigError(f"model.path={where}: {what}; our decoder computes {expected}", hint=ANY_FAMILY)
