"""The floating-point operations of training a model, whatever it is, as far as they can be counted; see `planner.shape`."""

from __future__ import annotations

from typing import Any

from torch import nn

from slurmtrain.planner.flops import FROZEN, TRAINED, ModelFlops, attention_flops

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # fields of models that use some matrices only


def flops_of(model: nn.Module) -> ModelFlops | None:
    """Return the operations of training a whole model, on any device; None: they cannot be counted.

    Ours say them by `training_flops()`; a model of one's own by `flops_per_token(seq_len)`: operations of one token's forward
    and backward pass with dense attention, which is a constant and a multiple of `seq_len`.
    """
    known: Any = model
    if hasattr(known, "training_flops"):
        found: ModelFlops | None = known.training_flops()
        return found
    if not hasattr(known, "flops_per_token"):
        return None
    one, two = known.flops_per_token(1), known.flops_per_token(2)
    return ModelFlops(2 * one - two, two - one)


def transformers_flops(model: nn.Module) -> ModelFlops | None:
    """Return the operations of training a causal language model of transformers; None if only some matrices are used."""
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, width = (getattr(config, name, None) for name in sizes)
    if not (layers and heads and width) or any(getattr(config, name, None) for name in EXPERTS):
        return None
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
