"""Check which nodes, memory, GPUs and time a job asks for, and where its nodes may lie."""

from __future__ import annotations

import math

from slurmtrain.choices import Backend
from slurmtrain.config.checks.values import at_least
from slurmtrain.config.port_range import PortRange
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import ConfigError

NODES_MAX = 65536  # every size of a range is tried
SLURM_EARLY_S = 60  # `man sbatch`, --signal: the signal may be sent up to 60 seconds earlier than specified


def check_cluster(cluster: ClusterConfig) -> None:
    """Raise for nodes, memory, GPUs or a time that no job can have, and for settings that exclude each other."""
    _check_counts(cluster)
    _check_memory(cluster)
    _check_gpus(cluster)
    _check_rates(cluster)
    _check_local(cluster)
    _check_environment(cluster)
    _check_time(cluster)


def _check_counts(cluster: ClusterConfig) -> None:
    at_least("cluster.nodes", cluster.node_range.least, 1)
    if cluster.node_range.most > NODES_MAX:
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}: no job has more than {NODES_MAX} nodes", hint="cluster.nodes=2-4"
        )
    for name in (
        "tasks_per_node",
        "cpus_per_task",
        "time_limit_min",
        "rendezvous_timeout_s",
        "collective_timeout_s",
    ):
        at_least(f"cluster.{name}", getattr(cluster, name), 1)
    for name in ("gpus_per_node", "signal_lead_s", "spare_nodes", "srun_wait_s"):
        at_least(f"cluster.{name}", getattr(cluster, name), 0)

    if cluster.port_range is not None:
        PortRange.parse(cluster.port_range)


def _check_memory(cluster: ClusterConfig) -> None:
    memory = {name: getattr(cluster, name) for name in ("mem_per_node_gb", "mem_per_cpu_gb", "mem_per_gpu_gb")}
    given = [f"cluster.{name}={value}" for name, value in memory.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other", hint="keep one and set the others to null")
    for name, value in memory.items():
        if value is not None:
            at_least(f"cluster.{name}", value, 0 if name == "mem_per_node_gb" else 1)
    if cluster.mem_per_gpu_gb is not None and not cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.mem_per_gpu_gb={cluster.mem_per_gpu_gb}, but cluster.gpus_per_node is 0",
            hint="use mem_per_node_gb",
        )


def _check_gpus(cluster: ClusterConfig) -> None:
    if cluster.gpu_memory_gb is not None:
        at_least("cluster.gpu_memory_gb", cluster.gpu_memory_gb, 1, why="null does not look whether it fits")
    for name, value in (("gpu_type", cluster.gpu_type), ("gpu_memory_gb", cluster.gpu_memory_gb)):
        if value and not cluster.gpus_per_node:
            raise ConfigError(
                f"cluster.{name}={value!r}, but cluster.gpus_per_node is 0",
                hint=f"set gpus_per_node, or cluster.{name}=null",
            )
    if cluster.gpus_per_node and cluster.tasks_per_node > cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.tasks_per_node={cluster.tasks_per_node} ranks would share cluster.gpus_per_node="
            f"{cluster.gpus_per_node} GPUs",
            hint=f"one rank drives one GPU: set cluster.tasks_per_node={cluster.gpus_per_node}",
        )


def _check_rates(cluster: ClusterConfig) -> None:
    for name in (
        "gpu_link_gb_per_s",
        "network_gb_per_s",
        "storage_gb_per_s",
        "failures_per_1000_node_days",
    ):
        value = getattr(cluster, name)
        if value is not None and not (0 < value < math.inf):
            raise ConfigError(f"cluster.{name}={value:g} is not a valid rate", hint="a number above 0")


def _check_local(cluster: ClusterConfig) -> None:
    if cluster.spare_nodes and cluster.backend == Backend.LOCAL:
        raise ConfigError(
            f"cluster.spare_nodes={cluster.spare_nodes}, but cluster.backend=local has only this machine",
            hint="cluster.spare_nodes=0",
        )
    if cluster.backend == Backend.LOCAL and cluster.nodes != 1:
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}, but cluster.backend=local has only this machine",
            hint="use cluster.tasks_per_node for more ranks, or a SLURM cluster: +cluster=sandbox tries it here",
        )


def _check_environment(cluster: ClusterConfig) -> None:
    if cluster.venv and cluster.conda_env:
        raise ConfigError(
            f"cluster.venv={cluster.venv!r} and cluster.conda_env={cluster.conda_env!r} exclude each other",
            hint="set one of them to null",
        )
    if bool(cluster.container.kind) != bool(cluster.container.image):
        raise ConfigError(
            f"cluster.container.kind={cluster.container.kind} with cluster.container.image={cluster.container.image}",
            hint="set both or neither",
        )
    if cluster.slurm_conf and cluster.sandbox:
        raise ConfigError(
            f"cluster.slurm_conf={cluster.slurm_conf!r} and cluster.sandbox={cluster.sandbox!r} exclude each other",
            hint="a sandbox has its own slurm.conf",
        )


def _check_time(cluster: ClusterConfig) -> None:
    latest = cluster.time_limit_min * 60 - SLURM_EARLY_S
    if cluster.backend == Backend.SLURM and cluster.signal_lead_s >= latest:
        raise ConfigError(
            f"cluster.signal_lead_s={cluster.signal_lead_s} with cluster.time_limit_min={cluster.time_limit_min}: SLURM may "
            f"warn {SLURM_EARLY_S} s early, so the warning could come before the first step",
            hint=f"set cluster.time_limit_min={(cluster.signal_lead_s + SLURM_EARLY_S) // 60 + 1} or more"
            + (f", or cluster.signal_lead_s below {latest}" if latest > 0 else ""),
        )


def check_placement(cluster: ClusterConfig) -> None:
    """Raise if the wanted switches or segments do not suit the number of nodes."""
    for name in ("switches", "switches_wait_min", "segment"):
        value = getattr(cluster, name)
        if value is not None:
            at_least(f"cluster.{name}", value, 1)
        if value is not None and name in cluster.sbatch:
            raise ConfigError(
                f"cluster.{name}={value} and cluster.sbatch.{name}={cluster.sbatch[name]} set the same option of sbatch",
                hint="leave one of them out",
            )
    if cluster.switches_wait_min is not None and cluster.switches is None:
        raise ConfigError(
            f"cluster.switches_wait_min={cluster.switches_wait_min} has nothing to wait for",
            hint="set cluster.switches, too",
        )
    nodes = cluster.node_range
    for count in (nodes.least + cluster.spare_nodes, nodes.most + cluster.spare_nodes):
        if cluster.segment is not None and count % cluster.segment:
            spare = f" and cluster.spare_nodes={cluster.spare_nodes}" if cluster.spare_nodes else ""
            raise ConfigError(
                f"cluster.segment={cluster.segment} does not divide the {count} nodes of cluster.nodes={cluster.nodes}{spare}",
                hint="SLURM allocates whole segments only",
            )
