"""The floating-point operations of training a model, whatever it is, as far as they can be counted; see `planner.shape`."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from slurmtrain.planner.flops import FROZEN, TRAINED, ModelFlops, attention_flops

log = logging.getLogger(__name__)

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # fields of models that use some matrices only


def flops_of(model: nn.Module) -> ModelFlops | None:
    """Return the operations of training a whole model, on any device; None: they cannot be counted.

    Ours say them by `training_flops()`; a model of one's own by `flops_per_token(seq_len)`: operations of one token's forward
    and backward pass with dense attention, which is a constant and a multiple of `seq_len`.
    """
    ours = getattr(model, "training_flops", None)
    if callable(ours):
        found = ours()
        return found if isinstance(found, ModelFlops) else None
    per_token = getattr(model, "flops_per_token", None)
    if not callable(per_token):
        return None
    try:
        one, two = int(per_token(1)), int(per_token(2))
    except Exception as error:  # of code that may be meant for something else, and that training does not need
        log.warning("%s.flops_per_token(seq_len) fails: %s", type(model).__name__, error)
        return None
    return ModelFlops(2 * one - two, two - one) if two >= one > 0 else None


def transformers_flops(model: nn.Module) -> ModelFlops | None:
    """Return the operations of training a causal language model of transformers; None if only some matrices are used."""
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    if not all(isinstance(size, int) and size > 0 for size in (layers, heads, width)):
        return None
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    assert isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    predicting = getattr(output, "weight", None)
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not predicting
    }
    multiplied = [each for each in model.parameters() if each.ndim == 2 and id(each) not in looked_up]
    per_token = sum(each.numel() * (TRAINED if each.requires_grad else FROZEN) for each in multiplied)
    head_dim = getattr(config, "head_dim", None) or width // heads
    return ModelFlops(per_token, attention_flops(layers, heads, head_dim))
