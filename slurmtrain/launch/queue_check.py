"""Compare what a job asks for with the facts of the cluster, before it is queued, and say what to change: a pure function.

SLURM refuses some of it in a word or two, and lets other jobs wait for ever (PartitionTimeLimit, QOSMaxGRESPerJob). What is
certain is fatal; what only may be so is a warning: a fact that is not known refuses no job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from slurmtrain.choices import ContainerKind
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import ConfigError, nearest
from slurmtrain.slurm.facts import Association, ClusterFacts, NodeGroup, Partition, Qos
from slurmtrain.slurm.job_limits import (
    Bound,
    association_of,
    bounds_of,
    job_limit,
    least,
    node_limit,
    qos_of,
    wall_limit,
)
from slurmtrain.slurm.topology import kind_of_topology
from slurmtrain.slurm.versions import SEGMENTS

_FEATURE = re.compile(r"[A-Za-z0-9_.+-]+")  # a constraint that names one feature


@dataclass(frozen=True)
class Finding:
    """Something in a request that does not suit the cluster.

    Attributes:
        field: of the config: "cluster.time_limit_min".
        message: one sentence with the value and what the cluster has.
        hint: what to write instead.
        fatal: SLURM would refuse the job, or never start it.
    """

    field: str
    message: str
    hint: str = ""
    fatal: bool = True


def raise_fatal(findings: Sequence[Finding]) -> list[str]:
    """Raise for the first finding that is fatal, and return the others as warnings.

    Raises:
        ConfigError: with all that is fatal in its hint.
    """
    fatal = [each for each in findings if each.fatal]
    if fatal:
        first, others = fatal[0], fatal[1:]
        further = "".join(f"; besides, {each.message}" + (f" ({each.hint})" if each.hint else "") for each in others)
        raise ConfigError(first.message + further, hint=first.hint or None)
    return [f"{each.message}; {each.hint}" if each.hint else each.message for each in findings]


def check_request(
    facts: ClusterFacts, cluster: ClusterConfig, *, groups: Collection[str] | None = None, user_id: int | None = None
) -> list[Finding]:
    """Return what does not suit the cluster in a request, the most certain first; [] where nothing is known of it.

    Args:
        groups: names of the groups that this user belongs to; None: not known.
        user_id: this user's number; None: not known.
    """
    if not facts.partitions:
        return []
    names = cluster.partition.split(",") if cluster.partition else [None]
    partitions = [(name, facts.partition(name)) for name in names]
    missing = [name for name, found in partitions if found is None]
    if missing:
        return _judged_by_plugins(facts, [_no_partition(facts, missing[0])])
    account = _check_account(facts, cluster)
    each_has = [
        [
            *_check_access(facts, partition, cluster, groups, user_id),
            *_check_time(facts, partition, cluster),
            *_check_nodes(facts, partition, cluster),
            *_check_limits(facts, partition, cluster),
        ]
        for _, partition in partitions
        if partition is not None
    ]
    # Of several partitions SLURM takes one in which the job can run.
    best = min(each_has, key=lambda found: sum(each.fatal for each in found))
    found = [*account, *best, *_check_container(facts, cluster), *_check_placement(facts, cluster)]
    return sorted(_judged_by_plugins(facts, found), key=lambda each: not each.fatal)


def with_choices_of_the_shell(cluster: ClusterConfig, variables: Mapping[str, str]) -> ClusterConfig:
    """Return the config with what it leaves open and sbatch takes from the variables of the person's shell instead."""
    return replace(
        cluster,
        partition=cluster.partition or variables.get("SBATCH_PARTITION") or None,
        account=cluster.account or variables.get("SBATCH_ACCOUNT") or None,
        qos=cluster.qos or variables.get("SBATCH_QOS") or None,
        reservation=cluster.reservation or variables.get("SBATCH_RESERVATION") or None,
    )


def _judged_by_plugins(facts: ClusterFacts, found: Sequence[Finding]) -> list[Finding]:
    """Return the findings as warnings where a plugin of the cluster may change what a job asks for: its partition, its QOS, ...

    `sbatch --test-only`, which asks the plugin, has the last word then.
    """
    plugins = [facts.config.get(name, "") for name in ("JobSubmitPlugins", "CliFilterPlugins")]
    if all(each in ("", "none", "(null)") for each in plugins):
        return list(found)
    return [replace(each, fatal=False) for each in found]


def _no_partition(facts: ClusterFacts, name: str | None) -> Finding:
    known = [each.name for each in facts.partitions]
    if name is None:
        return Finding(
            "cluster.partition",
            "cluster.partition is not set, and this cluster has no default partition",
            f"there are: {', '.join(known)}",
        )
    return Finding(
        "cluster.partition", f"cluster.partition={name}: this cluster has no such partition", nearest(name, known)
    )


def _check_account(facts: ClusterFacts, cluster: ClusterConfig) -> list[Finding]:
    if facts.associations is None or not facts.enforces("associations"):
        return []
    mine = list(dict.fromkeys(each.account for each in facts.associations))
    if not mine:
        return [
            Finding(
                "cluster.account",
                f"accounting knows no account of yours on cluster {facts.name}, and refuses jobs without one",
                "ask who runs the cluster; `sacctmgr show associations user=$USER` shows yours",
            )
        ]
    if cluster.account is not None and cluster.account.lower() not in {each.lower() for each in mine}:
        return [
            Finding(
                "cluster.account",
                f"cluster.account={cluster.account} is none of your accounts on cluster {facts.name}",
                f"yours are: {', '.join(mine)}",
            )
        ]
    return []


def _check_access(
    facts: ClusterFacts,
    partition: Partition,
    cluster: ClusterConfig,
    groups: Collection[str] | None,
    user_id: int | None,
) -> list[Finding]:
    of = f"partition {partition.name}"
    found = []
    if partition.state != "UP":
        found.append(
            Finding(
                "cluster.partition",
                f"{of} starts no jobs at present (State={partition.state})",
                "`sinfo` shows those that do",
                fatal=partition.state == "INACTIVE",  # which refuses jobs; the others let them wait
            )
        )
    if partition.root_only and user_id != 0:
        found.append(Finding("cluster.partition", f"{of} takes jobs of root alone (RootOnly)"))
    outside = (
        groups is not None and partition.allowed_groups is not None and not {*groups} & {*partition.allowed_groups}
    )
    if outside and user_id != 0:
        found.append(
            Finding(
                "cluster.partition",
                f"{of} is for the groups {', '.join(partition.allowed_groups or ())} (AllowGroups), and you seem to be in none",
                fatal=False,  # the controller looks groups up by itself, on another machine
            )
        )
    if partition.needs_reservation and cluster.reservation is None:
        found.append(
            Finding(
                "cluster.reservation", f"{of} takes jobs of a reservation alone (ReqResv)", "set cluster.reservation"
            )
        )
    return [*found, *_check_account_and_qos(facts, partition, cluster)]


def _check_account_and_qos(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    found = []
    if not facts.enforces("associations"):
        return []
    association = association_of(facts, cluster.account, partition.name)
    if association is None and cluster.account is not None and facts.associations:
        others = [each for each in facts.associations if each.account.lower() == cluster.account.lower()]
        if others:  # else the account is none of the user's at all, which is said elsewhere
            where = ", ".join(each.partition for each in others)
            found.append(
                Finding(
                    "cluster.account",
                    f"your account {cluster.account} may not run in partition {partition.name}, only in {where}",
                    "set another cluster.account or cluster.partition",
                )
            )
    account = association.account if association is not None else None
    if account is not None and not _allowed(account, partition.allowed_accounts, partition.denied_accounts):
        mine = {each.account for each in facts.associations or ()}
        usable = [
            each for each in sorted(mine) if _allowed(each, partition.allowed_accounts, partition.denied_accounts)
        ]
        found.append(
            Finding(
                "cluster.account",
                f"partition {partition.name} does not take account {account} (AllowAccounts, DenyAccounts)",
                f"it takes: {', '.join(usable)}" if usable else "it takes none of yours; set another cluster.partition",
                fatal=False,  # newer releases mean the accounts below one, too, and whose parent it is is not known here
            )
        )
    return [*found, *_check_qos(facts, partition, association, cluster.qos)]


def _allowed(name: str, allowed: Collection[str] | None, denied: Collection[str]) -> bool:
    low = name.lower()
    if allowed is not None:  # with AllowAccounts, DenyAccounts is not looked at (slurm.conf(5))
        return low in {each.lower() for each in allowed}
    return low not in {each.lower() for each in denied}


def _check_qos(
    facts: ClusterFacts, partition: Partition, association: Association | None, wanted: str | None
) -> list[Finding]:
    if facts.qos is None:
        return []
    if wanted is not None and facts.qos_named(wanted) is None:
        known = [each.name for each in facts.qos]
        return [Finding("cluster.qos", f"cluster.qos={wanted}: this cluster has no such QOS", nearest(wanted, known))]
    if not facts.enforces("qos") or association is None:
        return []
    mine = {each.lower() for each in association.qos}
    if wanted is not None and mine and wanted.lower() not in mine:
        return [
            Finding(
                "cluster.qos",
                f"cluster.qos={wanted}: your account {association.account} may not use it",
                f"it may use: {', '.join(association.qos)}",
            )
        ]
    its = qos_of(facts, association, wanted)
    if its is not None and not _allowed(its.name, partition.allowed_qos, partition.denied_qos):
        usable = [each for each in association.qos if _allowed(each, partition.allowed_qos, partition.denied_qos)]
        said = f"cluster.qos={wanted}" if wanted else f"your default QOS {its.name}"
        return [
            Finding(
                "cluster.qos",
                f"{said}: partition {partition.name} does not take it (AllowQos, DenyQos)",
                f"set cluster.qos to one of: {', '.join(usable)}" if usable else "set another cluster.partition",
            )
        ]
    return []


def _job_qos(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> Qos | None:
    return qos_of(facts, association_of(facts, cluster.account, partition.name), cluster.qos)


def _lifts(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig, flag: str) -> bool:
    """Return whether a QOS may lift a limit of the partition: its flag does, or it is not known which QOS the job gets."""
    if facts.keeps_accounts and (facts.qos is None or facts.associations is None):
        return True
    its = [_job_qos(facts, partition, cluster), facts.qos_named(partition.qos) if partition.qos else None]
    return any(flag in each.flags for each in its if each is not None)


def _check_time(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    asked, most = cluster.time_limit_min, partition.max_time_min
    if most is None or asked <= most:
        return []
    return [
        Finding(
            "cluster.time_limit_min",
            f"cluster.time_limit_min={asked} is more than partition {partition.name} gives, {most} (MaxTime)",
            f"write at most cluster.time_limit_min={most}; a run goes on after each job by itself",
            fatal=not (_lifts(facts, partition, cluster, "partitiontimelimit") or "time-min" in cluster.sbatch),
        )
    ]


def _check_nodes(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    needed = cluster.node_range.least + cluster.spare_nodes
    most = cluster.node_range.most + cluster.spare_nodes
    found = []
    if partition.max_nodes is not None and needed > partition.max_nodes:
        found.append(
            Finding(
                "cluster.nodes",
                f"a job of {needed} nodes is more than partition {partition.name} gives, {partition.max_nodes} (MaxNodes)",
                f"write at most cluster.nodes={max(1, partition.max_nodes - cluster.spare_nodes)}",
                fatal=not _lifts(facts, partition, cluster, "partitionmaxnodes"),
            )
        )
    found += _check_partition_memory(partition, cluster, facts.nodes_of(partition.name))
    if most < partition.min_nodes:
        found.append(
            Finding(
                "cluster.nodes",
                f"a job of {most} nodes is less than partition {partition.name} asks for, {partition.min_nodes} (MinNodes)",
                f"write at least cluster.nodes={partition.min_nodes}",
                fatal=not _lifts(facts, partition, cluster, "partitionminnodes"),
            )
        )
    groups = facts.nodes_of(partition.name)
    if not groups:
        return found
    return [*found, *_check_resources(facts, partition, cluster, groups, needed)]


def _check_partition_memory(partition: Partition, cluster: ClusterConfig, groups: Sequence[NodeGroup]) -> list[Finding]:
    """Find more memory than the partition gives of a node. sbatch takes such a job, which then waits for MaxMemPerLimit."""
    most = partition.memory_mb
    if most is None:
        return []
    asked = _memory_mb(cluster, cluster.tasks_per_node * cluster.cpus_per_task)
    if cluster.mem_per_node_gb == 0:
        asked = min((group.memory_mb for group in groups), default=0)
    if asked <= most:
        return []
    words = f"all memory of a node, {asked} MB," if cluster.mem_per_node_gb == 0 else f"{asked} MB of memory on a node"
    return [
        Finding(
            "cluster.mem_per_node_gb",
            f"the job asks for {words} and partition {partition.name} gives it {most} (MaxMemPerNode)",
            f"write at most cluster.mem_per_node_gb={most // 1024}",
        )
    ]


def _check_resources(
    facts: ClusterFacts, partition: Partition, cluster: ClusterConfig, groups: Sequence[NodeGroup], needed: int
) -> list[Finding]:
    """Find what too few nodes of the partition have: each thing by itself, then all of it together."""
    cpus = cluster.tasks_per_node * cluster.cpus_per_task
    memory_mb = _memory_mb(cluster, cpus)
    gpus = f"{cluster.gpu_type or 'gpu'}:{cluster.gpus_per_node}"
    of = f"partition {partition.name}"
    # Nodes in a cloud that are powered down are not listed.
    certain = not facts.dynamic and sum(group.count for group in groups) >= partition.nodes
    shares_cpus = bool(cluster.sbatch.get("overcommit"))
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
            lambda group: shares_cpus or min(group.cpus, partition.cpus_per_node or group.cpus) >= cpus,
            f"{cpus} CPUs on a node (cluster.tasks_per_node={cluster.tasks_per_node} x "
            f"cluster.cpus_per_task={cluster.cpus_per_task})",
            _most_hint("CPUs that jobs can have of a node", [_cpus_of(group, partition) for group in groups]),
        ),
        (
            "cluster.mem_per_node_gb",
            lambda group: group.memory_mb >= memory_mb,
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
        asked = (cluster.gpus_per_node > 0, True, memory_mb > 0, feature is not None)
        words = ", ".join(words for (_, _, words, _), wanted in zip(rows, asked, strict=True) if wanted)
        hint = f"its nodes are: {'; '.join(_words(group) for group in groups[:6])}"
        return [Finding("cluster.nodes", _too_few(of, together, needed, words), hint, fatal=certain)]
    total = sum(group.count for group in groups)
    usable = sum(group.usable for group in groups if all(suits(group) for _, suits, _, _ in rows))
    if usable < needed <= total:
        message = f"{usable} of the nodes of {of} that suit this job work now, and it needs {needed}: it may wait long"
        return [Finding("cluster.nodes", message, "`sinfo -R` says why the others do not", fatal=False)]
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


def _memory_mb(cluster: ClusterConfig, cpus: int) -> int:
    """Return the memory that a job asks for on each node, in MB; 0: none, or all that there is."""
    if cluster.mem_per_node_gb is not None:
        return cluster.mem_per_node_gb * 1024
    if cluster.mem_per_cpu_gb is not None:
        return cluster.mem_per_cpu_gb * 1024 * cpus
    return (cluster.mem_per_gpu_gb or 0) * 1024 * cluster.gpus_per_node


def _check_limits(facts: ClusterFacts, partition: Partition, cluster: ClusterConfig) -> list[Finding]:
    """Find limits of accounts and QOS that the job exceeds by itself."""
    bounds = bounds_of(facts, partition, cluster.account, cluster.qos)
    if not bounds:
        return []
    nodes = cluster.node_range.least + cluster.spare_nodes
    cpus = cluster.tasks_per_node * cluster.cpus_per_task
    found = []
    wall = wall_limit(bounds)
    if wall is not None and cluster.time_limit_min > wall.most:
        found.append(
            Finding(
                "cluster.time_limit_min",
                f"cluster.time_limit_min={cluster.time_limit_min} is more than {wall.of} gives a job, {wall.most}",
                f"write at most cluster.time_limit_min={wall.most}; a run goes on after each job by itself",
            )
        )
    amounts = {
        "gres/gpu": (cluster.gpus_per_node, "GPUs", "cluster.gpus_per_node"),
        "cpu": (cpus, "CPUs", "cluster.cpus_per_task"),
        "mem": (_memory_mb(cluster, cpus), "MB of memory", "cluster.mem_per_node_gb"),
        "node": (1, "nodes", "cluster.nodes"),
    }
    if cluster.gpu_type:
        amounts[f"gres/gpu:{cluster.gpu_type.lower()}"] = (
            cluster.gpus_per_node,
            f"GPUs of type {cluster.gpu_type}",
            "cluster.gpus_per_node",
        )
    for name, (each, words, field) in amounts.items():
        found += _check_amount(bounds, name, each, nodes, words, field)
    return found


def _check_amount(bounds: Sequence[Bound], name: str, each: int, nodes: int, words: str, field: str) -> list[Finding]:
    found = []
    total = each * nodes
    whole, of_node, at_least = job_limit(bounds, name), node_limit(bounds, name), least(bounds, name)
    if whole is not None and total > whole.most:
        fits = whole.most // each if each else 0
        hint = f"write at most cluster.nodes={fits}" if fits else f"write at most {field}={max(whole.most, 0)}"
        message = f"the job asks for {total} {words}, and {whole.of} gives a job {whole.most}"
        found.append(Finding(field if not fits else "cluster.nodes", message, hint))
    elif of_node is not None and name != "node" and each > of_node.most:
        message = f"the job asks for {each} {words} on each node, and {of_node.of} gives it {of_node.most}"
        found.append(Finding(field, message, f"write a smaller {field}"))
    # A job that names no amount of memory gets the partition's default, or all of a node's.
    if at_least is not None and total < at_least.most and (total or name != "mem"):
        message = f"the job asks for {total} {words}, and {at_least.of} wants at least {at_least.most}"
        found.append(Finding(field, message, f"write a larger {field}, or set another cluster.qos"))
    return found


def _check_placement(facts: ClusterFacts, cluster: ClusterConfig) -> list[Finding]:
    """Find what is asked of a network that SLURM does not know: it would take the option, and do nothing."""
    found = []
    if cluster.segment is not None and facts.version is not None and not SEGMENTS.applies_to(facts.version):
        release = f"{facts.version[0]}.{facts.version[1]:02d}"
        message = f"cluster.segment={cluster.segment}: SLURM {release} has no segments, which came with 24.05"
        return [Finding("cluster.segment", message, "cluster.segment=null")]
    kind = kind_of_topology(facts.config)
    for field, value, needs in (
        ("segment", cluster.segment, ("block",)),
        ("switches", cluster.switches, ("tree",)),
    ):
        if value is not None and kind not in needs:
            has = f"has topology/{kind}" if kind else "knows no topology"
            message = (
                f"cluster.{field}={value} does nothing here: it is for topology/{needs[0]}, and this cluster {has}"
            )
            found.append(Finding(f"cluster.{field}", message, f"cluster.{field}=null", fatal=False))
    return found


def _check_container(facts: ClusterFacts, cluster: ClusterConfig) -> list[Finding]:
    if cluster.container.kind != ContainerKind.PYXIS or facts.pyxis is not False:
        return []
    return [
        Finding(
            "cluster.container.kind",
            "cluster.container.kind=pyxis, and srun on this machine knows no --container-image",
            "is pyxis installed on the compute nodes? cluster.container.kind=apptainer does without it",
            fatal=False,
        )
    ]
