"""Check the sets, the metrics and the place of an evaluation."""

from __future__ import annotations

from slurmtrain.choices import Backend, EvalMode, JobKind
from slurmtrain.config.checks.values import SET_NAME, check_target
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, nearest

BUILT_IN_METRICS = ("perplexity", "bits_per_byte", "accuracy")


def check_evaluation(config: Config) -> None:
    """Raise for a set or a metric that cannot be built, and for evaluation jobs that this run cannot have."""
    wanted = config.eval
    for name, values in wanted.sets.items():
        if not SET_NAME.fullmatch(name) or name == "valid":
            raise ConfigError(
                f"eval.sets has {name!r}, which is not a valid name of a set",
                hint="letters, digits and _; `valid` is the set of the data source",
            )
        check_target(f"eval.sets.{name}", values)
    for name, value in wanted.metrics.items():
        if not isinstance(value, bool):
            check_target(f"eval.metrics.{name}", value)
        elif name not in BUILT_IN_METRICS:
            raise ConfigError(f"eval.metrics.{name}: there is no such metric", hint=nearest(name, BUILT_IN_METRICS))
    if wanted.mode == EvalMode.INLINE or config.job.kind != JobKind.TRAIN:
        return
    if config.cluster.backend == Backend.LOCAL:
        raise ConfigError("eval.mode=job, but cluster.backend=local has no job queue", hint="eval.mode=inline")
    if config.checkpoint.keep_best:
        raise ConfigError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} with eval.mode=job: when a checkpoint is removed, its "
            "evaluation may not have come back",
            hint="checkpoint.keep_every=N, or eval.mode=inline",
        )
