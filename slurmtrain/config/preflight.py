"""The config of a job that only checks its nodes, made from that of a training or of a program of the user's own."""

from __future__ import annotations

import dataclasses

from slurmtrain.choices import JobKind, PreflightMode, RequeueMode
from slurmtrain.config.launched_program import node_shape
from slurmtrain.config.schema import (
    Config,
    EvalConfig,
    HooksConfig,
    JobConfig,
    ObserveConfig,
    ParallelConfig,
    RequeueConfig,
    SweepConfig,
)

TIME_LIMIT_MIN = 15
NAME_LENGTH = 54  # of the 64 that a name may have, without what is added


def preflight_config(config: Config, *, full: bool) -> Config:
    """Return the config of a job with the same nodes, ranks, environment and data that trains nothing.

    Args:
        config: a config after all checks.
        full: measure, too.
    """
    job, shape = config.job, node_shape(config)
    return dataclasses.replace(
        config,
        job=JobConfig(
            name=f"{job.name[:NAME_LENGTH]}-preflight",
            kind=JobKind.PREFLIGHT,
            runs_dir=job.runs_dir,
            snapshot=job.snapshot,
            snapshot_max_mb=job.snapshot_max_mb,
        ),
        cluster=dataclasses.replace(
            config.cluster,
            tasks_per_node=shape.processes,
            cpus_per_task=shape.threads,
            spare_nodes=0,
            time_limit_min=min(config.cluster.time_limit_min, TIME_LIMIT_MIN),
        ),
        preflight=dataclasses.replace(
            config.preflight,
            mode=PreflightMode.FULL if full else PreflightMode.QUICK,
            exclude_slow=config.preflight.exclude_slow and full,
        ),
        parallel=ParallelConfig(),
        eval=EvalConfig(sets=config.eval.sets),
        requeue=RequeueConfig(mode=RequeueMode.OFF, blame_threshold=config.requeue.blame_threshold),
        sweep=SweepConfig(),
        hooks=HooksConfig(),
        observe=ObserveConfig(),
    )
