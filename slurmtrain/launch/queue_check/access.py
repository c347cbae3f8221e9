"""Who may use a partition: its state, groups, accounts and QOS."""

from __future__ import annotations

from collections.abc import Collection

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import nearest
from slurmtrain.launch.queue_check.finding import Finding
from slurmtrain.slurm.facts import Association, ClusterFacts, Partition
from slurmtrain.slurm.job_limits import association_of, qos_of


def check_account(facts: ClusterFacts, cluster: ClusterConfig) -> list[Finding]:
    """Find an account that is none of this user's."""
    if facts.associations is None or not facts.enforces("associations"):
        return []
    mine = list(dict.fromkeys(each.account for each in facts.associations))
    if not mine:
        return [
            Finding(
                "cluster.account",
                f"accounting has no account for you on cluster {facts.name}, and refuses jobs without an account",
                "ask your admins; `sacctmgr show associations user=$USER` shows your accounts",
            )
        ]
    if cluster.account is not None and cluster.account.lower() not in {each.lower() for each in mine}:
        return [
            Finding(
                "cluster.account",
                f"cluster.account={cluster.account} is not one of your accounts on cluster {facts.name}",
                f"yours are: {', '.join(mine)}",
            )
        ]
    return []


def check_access(
    facts: ClusterFacts,
    partition: Partition,
    cluster: ClusterConfig,
    groups: Collection[str] | None,
    user_id: int | None,
) -> list[Finding]:
    """Find why a partition does not take this user's job: its state, groups, reservation, accounts and QOS."""
    of = f"partition {partition.name}"
    found = []
    if partition.state != "UP":
        found.append(
            Finding(
                "cluster.partition",
                f"{of} starts no jobs at present (State={partition.state})",
                "`sinfo` shows those that do",
                fatal=not partition.takes_jobs,  # the others let them wait
            )
        )
    if partition.root_only and user_id not in (0, facts.slurm_user_id):
        certain = user_id is not None and facts.slurm_user_id is not None
        found.append(Finding("cluster.partition", f"{of} accepts only jobs of root (RootOnly)", fatal=certain))
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
                "cluster.reservation", f"{of} accepts only jobs with a reservation (ReqResv)", "set cluster.reservation"
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
    if account is not None and not partition.takes_account(account):
        usable = [
            each
            for each in sorted({each.account for each in facts.associations or ()})
            if partition.takes_account(each)
        ]
        found.append(
            Finding(
                "cluster.account",
                f"partition {partition.name} does not accept account {account} (AllowAccounts, DenyAccounts)",
                f"it takes: {', '.join(usable)}"
                if usable
                else "it accepts none of yours; set another cluster.partition",
                fatal=False,  # newer releases mean the accounts below one, too, and whose parent it is is not known here
            )
        )
    return [*found, *_check_qos(facts, partition, association, cluster.qos)]


def _check_qos(
    facts: ClusterFacts, partition: Partition, association: Association | None, wanted: str | None
) -> list[Finding]:
    if facts.qos is None or (wanted is not None and "," in wanted):  # of a list, SLURM takes one that suits (24.11)
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
    if its is not None and mine and its.name.lower() not in mine:
        return [
            Finding(
                "cluster.qos",
                f"cluster.qos is not set, and your account {association.account} may not use {its.name}, which a job then gets",
                f"set cluster.qos to one of: {', '.join(association.qos)}",
            )
        ]
    if its is not None and not partition.takes_qos(its.name):
        usable = [each for each in association.qos if partition.takes_qos(each)]
        said = f"cluster.qos={wanted}" if wanted else f"your default QOS {its.name}"
        return [
            Finding(
                "cluster.qos",
                f"{said}: partition {partition.name} does not accept it (AllowQos, DenyQos)",
                f"set cluster.qos to one of: {', '.join(usable)}" if usable else "set another cluster.partition",
            )
        ]
    return []
