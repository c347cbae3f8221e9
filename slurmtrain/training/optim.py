"""AdamW and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from slurmtrain.config.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019) with decay on matrices only, fused into one kernel.

    Norm gains and biases are one-dimensional and are not decayed.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    return AdamW([group for group in groups if group["params"]], lr=config.lr, betas=betas, eps=config.eps, fused=True)


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group of parameters: everything but the parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def apply_settings(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Set the groups to what `settings_of` has returned.

    Restoring an optimiser also restores the settings that it was saved with.
    """
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
