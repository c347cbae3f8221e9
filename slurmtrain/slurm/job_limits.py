"""Which limit holds for a job, of the several that a cluster has: a partition's QOS, the job's QOS, its account.

SLURM takes each limit from the first of these that sets it (slurm.schedmd.com/resource_limits.html, "Hierarchy"): the
partition's QOS, the job's QOS, the user's association. The flag OverPartQOS puts the job's QOS first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from slurmtrain.slurm.facts import Association, ClusterFacts, Limits, Partition, Qos
from slurmtrain.slurm.parse_facts import COUNTS

# What an account limits, and what else than the same of a QOS is looked at instead (slurmctld's acct_policy.c).
SAME_COUNT = {COUNTS["MaxJobs"]: COUNTS["MaxJobsPA"], COUNTS["MaxSubmit"]: COUNTS["MaxSubmitPA"]}

DEFAULT_QOS = "normal"  # which SLURM's database always has (slurmctld's job_mgr.c)


@dataclass(frozen=True)
class Bound:
    """The limits of one of those that set any.

    Attributes:
        of: whose they are, in words: "QOS normal", "account ml".
        factor: what SLURM multiplies the amounts of one job, and those of all jobs together, by; None: they are as they are.
    """

    of: str
    limits: Limits
    factor: float | None = None


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
    factor = next((each.limit_factor for _, each in both if each.limit_factor is not None), None)
    counts = frozenset[str]().union(*(each.limits.counts for _, each in both))
    found += _of_accounts(association, factor, counts) if association is not None else []
    if any("relative" in each.flags for _, each in both):  # its amounts are shares, in percent
        found = [replace(each, limits=Limits(wall_min=each.limits.wall_min)) for each in found]
    return [replace(each, limits=_of_counted(facts, each.limits)) for each in found]


def _of_counted(facts: ClusterFacts, limits: Limits) -> Limits:
    """Return the limits on what this cluster counts (AccountingStorageTRES): slurmctld knows no other resource.

    Limits of QOS hold for all clusters of a database, and another one may count GPUs where this one does not.
    """
    counted = {word.strip().lower() for word in facts.config.get("AccountingStorageTRES", "").split(",")} - {""}
    if not counted:
        return limits
    amounts: dict[str, Any] = {
        each.name: {
            name: amount
            for name, amount in getattr(limits, each.name).items()
            if name in counted or name.partition("/")[0] in counted
        }
        for each in fields(limits)
        if each.name not in ("wall_min", "counts")
    }
    return replace(limits, **amounts)


def flags_of(facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None) -> frozenset[str]:
    """Return the flags of the QOS whose limits `bounds_of` returns: the job's, and the partition's."""
    both = _both_qos(facts, partition, association_of(facts, account, partition.name), qos)
    return frozenset[str]().union(*(each.flags for _, each in both))


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


def _of_accounts(association: Association, factor: float | None, qos_counts: frozenset[str]) -> list[Bound]:
    """Return the limits of an association, of its whole account, and of those above it.

    The amounts and numbers of all jobs together hold on every level, other than those of which the first counts: each is
    named where it is least.

    Args:
        factor: the LimitFactor of the job's QOS; None: it has none.
        qos_counts: which numbers of jobs a QOS limits.
    """
    own = association.limits
    # Instead of an association's own number SLURM looks at that of a QOS, be it for each user or for each account.
    own_counts = {
        name: most for name, most in own.counts.items() if qos_counts.isdisjoint((name, SAME_COUNT.get(name, name)))
    }
    words = [f"account {association.account}"]
    words += [f"account {each.name} (all of its jobs together)" for each in association.accounts]
    amounts = _where_least([own.group_tres, *(each.group_tres for each in association.accounts)])
    counts = _where_least([own_counts, *(each.counts for each in association.accounts)])
    found = []
    for at, of in enumerate(words):
        limits = replace(own if at == 0 else Limits(), group_tres=amounts[at], counts=counts[at])
        found.append(Bound(of, limits, factor))
    return found


def _where_least(levels: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Return what is left of each level when each name stands only where its number is least."""
    names = {name for each in levels for name in each}
    least_at = {name: min((each[name], at) for at, each in enumerate(levels) if name in each)[1] for name in names}
    return [{name: number for name, number in each.items() if least_at[name] == at} for at, each in enumerate(levels)]


def wall_limit(bounds: Sequence[Bound]) -> Limit | None:
    """Return the limit on the minutes of a job, without the partition's."""
    return next((Limit(each.limits.wall_min, each.of) for each in bounds if each.limits.wall_min is not None), None)


def job_limit(bounds: Sequence[Bound], name: str) -> Limit | None:
    """Return the least limit on the amount of a resource that one job has: of a job, a user, an account and a group.

    LimitFactor multiplies these amounts alone: those on one node, the minutes and the numbers of jobs stay as they are
    (slurmctld's acct_policy.c).
    """
    kinds: tuple[Callable[[Limits], Mapping[str, int]], ...] = (
        lambda limits: limits.tres,
        lambda limits: limits.user_tres,
        lambda limits: limits.account_tres,
        lambda limits: limits.group_tres,
    )
    found = [limit for kind in kinds if (limit := _first(bounds, kind, name, multiplied=True)) is not None]
    return min(found, key=lambda limit: limit.most, default=None)


def minutes_limit(bounds: Sequence[Bound], name: str) -> Limit | None:
    """Return the limit on the amount of a resource that one job has, times the minutes of its time limit."""
    return _first(bounds, lambda limits: limits.tres_min, name)


def closed(bounds: Sequence[Bound]) -> list[tuple[str, str]]:
    """Return what is limited to 0 jobs, in words, and by whom: no job gets through there."""
    names = dict.fromkeys(name for each in bounds for name in each.limits.counts)
    found = [(name, _first(bounds, lambda limits: limits.counts, name)) for name in names]
    return [(name, limit.of) for name, limit in found if limit is not None and limit.most == 0]


def node_limit(bounds: Sequence[Bound], name: str) -> Limit | None:
    """Return the limit on the amount of a resource that a job has on each node."""
    return _first(bounds, lambda limits: limits.tres_per_node, name)


def least(bounds: Sequence[Bound], name: str) -> Limit | None:
    """Return the amount of a resource that a job asks for at least."""
    return _first(bounds, lambda limits: limits.least_tres, name)


def _first(
    bounds: Sequence[Bound], kind: Callable[[Limits], Mapping[str, int]], name: str, *, multiplied: bool = False
) -> Limit | None:
    for each in bounds:
        if name in kind(each.limits):
            limit = Limit(kind(each.limits)[name], each.of)
            return _times(limit, each.factor) if multiplied and each.factor is not None else limit
    return None


def _times(limit: Limit, factor: float) -> Limit:
    return Limit(int(limit.most * factor), f"{limit.of}, times {factor:g} (LimitFactor of its QOS)")
