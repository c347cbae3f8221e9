"""A whole request, compared with a cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from slurmtrain.choices import ContainerKind
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import nearest
from slurmtrain.launch.queue_check.access import check_access, check_account
from slurmtrain.launch.queue_check.finding import Finding
from slurmtrain.launch.queue_check.limits import check_limits, check_node_count, check_partition_memory, check_time
from slurmtrain.launch.queue_check.nodes import check_nodes, shares_cpus
from slurmtrain.slurm.facts import ClusterFacts, Partition
from slurmtrain.slurm.topology import kind_of_topology, knows_no_topology
from slurmtrain.slurm.versions import SEGMENTS, release

_NO = ("0", "f", "false", "n", "no")  # what sbatch reads in a variable as: without this option


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
    elsewhere = [*_check_container(facts, cluster), *_check_placement(facts, cluster)]
    if cluster.partition is None and cluster.reservation is not None:  # the job gets the reservation's partition
        return _sorted(_as_certain_as_known(facts, [*check_account(facts, cluster), *elsewhere]))
    names = cluster.partition.split(",") if cluster.partition else [None]
    partitions = [(name, facts.partition(name)) for name in names]
    missing = [name for name, found in partitions if found is None]
    if missing:
        return _as_certain_as_known(facts, [_no_partition(facts, missing[0])])
    account = check_account(facts, cluster)
    each_has = [
        _check_partition(facts, partition, cluster, groups, user_id)
        for _, partition in partitions
        if partition is not None
    ]
    # Of several partitions SLURM takes one in which the job can run.
    best = min(each_has, key=lambda found: sum(each.fatal for each in found))
    return _sorted(_as_certain_as_known(facts, [*account, *best, *elsewhere]))


def _sorted(found: Sequence[Finding]) -> list[Finding]:
    return sorted(found, key=lambda each: not each.fatal)


def _check_partition(
    facts: ClusterFacts,
    partition: Partition,
    cluster: ClusterConfig,
    groups: Collection[str] | None,
    user_id: int | None,
) -> list[Finding]:
    """Return what does not suit a partition in a request, or its Alternate, which gets its jobs while it takes none."""
    found = []
    instead = _partition_that_takes(facts, partition)
    if instead is not None and instead != partition:
        found.append(
            Finding(
                "cluster.partition",
                f"partition {partition.name} accepts no jobs at present (State={partition.state}), and SLURM puts them into "
                f"{instead.name} (Alternate)",
                fatal=False,
            )
        )
        partition = instead
    return [
        *found,
        *check_access(facts, partition, cluster, groups, user_id),
        *check_time(facts, partition, cluster),
        *check_node_count(facts, partition, cluster),
        *check_partition_memory(facts, partition, cluster),
        *check_nodes(facts, partition, cluster),
        *check_limits(facts, partition, cluster),
    ]


def _partition_that_takes(facts: ClusterFacts, partition: Partition) -> Partition | None:
    """Return the first of a partition, its Alternate, the Alternate of that one, ... that takes jobs; None if none does."""
    seen: list[str] = []
    found: Partition | None = partition
    while found is not None and not found.takes_jobs:
        seen.append(found.name)
        found = facts.partition(found.alternate) if found.alternate and found.alternate not in seen else None
    return found


def with_choices_of_the_shell(cluster: ClusterConfig, variables: Mapping[str, str]) -> ClusterConfig:
    """Return the config with what it leaves open and sbatch takes from the variables of the person's shell instead."""
    overcommit = variables.get("SBATCH_OVERCOMMIT")
    shared = overcommit is not None and overcommit.lower() not in _NO and not shares_cpus(cluster)
    return replace(
        cluster,
        sbatch={**cluster.sbatch, "overcommit": True} if shared else cluster.sbatch,
        partition=cluster.partition or variables.get("SBATCH_PARTITION") or None,
        account=cluster.account or variables.get("SBATCH_ACCOUNT") or None,
        qos=cluster.qos or variables.get("SBATCH_QOS") or None,
        reservation=cluster.reservation or variables.get("SBATCH_RESERVATION") or None,
    )


def _as_certain_as_known(facts: ClusterFacts, found: Sequence[Finding]) -> list[Finding]:
    """Return the findings as warnings where the facts of this cluster may not be those that decide about the job.

    A plugin of the cluster may change what a job asks for, its partition, its QOS, ..., and another cluster of a federation
    may run it. `sbatch --test-only` has the last word then.
    """
    plugins = [facts.config.get(name, "") for name in ("JobSubmitPlugins", "CliFilterPlugins")]
    if facts.is_alone and all(each in ("", "none", "(null)") for each in plugins):
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


def _check_placement(facts: ClusterFacts, cluster: ClusterConfig) -> list[Finding]:
    """Find what is asked of a network that SLURM does not know: it would take the option, and do nothing."""
    if cluster.segment is not None and facts.version is not None and not SEGMENTS.applies_to(facts.version):
        message = (
            f"cluster.segment={cluster.segment}: SLURM {release(facts.version)} has no segments, which came with 24.05"
        )
        return [Finding("cluster.segment", message, "cluster.segment=null")]
    kind = kind_of_topology(facts.config)
    if kind is None and not knows_no_topology(facts.config):
        return []
    found = []
    for field, value, needs in (("segment", cluster.segment, "block"), ("switches", cluster.switches, "tree")):
        if value is not None and kind != needs:
            has = f"has topology/{kind}" if kind else "knows no topology"
            message = f"cluster.{field}={value} does nothing here: it is for topology/{needs}, and this cluster {has}"
            found.append(Finding(f"cluster.{field}", message, f"cluster.{field}=null", fatal=False))
    return found


def _check_container(facts: ClusterFacts, cluster: ClusterConfig) -> list[Finding]:
    if cluster.container.kind != ContainerKind.PYXIS or facts.pyxis is not False:
        return []
    return [
        Finding(
            "cluster.container.kind",
            "cluster.container.kind=pyxis, and srun on this machine knows no --container-image",
            "is pyxis installed on the compute nodes? cluster.container.kind=apptainer does not need it",
            fatal=False,
        )
    ]
