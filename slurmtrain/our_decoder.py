"""Whether a model is our own decoder, by the config of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DECODER = "slurmtrain.models.Decoder"


def is_our_decoder(model: Any) -> bool:
    """Return whether this is the config of our own decoder."""
    return isinstance(model, Mapping) and model.get("_target_") in (DECODER, "slurmtrain.models.decoder.Decoder")
