"""Check what is logged, measured and profiled."""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath

from slurmtrain.choices import JobKind
from slurmtrain.config.checks.values import SET_NAME, at_least, check_target
from slurmtrain.config.profile_steps import check_planned, first_and_last
from slurmtrain.config.schema import Config, ObserveConfig
from slurmtrain.errors import ConfigError

STRAGGLER_STEPS = 5  # fewest steps between two comparisons of the ranks


def check_observe(observe: ObserveConfig, kind: JobKind) -> None:
    """Raise for a logger that cannot be built, and for names that its service refuses."""
    for name, values in observe.loggers.items():
        if not SET_NAME.fullmatch(name) or name in ("wandb", "mlflow"):
            raise ConfigError(
                f"observe.loggers has {name!r}, which is not a valid name of a logger",
                hint="letters, digits and _; observe.wandb.enabled=true and observe.mlflow.enabled=true are the built-in ones",
            )
        check_target(f"observe.loggers.{name}", values)
    if observe.loggers and kind == JobKind.COMMAND:
        raise ConfigError(
            f"observe.loggers.{next(iter(observe.loggers))} works only with the built-in trainer, but job.kind is {kind!r}",
            hint="your own program has to call its loggers itself",
        )
    for name, value in (("wandb.project", observe.wandb.project), ("mlflow.experiment", observe.mlflow.experiment)):
        if value is not None and (not value.strip() or re.search(r"[\x00-\x1f\x7f]", value)):
            raise ConfigError(f"observe.{name}={value!r} is no name", hint="null takes job.name")
    if observe.wandb.project is not None and re.search(r"[/\\#?%:]", observe.wandb.project):
        raise ConfigError(
            f"observe.wandb.project={observe.wandb.project!r}: Weights & Biases allows none of / \\ # ? % : in it",
            hint="the user or team before the / is observe.wandb.entity",
        )
    if observe.textfile_dir is not None and not PurePosixPath(observe.textfile_dir).is_absolute():
        raise ConfigError(
            f"observe.textfile_dir={observe.textfile_dir} is not an absolute path",
            hint="name the folder that the node exporter of each node reads, such as /var/lib/node_exporter",
        )


def check_measurements(config: Config) -> None:
    """Raise for measurements that would be noise, or that nothing in this run can take."""
    observe, peak = config.observe, config.cluster.peak_tflops
    for name in ("per_layer_every", "straggler_every"):
        at_least(f"observe.{name}", getattr(observe, name), 0)
    if 0 < observe.straggler_every < STRAGGLER_STEPS:
        raise ConfigError(
            f"observe.straggler_every={observe.straggler_every}: the median of so few steps is mostly noise",
            hint=f"{STRAGGLER_STEPS} or more steps; 0 turns the search for slow ranks off",
        )
    if observe.blame_stragglers and not (observe.phases and observe.straggler_every):
        missing = "observe.straggler_every=0" if observe.phases else "observe.phases=false"
        raise ConfigError(
            f"observe.blame_stragglers=true, but {missing} cannot find slow ranks",
            hint="keep the defaults of observe.phases and observe.straggler_every",
        )
    check_planned(observe.profile_ranks, config.world_size)
    if observe.profile_steps is not None:
        first, _ = first_and_last(observe.profile_steps)
        if config.job.kind != JobKind.TRAIN:
            raise ConfigError(
                f"observe.profile_steps={observe.profile_steps!r} needs the trainer, but job.kind is {config.job.kind!r}",
                hint="for a program that calls slurmtrain.should_stop() once per step: touch RUN/profile",
            )
        if first > config.train.steps:
            raise ConfigError(
                f"observe.profile_steps={observe.profile_steps!r}, but train.steps={config.train.steps}: there is no such step"
            )
    if peak is not None and not 0 < peak < math.inf:
        raise ConfigError(
            f"cluster.peak_tflops={peak} must be above 0",
            hint="dense teraflops per second of one GPU, such as 989.4; null: the value in the GPU's data sheet",
        )
