"""What a job may ask for at most: limits of the partition, and those of QOS and accounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.launch.queue_check.finding import Finding
from slurmtrain.launch.queue_check.nodes import cpus_on_node, memory_mb_of, shares_cpus
from slurmtrain.slurm.facts import ClusterFacts, Partition
from slurmtrain.slurm.job_limits import (
    Bound,
    association_of,
    bounds_of,
    closed,
    flags_of,
    job_limit,
    least,
    minutes_limit,
    node_limit,
    qos_of,
    wall_limit,
)
from slurmtrain.slurm.parse_facts import parse_count


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
    found = [
        Finding(
            "cluster.qos",
            f"{of} lets no job through: it allows 0 {what}",
            "set another cluster.qos or cluster.account",
        )
        for what, of in closed(bounds)[:1]
    ]
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
    gpus = Amount(cluster.gpus_per_node, "GPUs", "cluster.gpus_per_node")
    amounts = {
        "gres/gpu": gpus,
        "cpu": Amount(cpus, "CPUs", "cluster.cpus_per_task", unit=cluster.tasks_per_node),
        "mem": Amount(_memory_mb(facts, partition, cluster), "MB of memory", "cluster.mem_per_node_gb", unit=1024),
        "node": Amount(1, "nodes", "cluster.nodes"),
    }
    if cluster.gpu_type:
        amounts[f"gres/gpu:{cluster.gpu_type.lower()}"] = replace(gpus, words=f"GPUs of type {cluster.gpu_type}")
    for name, amount in amounts.items():
        its = _check_amount(bounds, name, amount, nodes, denies=denies)
        its += _check_minutes(bounds, name, amount, nodes, cluster, flags)
        # What a job asks for of memory that is everybody's, and of CPUs that ranks share, is not what SLURM counts.
        certain = name != "mem" or denies or facts.gives_memory(partition)
        certain = certain and not (name in ("cpu", "mem") and shares_cpus(cluster))
        found += its if certain else [replace(one, fatal=False) for one in its]
    return found


@dataclass(frozen=True)
class Amount:
    """What a job asks for of a resource on each node.

    Attributes:
        each: the amount.
        words: the resource, in words.
        field: the field of the config that says how much.
        unit: the amount that 1 in that field stands for.
    """

    each: int
    words: str
    field: str
    unit: int = 1

    def at_most(self, most: int) -> str:
        """Return what to write for no more than that amount on a node."""
        fits = most // self.unit
        return f"set at most {self.field}={fits}" if fits > 0 else f"set a smaller {self.field}"


def _memory_mb(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> int:
    """Return the memory of the job on each node, in MB: what it asks for, or the default; 0: not known."""
    cpus = cpus_on_node(cluster)
    asked = memory_mb_of(cluster, cpus)
    if asked or cluster.mem_per_node_gb == 0 or shares_cpus(cluster):
        return asked
    of_node, of_cpu = partition.default_memory_mb, partition.default_memory_per_cpu_mb
    if of_node is None and of_cpu is None and "PerGPU" not in facts.config.get("JobDefaults", ""):
        of_node, of_cpu = (parse_count(facts.config.get(name, "")) for name in ("DefMemPerNode", "DefMemPerCPU"))
    return of_node if of_node is not None else (of_cpu or 0) * cpus


def _check_minutes(
    bounds: Sequence[Bound], name: str, amount: Amount, nodes: int, cluster: ClusterConfig, flags: frozenset[str]
) -> list[Finding]:
    minutes = cluster.time_limit_min
    limit, total = minutes_limit(bounds, name), amount.each * nodes
    if limit is None or name == "mem" or total * minutes <= limit.most:
        return []
    fits = limit.most // total
    most = f"set at most cluster.time_limit_min={fits}; a run continues automatically after each job"
    return [
        Finding(
            "cluster.time_limit_min",
            f"the job asks for {total} {amount.words} for {minutes} min, and {limit.of} gives a job {limit.most} of them x "
            "minutes",
            most if fits else "ask for less, or set another cluster.qos",
            # With UsageFactorSafe SLURM multiplies the time limit by the factor of the QOS, which is not known here.
            fatal="time-min" not in cluster.sbatch and "usagefactorsafe" not in flags,
        )
    ]


def _check_amount(bounds: Sequence[Bound], name: str, amount: Amount, nodes: int, *, denies: bool) -> list[Finding]:
    found = []
    each, words, field = amount.each, amount.words, amount.field
    total = each * nodes
    whole, of_node, at_least = job_limit(bounds, name), node_limit(bounds, name), least(bounds, name)
    if whole is not None and total > whole.most:
        fits = whole.most // each if each else 0
        hint = f"set at most cluster.nodes={fits}" if fits else amount.at_most(whole.most)
        message = f"the job asks for {total} {words}, and {whole.of} gives a job {whole.most}"
        found.append(Finding(field if not fits else "cluster.nodes", message, hint))
    elif of_node is not None and name != "node" and each > of_node.most:
        message = f"the job asks for {each} {words} on each node, and {of_node.of} gives it {of_node.most}"
        found.append(Finding(field, message, amount.at_most(of_node.most)))
    # A job that names no amount of memory may get all of a node's.
    if at_least is not None and total < at_least.most and (total or name != "mem"):
        message = f"the job asks for {total} {words}, and {at_least.of} wants at least {at_least.most}"
        found.append(Finding(field, message, f"set a larger {field}, or set another cluster.qos", fatal=denies))
    return found
