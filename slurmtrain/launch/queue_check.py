"""What SLURM would queue without a word and never start: pure functions.

`sbatch --test-only` refuses most of what cannot run before anything is queued (`submit_once.check`). It lets pass a job above
a limit of its partition, unless the cluster enforces these at submission (EnforcePartLimits). A fact that is not known
refuses no job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from slurmtrain.config.fields import raise_all
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import ConfigError, nearest
from slurmtrain.launch.script import OF_THE_SHELL
from slurmtrain.slurm.facts import ClusterFacts, NodeGroup, Partition, association_of, qos_of, wall_limit

# What cannot work, or may not, and whether it is fatal: SLURM would refuse the job, or never start it.
Finding = tuple[ConfigError, bool]


def raise_fatal(findings: Sequence[Finding]) -> list[str]:
    """Raise one error for the findings that are fatal, and return the others as warnings."""
    raise_all([error for error, fatal in findings if fatal])
    return [f"{error.message}; {error.hint}" for error, _ in findings]


def check_request(facts: ClusterFacts, cluster: ClusterConfig) -> list[Finding]:
    """Return what a job asks for that its partition does not have, or above the limits of its QOS or account."""
    if cluster.partition is None and cluster.reservation is not None:
        return []  # the job gets the partition of the reservation
    names = cluster.partition.split(",") if cluster.partition else [None]
    known = [each.name for each in facts.partitions]
    strange = [name for name in names if name is not None and known and name not in known]
    # Of several partitions SLURM takes one in which the job can run.
    each_has = [_check_partition(facts, its, cluster) for name in names if (its := facts.partition(name)) is not None]
    found = min(each_has, key=lambda its: sum(fatal for _, fatal in its), default=[])
    if strange:
        message = f"cluster.partition={strange[0]}: this cluster has no such partition"
        found = [(ConfigError(message, hint=nearest(strange[0], known)), True)]
    # A plugin may change what a job asks for, and another cluster of a federation may run it: `sbatch --test-only` decides.
    plugins = [facts.config.get(name, "") for name in ("JobSubmitPlugins", "CliFilterPlugins")]
    sure = facts.is_alone and all(each in ("", "none", "(null)") for each in plugins)
    return [(error, fatal and sure) for error, fatal in found]


def _check_partition(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    found, name = list[Finding](), f"partition {partition.name}"
    own = qos_of(facts, association_of(facts, cluster.account, partition.name), cluster.qos)
    its = facts.qos_named(partition.qos) if partition.qos else None
    flags = frozenset[str]().union(*(each.flags for each in (own, its) if each is not None))

    def may_lift(flag: str) -> bool:
        """Return whether a QOS may lift a limit: its flag does, or it is not known which QOS the job gets."""
        return flag in flags or (facts.keeps_accounts and own is None)

    if partition.state == "DOWN":  # the other states refuse jobs
        message = f"{name} starts no jobs at present (State=DOWN)"
        found.append((ConfigError(message, hint="`sinfo` shows those that do"), False))

    limits = [(partition.max_time_min, f"{name} (MaxTime)", may_lift("partitiontimelimit"))]
    if (wall := wall_limit(facts, partition, cluster.account, cluster.qos)) is not None:
        limits.append((wall.most, wall.of, may_lift("usagefactorsafe")))
    asked = cluster.time_limit_min
    for most, of, lifted in limits:
        if most is not None and asked > most:
            message = f"cluster.time_limit_min={asked} is more than {of} allows, {most}"
            hint = f"set at most cluster.time_limit_min={most}; a run continues automatically after each job"
            found.append((ConfigError(message, hint=hint), not (lifted or "time-min" in cluster.sbatch)))

    least_nodes, most_nodes = (
        each + cluster.spare_nodes for each in (cluster.node_range.least, cluster.node_range.most)
    )
    if partition.max_nodes is not None and least_nodes > partition.max_nodes:
        message = f"a job of {least_nodes} nodes is more than {name} allows, {partition.max_nodes} (MaxNodes)"
        hint = f"set at most cluster.nodes={max(1, partition.max_nodes - cluster.spare_nodes)}"
        found.append((ConfigError(message, hint=hint), not may_lift("partitionmaxnodes")))
    if most_nodes < partition.min_nodes:
        job = f"a job of {most_nodes} node{'s' * (most_nodes != 1)}"
        message = f"{job} is less than {name} requires, {partition.min_nodes} (MinNodes)"
        hint = f"set at least cluster.nodes={partition.min_nodes}"
        found.append((ConfigError(message, hint=hint), not may_lift("partitionminnodes")))

    if (
        partition.memory_mb is not None
        and (memory_mb := _memory_of_a_node(facts, partition, cluster)) > partition.memory_mb
    ):
        of_a_node = "all memory of a node, " * (cluster.mem_per_node_gb == 0)
        message = (
            f"the job asks for {of_a_node}{memory_mb} MB, and {name} gives it {partition.memory_mb} (MaxMemPerNode)"
        )
        hint = f"set at most cluster.mem_per_node_gb={partition.memory_mb // 1024}"
        found.append((ConfigError(message, hint=hint), True))
    return found


def _memory_of_a_node(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> int:
    """Return the megabytes that a job asks for on each node; 0 if the config does not say."""
    if cluster.mem_per_node_gb == 0:
        return min((group.memory_mb for group in facts.nodes_of(partition.name)), default=0)
    if cluster.mem_per_cpu_gb is not None:
        ranks = 1 if cluster.sbatch.get("overcommit") else cluster.tasks_per_node
        return 1024 * cluster.mem_per_cpu_gb * cluster.cpus_per_task * ranks
    return 1024 * (cluster.mem_per_node_gb or 0)


def with_choices_of_the_shell(cluster: ClusterConfig, variables: Mapping[str, str]) -> ClusterConfig:
    """Return the config with what it leaves open and sbatch takes from the variables of the person's shell instead."""
    its: dict[str, Any] = {name: getattr(cluster, name) for name in OF_THE_SHELL if hasattr(cluster, name)}
    for name, value in its.items():
        its[name] = value or variables.get(f"SBATCH_{name.upper()}") or None
    return replace(cluster, **its)


def hint_of_facts(said: str, facts: ClusterFacts, cluster: ClusterConfig) -> str | None:
    """Return what the cluster has instead of what SLURM has just refused; None where its words or the facts do not tell."""
    low = said.lower()
    partition = facts.partition(cluster.partition.partition(",")[0] if cluster.partition else None)
    if "account" in low and facts.associations:
        return f"your accounts are: {', '.join(dict.fromkeys(each.account for each in facts.associations))}"
    if "qos" in low and facts.qos and cluster.qos:
        return nearest(cluster.qos, [each.name for each in facts.qos])
    if any(each in low for each in ("node configuration", "processors", "memory spec")) and partition is not None:
        nodes = [_words(group) for group in facts.nodes_of(partition.name)[:6]]
        return f"the nodes of partition {partition.name} are: {'; '.join(nodes)}" if nodes else None
    return None


def _words(group: NodeGroup) -> str:
    gpus = "".join(f", gpu:{name}:{number}" if name else f", gpu:{number}" for name, number in group.gpus)
    return f"{group.count} x {group.cpus} CPUs, {group.memory_mb // 1024} GB{gpus}"
