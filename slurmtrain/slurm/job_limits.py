"""Which limit holds for a job, of the several that a cluster has: a partition's QOS, the job's QOS, its account.

SLURM takes each limit from the first of these that sets it (slurm.schedmd.com/resource_limits.html, "Hierarchy"): the
partition's QOS, the job's QOS, the user's association. The flag OverPartQOS puts the job's QOS first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurmtrain.slurm.facts import Association, ClusterFacts, Limits, Partition, Qos


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
    """Return the QOS that a job gets: the one that it names, else its association's default, else the only one there.

    None: there is no such QOS, or it is not known: without a default SLURM looks further up, and of a list ("a,b", from 24.11
    on) it takes the one with which the job can start.
    """
    name = qos or (association.default_qos if association is not None else "")
    if not name and association is not None and len(association.qos) == 1:
        name = association.qos[0]
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
    found += _of_accounts(association, factor) if association is not None else []
    if any("relative" in each.flags for _, each in both):  # its amounts are shares, in percent
        found = [replace(each, limits=Limits(wall_min=each.limits.wall_min)) for each in found]
    return found


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


def _of_accounts(association: Association, factor: float | None) -> list[Bound]:
    """Return the limits of an association, of its whole account, and of those above it.

    The amounts of all jobs together hold on every level, other than those of which the first counts: each is named where it
    is least.

    Args:
        factor: the LimitFactor of the job's QOS, by which the amounts are multiplied (sacctmgr(1)), other than those on one
            node; None: it has none.
    """
    said = "" if factor is None else f", times {factor:g} (LimitFactor of its QOS)"
    levels = [(f"account {association.account}{said}", _times(association.limits.group_tres, factor))]
    levels += [
        (f"account {each.name} (all of its jobs together){said}", _times(each.group_tres, factor))
        for each in association.accounts
    ]
    own_limits = replace(association.limits, tres=_times(association.limits.tres, factor))
    names = {name for _, amounts in levels for name in amounts}
    least_at = {
        name: min((amounts[name], at) for at, (_, amounts) in enumerate(levels) if name in amounts) for name in names
    }
    found = []
    for at, (words, amounts) in enumerate(levels):
        own = {name: amount for name, amount in amounts.items() if least_at[name] == (amount, at)}
        found.append(Bound(words, replace(own_limits if at == 0 else Limits(), group_tres=own)))
    return found


def _times(amounts: Mapping[str, int], factor: float | None) -> Mapping[str, int]:
    return amounts if factor is None else {name: int(amount * factor) for name, amount in amounts.items()}


def wall_limit(bounds: Sequence[Bound]) -> Limit | None:
    """Return the limit on the minutes of a job, without the partition's."""
    return next((Limit(each.limits.wall_min, each.of) for each in bounds if each.limits.wall_min is not None), None)


def job_limit(bounds: Sequence[Bound], name: str) -> Limit | None:
    """Return the least limit on the amount of a resource that one job has: of a job, of a user and of a group."""
    kinds: tuple[Callable[[Limits], Mapping[str, int]], ...] = (
        lambda limits: limits.tres,
        lambda limits: limits.user_tres,
        lambda limits: limits.group_tres,
    )
    found = [limit for kind in kinds if (limit := _first(bounds, kind, name)) is not None]
    return min(found, key=lambda limit: limit.most, default=None)


def node_limit(bounds: Sequence[Bound], name: str) -> Limit | None:
    """Return the limit on the amount of a resource that a job has on each node."""
    return _first(bounds, lambda limits: limits.tres_per_node, name)


def least(bounds: Sequence[Bound], name: str) -> Limit | None:
    """Return the amount of a resource that a job asks for at least."""
    return _first(bounds, lambda limits: limits.least_tres, name)


def _first(bounds: Sequence[Bound], kind: Callable[[Limits], Mapping[str, int]], name: str) -> Limit | None:
    return next((Limit(kind(each.limits)[name], each.of) for each in bounds if name in kind(each.limits)), None)
