"""Activation checkpointing and compilation of a unit, in place: names of modules and parameters stay what they are."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slurmtrain.choices import ActivationCheckpointing
from slurmtrain.config.schema import ParallelConfig
from slurmtrain.parallel.units import units

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
