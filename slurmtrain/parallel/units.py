"""Units: the modules whose parameters FSDP2 gathers together, and that are compiled and recomputed one by one, in place.

A model names them by its attribute `parallel_units`, a tuple of class names; a config by `parallel.units`. If neither
does, they are what its lists hold: a model keeps its layers in a ModuleList, a ModuleDict or a Sequential.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slurmtrain.choices import ActivationCheckpointing
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.errors import ConfigError

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def units(model: nn.Module, class_names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the units of `model`, in order, each once; none contains another.

    Those that lists hold share no parameter with a module outside them: FSDP manages each parameter in one unit.

    Raises:
        ConfigError: no module is of such a class.
    """
    names = set(class_names) or set(getattr(model, "parallel_units", ()))
    if names:
        found = [module for module in model.modules() if type(module).__name__ in names]
    else:
        held = [child for module in model.modules() if isinstance(module, LISTS) for child in module.children()]
        uses = _uses(model)
        # The matrix of an embedding may be used for the output, too, long after its own forward pass.
        others = (*LISTS, nn.Embedding)
        found = [
            child
            for child in dict.fromkeys(held)
            if not isinstance(child, others) and (own := _uses(child)) and all(own[each] == uses[each] for each in own)
        ]
    if names and not found:
        raise ConfigError(
            f"parallel.units={sorted(names)}: {type(model).__name__} has no such modules",
            hint=f"it has {', '.join(sorted({type(module).__name__ for module in model.modules()}))}",
        )
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inner]


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    """Return how many of the modules have each parameter."""
    return Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))


# The results that "selective" keeps: those of expensive operations. All others are cheap to compute again.
_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def prepare_units(model: nn.Module, parallel: ParallelConfig) -> None:
    """Apply activation checkpointing and compilation to the units of `model`, as `parallel` says."""
    if parallel.activation_checkpointing == ActivationCheckpointing.NONE and not parallel.compile:
        return
    for unit in units(model, parallel.units):
        if parallel.activation_checkpointing != ActivationCheckpointing.NONE:
            apply_activation_checkpointing(unit, parallel.activation_checkpointing)
        if parallel.compile:
            compile_unit(unit)


def apply_activation_checkpointing(unit: nn.Module, which: str) -> None:
    """Free the activations inside `unit` after its forward pass.

    Free all of them ("full") or those that are cheap to recompute ("selective").
    """
    again = functools.partial(checkpoint, unit.forward, use_reentrant=False)
    if which == ActivationCheckpointing.SELECTIVE:
        again = functools.partial(again, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy))
    unit.forward = again


def _policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def compile_unit(unit: nn.Module) -> None:
    """Compile the forward pass alone, not the hooks around it, which communicate."""
    compiled = torch.compile(unit.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(*map(_arrived, args), **kwargs)

    unit.forward = forward


def _arrived(value: Any) -> Any:
    """Return `value` as a plain tensor, waiting for one that is still being received from other ranks.

    The result of a DTensor's collective is a subclass of Tensor through which compiled code passes no gradient back
    (2.13).
    """
    return value.clone() if isinstance(value, Tensor) and type(value) is not Tensor else value
