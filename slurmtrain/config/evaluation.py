"""The configs of jobs beside a run, made from its own: one that evaluates a checkpoint, and one that only checks its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from slurmtrain.choices import Backend, JobKind, PreflightMode, RequeueMode
from slurmtrain.config.fields import merge
from slurmtrain.config.frozen import to_config, to_values
from slurmtrain.config.parallel_dims import at_most, parallel_dims_of
from slurmtrain.config.schema import (
    ClusterConfig,
    Config,
    EvalConfig,
    HooksConfig,
    JobConfig,
    ObserveConfig,
    ParallelConfig,
    RequeueConfig,
    SweepConfig,
)
from slurmtrain.errors import ConfigError, SlurmtrainError

TIME_LIMIT_MIN = 15  # of a preflight
NAME_LENGTH = 54  # of the 64 that a name may have, without what is added
CHANGEABLE = ("eval", "cluster", "parallel")  # groups that say how a checkpoint is evaluated, not what it is


def evaluation_config(
    config: Config, checkpoint: str, *, changes: Mapping[str, Any] | None = None, here: bool = False
) -> Config:
    """Return the config by which a checkpoint of a run is evaluated: its cluster and parallel are those of the evaluation.

    Args:
        config: the run's config.
        checkpoint: path of the checkpoint to evaluate.
        changes: further values of the groups in `CHANGEABLE`, nested; they override all others.
        here: evaluate in processes of this machine instead of a SLURM job.

    Raises:
        ConfigError: eval.cluster, eval.parallel or `changes` have an unknown field or a wrong type.
    """
    config = at_most(config)
    values, dims, changes = to_values(config), parallel_dims_of(config), changes or {}
    cluster, per_node, most = values["cluster"], config.cluster.tasks_per_node, config.cluster.node_range.most
    # A rank for each part of one copy of the model; if the training shards it, as many as a node has.
    copy = dims.tp * dims.pp * dims.cp
    ranks = copy * min(dims.dp_shard, max(1, per_node // copy))
    if here:
        kept = ("cpus_per_task", "env", "python", "rendezvous_timeout_s", "collective_timeout_s")
        cluster = msgspec.to_builtins(ClusterConfig()) | {name: cluster[name] for name in kept}
        cluster |= {"backend": Backend.LOCAL, "tasks_per_node": ranks, "network_interface": "lo"}
    else:  # the least that its layout allows
        nodes = next(n for n in range(1, most + 1) if n * per_node % ranks == 0 or n == most)
        # These options name the training's own nodes, and what it waited for.
        options = {name: value for name, value in cluster["sbatch"].items() if name not in ("nodelist", "dependency")}
        cluster |= {"nodes": nodes, "tasks_per_node": min(ranks, per_node) if nodes == 1 else per_node}
        cluster |= {"spare_nodes": 0, "sbatch": options}
        merge(cluster, config.eval.cluster)
    # One copy of the model; further ranks are further copies, or shards if the training has shards.
    sharded = dims.dp_shard > 1
    layout = {"tp": dims.tp, "pp": dims.pp, "cp": dims.cp}
    layout |= {"dp_replicate": 1, "dp_shard": -1} if sharded else {"dp_replicate": -1, "dp_shard": 1}
    values["cluster"] = cluster
    merge(values["parallel"], layout | config.eval.parallel)
    values["eval"] |= {"mode": "inline", "cluster": {}, "parallel": {}}
    for group in CHANGEABLE:
        merge(values[group], changes.get(group, {}))
    gpus_given = "gpus_per_node" in {**config.eval.cluster, **changes.get("cluster", {})}
    if not here and not gpus_given and config.cluster.gpus_per_node == per_node:  # a GPU for each rank
        values["cluster"]["gpus_per_node"] = values["cluster"]["tasks_per_node"]
    values["checkpoint"] |= {"restore_from": checkpoint, "keep_best": 0, "mirror": None}
    values["hooks"] = msgspec.to_builtins(HooksConfig())
    values["sweep"]["pack"] = 1
    values["job"] |= {"name": f"eval-{config.job.name}"[:64], "singleton": False}
    if config.requeue.mode == RequeueMode.CHAIN:  # requeueing is forbidden where it is used
        values["requeue"]["mode"] = RequeueMode.RESUBMIT
    try:
        found = to_config(values)
    except SlurmtrainError as error:
        raise ConfigError(
            f"the config of an evaluation is invalid: {error.message}",
            hint="eval.cluster and eval.parallel have the fields of cluster and parallel",
        ) from None
    # Forward passes are as large as the training's, which are known to fit.
    parallel, micro = found.parallel, dims.micro_batch_size(config.train)
    copies = max(1, found.world_size // max(1, parallel.tp * parallel.pp * parallel.cp))
    batch = micro * copies * max(dims.micro_batches(config.train), parallel.pp)
    return replace(found, train=replace(found.train, micro_batch_size=micro, global_batch_size=batch))


def preflight_config(config: Config, *, full: bool) -> Config:
    """Return the config of a job with the same nodes, ranks, environment and data that trains nothing.

    Args:
        config: a config after all checks.
        full: measure, too.
    """
    job = config.job
    return replace(
        config,
        job=JobConfig(
            name=f"{job.name[:NAME_LENGTH]}-preflight",
            kind=JobKind.PREFLIGHT,
            runs_dir=job.runs_dir,
            snapshot=job.snapshot,
            snapshot_max_mb=job.snapshot_max_mb,
        ),
        cluster=replace(
            config.cluster, spare_nodes=0, time_limit_min=min(config.cluster.time_limit_min, TIME_LIMIT_MIN)
        ),
        preflight=replace(
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
