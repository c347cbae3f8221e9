"""Check the settings of the trainer and its optimiser, and the names of our own model."""

from __future__ import annotations

import math

from slurmtrain.choices import JobKind
from slurmtrain.config.checks.values import at_least, check_target
from slurmtrain.config.parallel_dims import sequence_lengths
from slurmtrain.config.schema import Config, OptimConfig, TrainConfig
from slurmtrain.errors import ConfigError
from slurmtrain.our_decoder import is_our_decoder


def check_batch(train: TrainConfig) -> None:
    """Raise for a batch of no samples."""
    at_least("train.global_batch_size", train.global_batch_size, 1)
    if train.micro_batch_size is not None:
        at_least("train.micro_batch_size", train.micro_batch_size, 1)


def check_train(train: TrainConfig) -> None:
    """Raise for numbers that the trainer cannot count with."""
    for name in ("steps", "log_every", "length_sorted_steps"):
        at_least(f"train.{name}", getattr(train, name), 1)
    for name in ("eval_every", "data_workers", "data_ahead", "seed", "max_skipped", "max_rollbacks"):
        at_least(f"train.{name}", getattr(train, name), 0)
    at_least("train.spike_window", train.spike_window, 10, why="a median of fewer losses says little")
    at_least("train.spike_threshold", train.spike_threshold, 1, why="train.on_spike=ignore looks for no spikes")


def check_optim(optim: OptimConfig) -> None:
    """Raise for settings that the optimiser cannot take."""
    if not 0 < optim.lr < math.inf:  # written so that nan is refused, too
        raise ConfigError(f"optim.lr={optim.lr} must be above 0", hint="for example optim.lr=3e-4")
    if not 0 <= optim.min_lr_ratio <= 1:
        raise ConfigError(f"optim.min_lr_ratio={optim.min_lr_ratio} must lie between 0 and 1")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"optim.betas={list(optim.betas)} must be two numbers from 0 up to but not 1")
    for name in ("warmup_steps", "weight_decay", "grad_clip", "eps"):
        at_least(f"optim.{name}", getattr(optim, name), 0)


def check_schedule(optim: OptimConfig, steps: int) -> None:
    """Raise for a schedule that does not fit into the steps; a program of the user's own has another one."""
    if optim.warmup_steps > steps:
        raise ConfigError(
            f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={steps}",
            hint="the warm-up would never end",
        )


def check_built(config: Config) -> None:
    """Raise if the trainer was not told which model, data or hooks to build."""
    if config.job.kind == JobKind.TRAIN:
        for group in ("model", "data"):
            if not getattr(config, group).get("_target_"):
                raise ConfigError(
                    f"{group}._target_ is missing",
                    hint=f"choose one with {group}=..., or write {group}._target_=my.module.Class",
                )
    for index, values in enumerate(config.train.hooks):
        check_target(f"train.hooks[{index}]", values, hint="train.hooks=[{_target_: my_package.MyHook}]")


def check_our_decoder(config: Config) -> None:
    """Raise for what our own model would report only when the job has begun: too long sequences."""
    if not is_our_decoder(config.model):
        return
    longest = config.model.get("max_seq_len")
    if not isinstance(longest, int) or not str(config.data.get("_target_")).startswith("slurmtrain.data."):
        return
    for key, length in sequence_lengths(config.data).items():
        if length > longest:
            raise ConfigError(
                f"{key}={length} is longer than model.max_seq_len={longest}",
                hint=f"set model.max_seq_len={length}, or a shorter {key}",
            )
