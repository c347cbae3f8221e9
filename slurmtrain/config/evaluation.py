"""The config of an evaluation that is not made by the training itself: the run's own, elsewhere, for one checkpoint. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slurmtrain.config.compose import first_line, to_config, to_values
from slurmtrain.config.layout import layout_of, micro_batch_size
from slurmtrain.config.schema import ClusterConfig, Config, HooksConfig
from slurmtrain.errors import ConfigError

CHANGEABLE = ("eval", "cluster", "parallel")  # groups that say how a checkpoint is evaluated, not what it is


def evaluation_config(
    config: Config, checkpoint: str, *, changes: Mapping[str, Any] | None = None, here: bool = False
) -> Config:
    """The config by which a checkpoint of a run is evaluated: its cluster and parallel are those of the evaluation.

    Args:
        config: the run's.
        checkpoint: path of what is evaluated.
        changes: further values of the groups in `CHANGEABLE`, nested; they overrule all others.
        here: as processes of this machine, in place of a SLURM job.

    Raises:
        ConfigError: eval.cluster, eval.parallel or `changes` have a field or a type that there is not.
    """
    values = to_values(config)
    asked = {} if here else config.eval.cluster
    values["cluster"] = _merged(_here(config) if here else _job(config), asked)
    values["parallel"] = _merged(_one_copy(config), config.eval.parallel)
    values["eval"] = {**values["eval"], "mode": "inline", "cluster": {}, "parallel": {}}
    for group in CHANGEABLE:
        values[group] = _merged(values[group], (changes or {}).get(group, {}))
    if "gpus_per_node" not in {**asked, **(changes or {}).get("cluster", {})} and not here and _gpu_each(config):
        values["cluster"]["gpus_per_node"] = values["cluster"]["tasks_per_node"]
    values["train"] |= _batches(config, values)
    values["checkpoint"] |= {"restore_from": checkpoint, "keep_best": 0, "mirror": None}
    values["hooks"] = dataclasses.asdict(HooksConfig())
    values["sweep"]["pack"] = 1
    values["job"] |= {"name": f"eval-{config.job.name}"[:64], "singleton": False}
    if config.requeue.mode == "chain":  # requeueing is forbidden where it is used
        values["requeue"]["mode"] = "resubmit"
    return _checked(values)


def _checked(values: dict[str, Any]) -> Config:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return to_config(values)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the config of an evaluation cannot be: {first_line(error)}",
            hint="eval.cluster and eval.parallel have the fields of cluster and parallel",
        ) from None


def _job(config: Config) -> dict[str, Any]:
    """What of the training's cluster a job asks for: the least that its layout lets it."""
    cluster, ranks = config.cluster, _ranks(config)
    nodes = next(
        n for n in range(1, cluster.nodes + 1) if n * cluster.tasks_per_node % ranks == 0 or n == cluster.nodes
    )
    tasks = ranks if nodes == 1 else cluster.tasks_per_node
    values = dataclasses.asdict(cluster) | {"nodes": nodes, "tasks_per_node": min(tasks, cluster.tasks_per_node)}
    # These name the training's own nodes, and what it waited for.
    values["sbatch"] = {name: value for name, value in cluster.sbatch.items() if name not in ("nodelist", "dependency")}
    return values


def _gpu_each(config: Config) -> bool:
    """Every rank of the training drives a GPU; so do those of the evaluation, however many."""
    return config.cluster.gpus_per_node == config.cluster.tasks_per_node


def _here(config: Config) -> dict[str, Any]:
    cluster = config.cluster
    return dataclasses.asdict(
        ClusterConfig(
            backend="local",
            tasks_per_node=_ranks(config),
            cpus_per_task=cluster.cpus_per_task,
            env=cluster.env,
            python=cluster.python,
            network_interface="lo",
            rendezvous_timeout_s=cluster.rendezvous_timeout_s,
            collective_timeout_s=cluster.collective_timeout_s,
        )
    )


def _ranks(config: Config) -> int:
    """One copy of the model; where the training shards it, over as many ranks as a node has."""
    layout = layout_of(config)
    one = layout.tp * layout.pp * layout.cp
    return one * min(layout.dp_shard, max(1, config.cluster.tasks_per_node // one))


def _one_copy(config: Config) -> dict[str, Any]:
    """Whatever more ranks are asked for are further copies, or shards where the training has some."""
    layout = layout_of(config)
    sharded = layout.dp_shard > 1
    values = dataclasses.asdict(config.parallel) | {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    values |= {"dp_replicate": 1, "dp_shard": -1} if sharded else {"dp_replicate": -1, "dp_shard": 1}
    return values | {"gradient_compression": "none"}


def _batches(config: Config, values: Mapping[str, Any]) -> dict[str, int]:
    """Forward passes as large as the training's, of which is known that they fit."""
    layout, parallel, cluster = layout_of(config), values["parallel"], values["cluster"]
    micro = micro_batch_size(config, layout)
    passes = config.train.global_batch_size // (micro * layout.dp)
    sharing = parallel["tp"] * parallel["pp"] * parallel["cp"]
    copies = max(1, cluster["nodes"] * cluster["tasks_per_node"] // max(1, sharing))
    return {"micro_batch_size": micro, "global_batch_size": micro * copies * max(passes, parallel["pp"])}


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, key by key; into dicts, not into lists."""
    result = dict(values)
    for key, value in changes.items():
        inside = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if inside else value
    return result
