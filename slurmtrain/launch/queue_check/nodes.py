"""What the nodes of a partition have: GPUs, CPUs, memory and features, on enough of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.launch.queue_check.finding import Finding
from slurmtrain.slurm.facts import ClusterFacts, NodeGroup, Partition

_FEATURE = re.compile(r"[A-Za-z0-9_.+-]+")  # a constraint that names one feature


def check_nodes(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    """Find what too few nodes of the partition have: how many there are, each thing by itself, then all of it together."""
    groups = facts.nodes_of(partition.name)
    if not groups:
        return []
    needed = cluster.node_range.least + cluster.spare_nodes
    cpus = cpus_on_node(cluster)
    memory_mb = memory_mb_of(cluster, cpus)
    # --mem is compared with what a node has in any case, and the others only where memory is given to jobs.
    compares_memory = cluster.mem_per_node_gb is not None or facts.gives_memory(partition)
    gpus = f"{cluster.gpu_type or 'gpu'}:{cluster.gpus_per_node}"
    of = f"partition {partition.name}"
    # Nodes in a cloud that are powered down are not listed.
    certain = not facts.dynamic and sum(group.count for group in groups) >= partition.nodes
    total = sum(group.count for group in groups)
    if total < needed:
        message = f"{of} has {total} node{'' if total == 1 else 's'}, and the job needs {needed}"
        return [Finding("cluster.nodes", message, "ask for fewer, or set another cluster.partition", fatal=certain)]
    feature = cluster.constraint if cluster.constraint and _FEATURE.fullmatch(cluster.constraint) else None
    types = sorted({name for group in groups for name, _ in group.gpus if name})
    rows: list[tuple[str, Callable[[NodeGroup], bool], str, str]] = [
        (
            "cluster.gpus_per_node",
            lambda group: group.gpus_of(cluster.gpu_type) >= cluster.gpus_per_node,
            f"{gpus} on a node ({_field('gpus_per_node', cluster)}{_type_field(cluster)})",
            _gpu_hint(groups, types),
        ),
        (
            "cluster.cpus_per_task",
            lambda group: shares_cpus(cluster) or min(group.cpus, partition.cpus_per_node or group.cpus) >= cpus,
            f"{cpus} CPUs on a node (cluster.tasks_per_node={cluster.tasks_per_node} x "
            f"cluster.cpus_per_task={cluster.cpus_per_task})",
            _most_hint("CPUs that jobs can have of a node", [_cpus_of(group, partition) for group in groups]),
        ),
        (
            "cluster.mem_per_node_gb",
            lambda group: not compares_memory or group.memory_mb >= memory_mb,
            f"{memory_mb / 1024:g} GB of memory on a node (cluster.mem_*)",
            _most_hint("GB of a node", [group.memory_mb // 1024 for group in groups]) + "; mem_per_node_gb=0 takes all",
        ),
        (
            "cluster.constraint",
            lambda group: feature is None or feature in group.features or bool(_changeable(facts)),
            f"the feature {feature!r} (cluster.constraint)",
            f"there are: {', '.join(sorted({name for group in groups for name in group.features})) or 'none'}",
        ),
    ]
    for field, suits, words, hint in rows:
        count = sum(group.count for group in groups if suits(group))
        if count < needed:
            return [Finding(field, _too_few(of, count, needed, words), hint, fatal=certain)]
    together = sum(group.count for group in groups if all(suits(group) for _, suits, _, _ in rows))
    if together < needed:
        asked = (cluster.gpus_per_node > 0, not shares_cpus(cluster), memory_mb > 0, feature is not None)
        words = ", ".join(words for (_, _, words, _), wanted in zip(rows, asked, strict=True) if wanted)
        hint = f"its nodes are: {'; '.join(_words(group) for group in groups[:6])}"
        return [Finding("cluster.nodes", _too_few(of, together, needed, words), hint, fatal=certain)]
    usable = sum(group.usable for group in groups if all(suits(group) for _, suits, _, _ in rows))
    if usable < needed:
        message = f"{usable} of the nodes of {of} that suit this job work now, and it needs {needed}: it may wait long"
        return [Finding("cluster.nodes", message, "`sinfo -R` says why the other nodes do not", fatal=False)]
    return []


def _too_few(of: str, count: int, needed: int, words: str) -> str:
    if count == 0:
        return f"no node of {of} has {words}"
    return f"only {count} nodes of {of} have {words}, and the job needs {needed}"


def _field(name: str, cluster: ClusterConfig) -> str:
    return f"cluster.{name}={getattr(cluster, name)}"


def _type_field(cluster: ClusterConfig) -> str:
    return f", cluster.gpu_type={cluster.gpu_type}" if cluster.gpu_type else ""


def _cpus_of(group: NodeGroup, partition: Partition) -> int:
    return min(group.cpus, partition.cpus_per_node or group.cpus)


def _gpu_hint(groups: Sequence[NodeGroup], types: Sequence[str]) -> str:
    if not any(group.gpus for group in groups):
        return "its nodes have no GPUs that SLURM knows; set another cluster.partition"
    there = sorted(
        {f"gpu:{name}:{number}" if name else f"gpu:{number}" for each in groups for name, number in each.gpus}
    )
    return f"its nodes have {', '.join(there)}" + (
        "" if types else "; SLURM has no types here, so leave cluster.gpu_type out"
    )


def _most_hint(what: str, amounts: Sequence[int]) -> str:
    return f"the most {what} there: {max(amounts, default=0)}"


def _words(group: NodeGroup) -> str:
    gpus = "".join(f", gpu:{name}:{number}" if name else f", gpu:{number}" for name, number in group.gpus)
    return f"{group.count} x {group.cpus} CPUs, {group.memory_mb // 1024} GB{gpus}"


def _changeable(facts: ClusterFacts) -> bool:
    """Whether nodes can be rebooted into other features."""
    return facts.config.get("NodeFeaturesPlugins", "(null)") not in ("", "(null)")


def shares_cpus(cluster: ClusterConfig) -> bool:
    """Return whether ranks are told to share CPUs (--overcommit)."""
    return bool(cluster.sbatch.get("overcommit"))


def cpus_on_node(cluster: ClusterConfig) -> int:
    """Return the CPUs that a job asks for on each node: those of one rank where they share them (sbatch(1), --overcommit)."""
    return cluster.cpus_per_task * (1 if shares_cpus(cluster) else cluster.tasks_per_node)


def memory_mb_of(cluster: ClusterConfig, cpus: int) -> int:
    """Return the memory that a job asks for on each node, in MB; 0: none, or all that there is."""
    if cluster.mem_per_node_gb is not None:
        return cluster.mem_per_node_gb * 1024
    if cluster.mem_per_cpu_gb is not None:
        return cluster.mem_per_cpu_gb * 1024 * cpus
    return (cluster.mem_per_gpu_gb or 0) * 1024 * cluster.gpus_per_node
