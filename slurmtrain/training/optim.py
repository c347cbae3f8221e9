"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
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


def learning_rate(step: int, *, total_steps: int, config: OptimConfig) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then half a cosine down to lr * min_lr_ratio.

    It is a function of the step alone, so that there is no state to save (cosine: Loshchilov & Hutter 2017, SGDR, eq.
    5).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    low = config.lr * config.min_lr_ratio
    return low + (config.lr - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group of parameters: everything but the parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def apply_settings(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Set the groups to what `settings_of` has returned.

    Restoring an optimiser also restores the settings that it was saved with.
    """
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
