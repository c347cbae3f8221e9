"""The config of an evaluation job: that of the run, changed for one checkpoint and other resources. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.config.elastic import at_most
from slurmtrain.config.frozen import first_line, to_config, to_values
from slurmtrain.config.node_range import NodeRange
from slurmtrain.config.parallel_dims import ParallelDims, parallel_dims_of
from slurmtrain.config.schema import ClusterConfig, Config, HooksConfig
from slurmtrain.errors import ConfigError

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
    values, dims = to_values(config), parallel_dims_of(config)
    asked = {} if here else config.eval.cluster
    values["cluster"] = _merged(_here(config, dims) if here else _job(config, dims), asked)
    values["parallel"] = _merged(_one_copy(config, dims), config.eval.parallel)
    values["eval"] = {**values["eval"], "mode": "inline", "cluster": {}, "parallel": {}}
    for group in CHANGEABLE:
        values[group] = _merged(values[group], (changes or {}).get(group, {}))
    if "gpus_per_node" not in {**asked, **(changes or {}).get("cluster", {})} and not here and _gpu_each(config):
        values["cluster"]["gpus_per_node"] = values["cluster"]["tasks_per_node"]
    values["train"] |= _batches(config, dims, values)
    values["checkpoint"] |= {"restore_from": checkpoint, "keep_best": 0, "mirror": None}
    values["hooks"] = dataclasses.asdict(HooksConfig())
    values["sweep"]["pack"] = 1
    values["job"] |= {"name": f"eval-{config.job.name}"[:64], "singleton": False}
    values["requeue"]["standby_ranks"] = False
    if config.requeue.mode == RequeueMode.CHAIN:  # requeueing is forbidden where it is used
        values["requeue"]["mode"] = "resubmit"
    return _checked(values)


def _checked(values: dict[str, Any]) -> Config:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return to_config(values)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the config of an evaluation is invalid: {first_line(error)}",
            hint="eval.cluster and eval.parallel have the fields of cluster and parallel",
        ) from None


def _job(config: Config, dims: ParallelDims) -> dict[str, Any]:
    """Return the part of the training's cluster that a job asks for: the least that its layout allows."""
    cluster, ranks, most = config.cluster, _ranks(config, dims), config.cluster.node_range.most
    nodes = next(n for n in range(1, most + 1) if n * cluster.tasks_per_node % ranks == 0 or n == most)
    tasks = ranks if nodes == 1 else cluster.tasks_per_node
    values = dataclasses.asdict(cluster) | {
        "nodes": nodes,
        "tasks_per_node": min(tasks, cluster.tasks_per_node),
        "spare_nodes": 0,
    }
    # These name the training's own nodes, and what it waited for.
    values["sbatch"] = {name: value for name, value in cluster.sbatch.items() if name not in ("nodelist", "dependency")}
    return values


def _gpu_each(config: Config) -> bool:
    """Return whether every rank of the training has a GPU of its own, as then the ranks of the evaluation have."""
    return config.cluster.gpus_per_node == config.cluster.tasks_per_node


def _here(config: Config, dims: ParallelDims) -> dict[str, Any]:
    cluster = config.cluster
    return dataclasses.asdict(
        ClusterConfig(
            backend=Backend.LOCAL,
            tasks_per_node=_ranks(config, dims),
            cpus_per_task=cluster.cpus_per_task,
            env=cluster.env,
            python=cluster.python,
            network_interface="lo",
            rendezvous_timeout_s=cluster.rendezvous_timeout_s,
            collective_timeout_s=cluster.collective_timeout_s,
        )
    )


def _ranks(config: Config, dims: ParallelDims) -> int:
    """Return the ranks of one copy of the model; if the training shards it, as many as a node has."""
    one = dims.tp * dims.pp * dims.cp
    return one * min(dims.dp_shard, max(1, config.cluster.tasks_per_node // one))


def _one_copy(config: Config, dims: ParallelDims) -> dict[str, Any]:
    """Return `parallel` for one copy of the model; further ranks are further copies, or shards if the training has shards."""
    sharded = dims.dp_shard > 1
    values = dataclasses.asdict(config.parallel) | {"tp": dims.tp, "pp": dims.pp, "cp": dims.cp}
    values |= {"dp_replicate": 1, "dp_shard": -1} if sharded else {"dp_replicate": -1, "dp_shard": 1}
    return values | {"gradient_compression": "none"}


def _batches(config: Config, dims: ParallelDims, values: Mapping[str, Any]) -> dict[str, int]:
    """Return batch sizes with which forward passes are as large as the training's, which are known to fit."""
    parallel, cluster = values["parallel"], values["cluster"]
    micro, passes = dims.micro_batch_size(config.train), dims.micro_batches(config.train)
    sharing = parallel["tp"] * parallel["pp"] * parallel["cp"]
    most = NodeRange.parse(cluster["nodes"]).most  # eval.cluster.nodes may be a range, too
    copies = max(1, most * cluster["tasks_per_node"] // max(1, sharing))
    return {"micro_batch_size": micro, "global_batch_size": micro * copies * max(passes, parallel["pp"])}


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `changes`, key by key; dicts are merged, lists are replaced."""
    result = dict(values)
    for key, value in changes.items():
        inside = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if inside else value
    return result
