"""The learning rate as a function of the step, for the trainer and for those who plan a run."""

from __future__ import annotations

import math

from slurmtrain.config.schema import OptimConfig


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
