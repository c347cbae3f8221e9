"""Which limit holds for a job, of the several that a cluster has: a partition's QOS, the job's QOS, its account.

SLURM takes each limit from the first of these that sets it (slurm.schedmd.com/resource_limits.html, "Hierarchy"): the
partition's QOS, the job's QOS, the user's association. The flag OverPartQOS puts the job's QOS first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurmtrain.slurm.facts import Association, ClusterFacts, Limits, Partition, Qos

DEFAULT_QOS = "normal"  # which SLURM's database always has (slurmctld's job_mgr.c)


@dataclass(frozen=True)
class Bound:
    """The limits of one of those that set any.

    Attributes:
        of: whose they are, in words: "QOS normal", "account ml".
    """

    of: str
    limits: Limits


@dataclass(frozen=True)
class Limit:
    """One limit that holds.

    Attributes:
        most: the largest amount.
        of: whose it is, in words.
    """

    most: int
    of: str


def association_of(facts: ClusterFacts, account: str | None, partition: str) -> Association | None:
    """Return this user's association under an account (None: the default one), for a partition rather than for all."""
    account = account or facts.default_account
    fitting = [
        each
        for each in facts.associations or ()
        if each.partition.lower() in ("", partition.lower())  # sacctmgr keeps names in lower case
        and (account is None or each.account.lower() == account.lower())
    ]
    if account is None and len({each.account for each in fitting}) != 1:
        return None
    return max(fitting, key=lambda each: each.partition != "", default=None)


def qos_of(facts: ClusterFacts, association: Association | None, qos: str | None) -> Qos | None:
    """Return the QOS that a job gets: the one that it names, its association's default, the only one there, or `normal`.

    The first of these that there is counts. sacctmgr shows a default of the accounts above as the association's own.

    None: there is no such QOS, or it is not known: of a list ("a,b", from 24.11 on) SLURM takes the one with which the job can
    start.
    """
    name = qos or (association.default_qos if association is not None else "")
    if not name and association is not None and association.qos:
        name = association.qos[0] if len(association.qos) == 1 else DEFAULT_QOS
    return facts.qos_named(name) if name else None


def bounds_of(facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None) -> list[Bound]:
    """Return those that set limits for a job, the first of which counts.

    [] where accounting limits nothing, or it is not known which QOS the job gets: that one may lift the limits of an account.
    """
    association = association_of(facts, account, partition.name)
    both = _both_qos(facts, partition, association, qos)
    if not facts.enforces("limits") or not both:
        return []
    found = [Bound(words, each.limits) for words, each in both]
    if association is not None:
        found.append(Bound(f"account {association.account}", association.limits))
    if any("relative" in each.flags for _, each in both):  # its amounts are shares, in percent
        found = [replace(each, limits=Limits(wall_min=each.limits.wall_min)) for each in found]
    return found


def _both_qos(
    facts: ClusterFacts, partition: Partition, association: Association | None, qos: str | None
) -> list[tuple[str, Qos]]:
    """Return the job's QOS and the partition's, with the words for each, the one first that comes first; [] if not known."""
    own, its = qos_of(facts, association, qos), facts.qos_named(partition.qos) if partition.qos else None
    if own is None:
        return []
    found = [(f"QOS {own.name}", own)]
    if its is not None:
        found.insert(
            len(found) if "overpartqos" in own.flags else 0, (f"QOS {its.name} of partition {partition.name}", its)
        )
    return found


def wall_limit(bounds: Sequence[Bound]) -> Limit | None:
    """Return the limit on the minutes of a job, without the partition's."""
    return next((Limit(each.limits.wall_min, each.of) for each in bounds if each.limits.wall_min is not None), None)


def job_limit(bounds: Sequence[Bound], name: str) -> Limit | None:
    """Return the least limit on the amount of a resource that one job has: of a job, a user, an account and a group."""
    kinds: tuple[Callable[[Limits], Mapping[str, int]], ...] = (
        lambda limits: limits.tres,
        lambda limits: limits.user_tres,
        lambda limits: limits.account_tres,
        lambda limits: limits.group_tres,
    )
    found = [limit for kind in kinds if (limit := _first(bounds, kind, name)) is not None]
    return min(found, key=lambda limit: limit.most, default=None)


def node_limit(bounds: Sequence[Bound], name: str) -> Limit | None:
    """Return the limit on the amount of a resource that a job has on each node."""
    return _first(bounds, lambda limits: limits.tres_per_node, name)


def _first(bounds: Sequence[Bound], kind: Callable[[Limits], Mapping[str, int]], name: str) -> Limit | None:
    return next((Limit(kind(each.limits)[name], each.of) for each in bounds if name in kind(each.limits)), None)
