"""The optimiser."""

from __future__ import annotations

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
