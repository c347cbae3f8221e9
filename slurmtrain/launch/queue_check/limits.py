"""What a job may ask for at most: limits of the partition, and those of QOS and accounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.launch.queue_check.finding import Finding
from slurmtrain.launch.queue_check.nodes import cpus_on_node, memory_mb_of, shares_cpus
from slurmtrain.slurm.facts import ClusterFacts, Partition
from slurmtrain.slurm.job_limits import (
    Bound,
    association_of,
    bounds_of,
    flags_of,
    job_limit,
    least,
    node_limit,
    qos_of,
    wall_limit,
)


def check_time(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    """Find a time limit above that of the partition."""
    asked, most = cluster.time_limit_min, partition.max_time_min
    if most is None or asked <= most:
        return []
    return [
        Finding(
            "cluster.time_limit_min",
            f"cluster.time_limit_min={asked} is more than partition {partition.name} allows, {most} (MaxTime)",
            f"set at most cluster.time_limit_min={most}; a run continues automatically after each job",
            fatal=not (_may_lift(facts, partition, cluster, "partitiontimelimit") or "time-min" in cluster.sbatch),
        )
    ]


def check_node_count(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    """Find more or fewer nodes than a job of the partition may have."""
    needed = cluster.node_range.least + cluster.spare_nodes
    most = cluster.node_range.most + cluster.spare_nodes
    found = []
    if partition.max_nodes is not None and needed > partition.max_nodes:
        found.append(
            Finding(
                "cluster.nodes",
                f"a job of {needed} nodes is more than partition {partition.name} allows, {partition.max_nodes} (MaxNodes)",
                f"set at most cluster.nodes={max(1, partition.max_nodes - cluster.spare_nodes)}",
                fatal=not _may_lift(facts, partition, cluster, "partitionmaxnodes"),
            )
        )
    if most < partition.min_nodes:
        found.append(
            Finding(
                "cluster.nodes",
                f"a job of {most} node{'s' * (most != 1)} is less than partition {partition.name} requires, "
                f"{partition.min_nodes} (MinNodes)",
                f"set at least cluster.nodes={partition.min_nodes}",
                fatal=not _may_lift(facts, partition, cluster, "partitionminnodes"),
            )
        )
    return found


def check_partition_memory(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    """Find more memory than the partition gives of a node. sbatch takes such a job, which then waits for MaxMemPerLimit."""
    most = partition.memory_mb
    if most is None:
        return []
    asked = memory_mb_of(cluster, cpus_on_node(cluster))
    if cluster.mem_per_node_gb == 0:
        asked = min((group.memory_mb for group in facts.nodes_of(partition.name)), default=0)
    if asked <= most:
        return []
    words = f"all memory of a node, {asked} MB," if cluster.mem_per_node_gb == 0 else f"{asked} MB of memory on a node"
    return [
        Finding(
            "cluster.mem_per_node_gb",
            f"the job asks for {words} and partition {partition.name} gives it {most} (MaxMemPerNode)",
            f"set at most cluster.mem_per_node_gb={most // 1024}",
            fatal=cluster.mem_per_gpu_gb is None,  # which SLURM does not compare with it
        )
    ]


def _may_lift(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig, flag: str) -> bool:
    """Return whether a QOS may lift a limit of the partition: its flag does, or it is not known which QOS the job gets."""
    own = qos_of(facts, association_of(facts, cluster.account, partition.name), cluster.qos)
    if facts.keeps_accounts and own is None:
        return True
    its = facts.qos_named(partition.qos) if partition.qos else None
    return any(flag in each.flags for each in (own, its) if each is not None)


def check_limits(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    """Find limits of accounts and QOS that the job exceeds by itself.

    Without the flag DenyOnLimit SLURM takes such a job and compares what it would get when it is to start. That is never less
    than it asks for, so a job above a limit waits for ever; but it may be more, which can be enough where it asks for too
    little, and its time limit may be shortened by then.
    """
    bounds = bounds_of(facts, partition, cluster.account, cluster.qos)
    if not bounds:
        return []
    flags = flags_of(facts, partition, cluster.account, cluster.qos)
    denies = "denyonlimit" in flags
    nodes = cluster.node_range.least + cluster.spare_nodes
    cpus = cpus_on_node(cluster)
    found = []
    wall = wall_limit(bounds)
    if wall is not None and cluster.time_limit_min > wall.most:
        found.append(
            Finding(
                "cluster.time_limit_min",
                f"cluster.time_limit_min={cluster.time_limit_min} is more than {wall.of} gives a job, {wall.most}",
                f"set at most cluster.time_limit_min={wall.most}; a run continues automatically after each job",
                fatal=denies or not ("time-min" in cluster.sbatch or "usagefactorsafe" in flags),
            )
        )
    amounts = {
        "gres/gpu": (cluster.gpus_per_node, "GPUs", "cluster.gpus_per_node"),
        "cpu": (cpus, "CPUs", "cluster.cpus_per_task"),
        "mem": (memory_mb_of(cluster, cpus), "MB of memory", "cluster.mem_per_node_gb"),
        "node": (1, "nodes", "cluster.nodes"),
    }
    if cluster.gpu_type:
        amounts[f"gres/gpu:{cluster.gpu_type.lower()}"] = (
            cluster.gpus_per_node,
            f"GPUs of type {cluster.gpu_type}",
            "cluster.gpus_per_node",
        )
    for name, (each, words, field) in amounts.items():
        its = _check_amount(bounds, name, each, nodes, words, field, denies=denies)
        # What a job asks for of memory that is everybody's, and of CPUs that ranks share, is not what SLURM counts.
        certain = name != "mem" or denies or facts.gives_memory(partition)
        certain = certain and not (name in ("cpu", "mem") and shares_cpus(cluster))
        found += its if certain else [replace(one, fatal=False) for one in its]
    return found


def _check_amount(
    bounds: Sequence[Bound], name: str, each: int, nodes: int, words: str, field: str, *, denies: bool
) -> list[Finding]:
    found = []
    total = each * nodes
    whole, of_node, at_least = job_limit(bounds, name), node_limit(bounds, name), least(bounds, name)
    if whole is not None and total > whole.most:
        fits = whole.most // each if each else 0
        hint = f"set at most cluster.nodes={fits}" if fits else f"set at most {field}={max(whole.most, 0)}"
        message = f"the job asks for {total} {words}, and {whole.of} gives a job {whole.most}"
        found.append(Finding(field if not fits else "cluster.nodes", message, hint))
    elif of_node is not None and name != "node" and each > of_node.most:
        message = f"the job asks for {each} {words} on each node, and {of_node.of} gives it {of_node.most}"
        found.append(Finding(field, message, f"write a smaller {field}"))
    # A job that names no amount of memory gets the partition's default, or all of a node's.
    if at_least is not None and total < at_least.most and (total or name != "mem"):
        message = f"the job asks for {total} {words}, and {at_least.of} wants at least {at_least.most}"
        found.append(Finding(field, message, f"write a larger {field}, or set another cluster.qos", fatal=denies))
    return found
