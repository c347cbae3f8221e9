"""Names that fields of our own decoder had before they were named as in Llama's files (schema version 3).

They are in frozen configs and in the manifests of checkpoints. The models of users keep the names that they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DECODER = "slurmtrain.models.Decoder"
NAMES = {"width": "dim", "layers": "n_layers", "heads": "n_heads", "kv_heads": "n_kv_heads", "ffn_width": "hidden_dim"}


def is_our_decoder(model: Any) -> bool:
    """Return whether this is the config of our own decoder."""
    return isinstance(model, Mapping) and model.get("_target_") in (DECODER, "slurmtrain.models.decoder.Decoder")


def with_names_of_today(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config, or what a checkpoint is bound to, with today's names in `model`."""
    return _renamed(values, NAMES)


def with_earlier_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config with the earlier names in `model`, by which the identity of an experiment is digested."""
    return _renamed(values, {new: old for old, new in NAMES.items()})


def name_of_today(key: str) -> str:
    """Return today's name of a dotted key of our decoder's config."""
    group, _, name = key.partition(".")
    return f"model.{NAMES[name]}" if group == "model" and name in NAMES else key


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    model = values.get("model")
    if not is_our_decoder(model):
        return dict(values)
    return {**values, "model": {names.get(name, name): value for name, value in model.items()}}  # type: ignore[union-attr]
