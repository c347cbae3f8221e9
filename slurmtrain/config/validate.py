"""Rules that involve several fields of a config, checked before anything is submitted.

The checks are pure: they take a `Config`, or a part of one, and raise a `ConfigError` that names the field, its value and
what to write instead. They lie in `config.checks`; here is their order.
"""

from __future__ import annotations

from slurmtrain.choices import EvalMode, JobKind
from slurmtrain.config.checks.checkpoint import check_checkpoint
from slurmtrain.config.checks.cluster import check_cluster, check_placement
from slurmtrain.config.checks.evaluation import check_evaluation
from slurmtrain.config.checks.job import check_hooks, check_job
from slurmtrain.config.checks.lora import check_adapted_layers, check_lora
from slurmtrain.config.checks.observe import check_measurements, check_observe
from slurmtrain.config.checks.parallel import check_compression, check_parallel
from slurmtrain.config.checks.preflight import check_preflight
from slurmtrain.config.checks.prepare import check_prepare
from slurmtrain.config.checks.requeue import check_requeue, check_watchdog
from slurmtrain.config.checks.sbatch import check_sbatch, check_strings
from slurmtrain.config.checks.stage import check_stage
from slurmtrain.config.checks.sweep import check_sweep
from slurmtrain.config.checks.training import (
    check_batch,
    check_built,
    check_optim,
    check_our_decoder,
    check_schedule,
    check_train,
)
from slurmtrain.config.elastic import at_most, usable_sizes
from slurmtrain.config.evaluation import evaluation_config
from slurmtrain.config.launched_program import check_launched, has_launcher
from slurmtrain.config.parallel_dims import ParallelDims, parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError


def validate(config: Config) -> ParallelDims:
    """Raise for the first setting that cannot work, and return the parallel dims, which every later check takes.

    Raises:
        ConfigError: the message gives the field, the value, what was expected and a hint.
    """
    check_job(config.job)
    if has_launcher(config):
        check_launched(config)
    check_cluster(config.cluster)
    check_sbatch(config.cluster, singleton=config.job.singleton)
    check_strings(config.cluster)
    check_stage(config)
    check_placement(config.cluster)
    check_parallel(config.parallel)
    check_batch(config.train)
    usable_sizes(config)
    dims = parallel_dims_of(at_most(config))
    check_compression(config.parallel, dims)
    check_lora(config.lora, dims)
    check_adapted_layers(config)
    check_train(config.train)
    check_optim(config.optim)
    check_checkpoint(config)
    check_requeue(config)
    check_sweep(config.sweep, config.search)
    check_built(config)
    check_watchdog(config)
    check_preflight(config.preflight)
    check_measurements(config)
    check_hooks(config.hooks)
    check_observe(config.observe, config.job.kind)
    check_evaluation(config)
    if config.job.kind == JobKind.TRAIN and config.eval.mode == EvalMode.JOB:
        _check_evaluation_job(config)
    if config.job.kind == JobKind.PREPARE:
        check_prepare(config.prepare)
    if config.job.kind == JobKind.TRAIN:
        check_schedule(config.optim, config.train.steps)
        check_our_decoder(config)
    return dims


def _check_evaluation_job(config: Config) -> None:
    try:
        validate(evaluation_config(config, "checkpoint"))
    except ConfigError as error:
        raise ConfigError(
            f"the evaluation job (eval.mode=job) is invalid: {error.message}",
            hint=f"eval.cluster and eval.parallel change it; {error.hint or 'by default it is one copy of the model'}",
        ) from None
