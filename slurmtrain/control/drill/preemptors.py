"""Who can preempt a job here, and whether this user may: pure functions of a cluster's facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.slurm.facts import ClusterFacts, Partition
from slurmtrain.slurm.job_limits import association_of, qos_of
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.slurm.preemption import NOT_AT_ALL, Preemption, first_partition, preemption_of


@dataclass(frozen=True)
class Preemptor:
    """Options of sbatch with which a job preempts ours, and how a person calls that."""

    options: tuple[str, ...]
    name: str


def preemptors(
    facts: ClusterFacts, *, partition: str | None, account: str | None = None, qos: str | None = None
) -> list[Preemptor] | str:
    """Return what may preempt a job of this partition, account and QOS, the gentlest first; or why nothing does.

    Args:
        partition, account, qos: of the job; None: the default ones. Of several partitions the first counts.
    """
    if not facts.config or not facts.partitions:
        return "SLURM's controller did not say who preempts whom"
    by = facts.config.get("PreemptType", "")
    if by in NOT_AT_ALL:
        return "SLURM preempts nothing here (PreemptType=preempt/none)"
    if by == "preempt/partition_prio":
        return _by_partition(facts, first_partition(partition))
    if by == "preempt/qos":
        return _by_qos(facts, partition, account, qos)
    return f"nothing is known of PreemptType={by}"


def _by_partition(facts: ClusterFacts, name: str | None) -> list[Preemptor] | str:
    own = facts.partition(name)
    if own is None:
        return f"SLURM does not say how partition {name} is preempted" if name else "there is no default partition"
    refusal = _not_preempted(preemption_of(facts, own))
    if refusal is not None:
        return refusal
    above = [
        each
        for each in facts.partitions
        if each.state == "UP" and each.priority_tier > own.priority_tier and _share_nodes(own, each)
    ]
    if not above:
        return f"no other partition on its nodes has a higher PriorityTier than partition {own.name}"
    lowest_first = sorted(above, key=lambda each: (each.priority_tier, each.name))
    return [Preemptor((f"--partition={each.name}",), f"partition {each.name}") for each in lowest_first]


def _by_qos(facts: ClusterFacts, names: str | None, account: str | None, qos: str | None) -> list[Preemptor] | str:
    name = first_partition(names)
    partition = facts.partition(name)
    if partition is None:
        return f"SLURM does not show partition {name}" if name else "there is no default partition"
    association = association_of(facts, account, partition.name)
    own = qos_of(facts, association, qos)
    if own is None and qos is not None:
        return f"SLURM's accounting does not show QOS {qos}"
    if own is None:
        return "cluster.qos is not set, and SLURM preempts by QOS here (PreemptType=preempt/qos)"
    refusal = _not_preempted(preemption_of(facts, partition, account=account, qos=own.name))
    if refusal is not None:
        return refusal
    above = [each.name for each in facts.qos or () if own.name in each.preempt]
    if not above:
        return f"no QOS preempts QOS {own.name}"
    associations = [association] if association is not None else facts.associations or ()
    mine = {its for each in associations for its in each.qos}
    allowed = [each for each in above if each in mine]
    if not allowed:
        return f"you may use none of the QOS that preempt {own.name}: {', '.join(above)}"
    # In the default partition, it might not even be able to have the node of our job.
    where = (f"--partition={names}",) if names else ()
    return [Preemptor((*where, f"--qos={each}"), f"QOS {each}") for each in allowed]


def _not_preempted(found: Preemption) -> str | None:
    words = found.mode.split(",")
    if "OFF" in words:
        return f"jobs of {found.of} are not preempted (PreemptMode=OFF)"
    if "SUSPEND" in words or words == ["GANG"]:
        return f"preempted jobs of {found.of} are suspended, and go on by themselves (PreemptMode=SUSPEND)"
    return None


def _share_nodes(one: Partition, other: Partition) -> bool:
    nodes = [_nodes(each.node_names) for each in (one, other)]
    return not nodes[0] or not nodes[1] or bool(nodes[0] & nodes[1])


def _nodes(names: str) -> set[str]:
    try:
        return set(expand_nodelist(names)) if names not in ("", "ALL") else set()
    except EnvironmentMismatchError:  # written in a way that is not known: it may share nodes
        return set()


def script_of(account: str | None, options: Sequence[str] = ()) -> str:
    """Return the batch script of the job that preempts ours: it does nothing, and ends as soon as it starts."""
    lines = ["--job-name=drill-preemptor", "--ntasks=1", "--time=1", "--output=/dev/null", "--no-requeue", *options]
    lines += [f"--account={account}"] if account else []
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + "exit 0\n"
