"""Ask SLURM for the facts of a cluster, by few commands with short time-outs: a login node and a controller serve many people.

About a dozen commands, whose answers do not grow with the number of jobs, in a few rounds. Those of a round run at the same
time, so that a controller that does not answer costs seconds. A command that is missing or fails leaves its facts unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from slurmtrain.slurm.facts import ClusterFacts, NodeGroup, keeps_accounts
from slurmtrain.slurm.parse_facts import (
    ASSOC_COLUMNS,
    QOS_COLUMNS,
    SINFO_FORMAT,
    clusters_of,
    first_name,
    parse_associations,
    parse_config,
    parse_groups,
    parse_partitions,
    parse_qos,
    with_nodes,
)
from slurmtrain.slurm.preemption import NOT_AT_ALL
from slurmtrain.system.user import own_user

Ask = Callable[[Sequence[str]], str | None]

NODES_ASKED = 16  # one for each kind of node
AT_ONCE = 8  # commands at the same time, of which at most three reach the controller

CONFIG = ("scontrol", "show", "config")
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
GROUPS = ("sinfo", "--noheader", "--all", "--exact", f"--format={SINFO_FORMAT}")
QOS = ("sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_COLUMNS)}")
SRUN_HELP = ("srun", "--help")
FEDERATION = ("scontrol", "show", "federation")  # prints nothing where there is none


def associations_command(user: str) -> tuple[str, ...]:
    """Return the command that lists what accounting allows a user."""
    return ("sacctmgr", "-nP", "show", "assoc", f"user={user}", f"format={','.join(ASSOC_COLUMNS)}")


def default_account_command(user: str) -> tuple[str, ...]:
    """Return the command that prints a user's default account."""
    return ("sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount")


def read_facts(ask: Ask, *, whole: bool = True, user: str | None = None) -> ClusterFacts:
    """Return the facts of a cluster; those that cannot be had are unknown.

    Args:
        ask: returns the output of a command, or None if there is none in time; `SlurmClient.glance`.
        whole: also those that only a description of the cluster needs: nodes one by one, pyxis. Without them
            it takes three commands, and where there are accounts four more.
        user: whose accounts; None: this user's.
    """
    silent: list[str] = []
    first = _answers(ask, [CONFIG, PARTITIONS, GROUPS], silent)
    config = parse_config(first[CONFIG])
    if not config:
        return ClusterFacts(silent=tuple(silent))
    groups = parse_groups(first[GROUPS])
    user = user or own_user()
    nodes = ("scontrol", "--oneliner", "show", "node", ",".join(_one_of_each(groups)))
    wanted = [*_of_accounts(user), FEDERATION] if keeps_accounts(config) else []
    if whole:
        wanted += [SRUN_HELP, *([nodes] if nodes[-1] else [])]
    answers = _answers(ask, wanted, silent)
    found = ClusterFacts(
        config=config,
        partitions=parse_partitions(first[PARTITIONS]),
        groups=with_nodes(groups, answers.get(nodes, "")),
        pyxis="--container-image" in answers[SRUN_HELP] if answers.get(SRUN_HELP) else None,
        federation=answers[FEDERATION].strip()
        if FEDERATION in answers and not _is_silent(FEDERATION, silent)
        else None,
    )
    if found.keeps_accounts:
        found = _with_accounts(found, answers, user, silent)
    return replace(found, silent=tuple(silent))


def read_preemption(ask: Ask, *, user: str | None = None) -> ClusterFacts:
    """Return the facts by which jobs are preempted: partitions, and where QOS preempt each other, those and this user's.

    It takes one command where nothing is preempted, two where partitions preempt each other, and five where QOS do.

    Args:
        ask, user: as for `read_facts`.
    """
    silent: list[str] = []
    found = ClusterFacts(config=parse_config(_answers(ask, [CONFIG], silent)[CONFIG]))
    by = found.config.get("PreemptType", "")
    if by not in NOT_AT_ALL:
        user = user or own_user()
        by_accounts = by == "preempt/qos" and found.keeps_accounts
        answers = _answers(ask, [PARTITIONS, *(_of_accounts(user) if by_accounts else ())], silent)
        found = replace(found, partitions=parse_partitions(answers[PARTITIONS]))
        found = _with_accounts(found, answers, user, silent) if by_accounts else found
    return replace(found, silent=tuple(silent))


def _of_accounts(user: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands that show what a user may use."""
    return associations_command(user), QOS, default_account_command(user)


def _with_accounts(
    facts: ClusterFacts, answers: Mapping[tuple[str, ...], str], user: str, silent: Collection[str]
) -> ClusterFacts:
    """Add the answers to the commands of `_of_accounts` to what is known of a cluster."""
    command = associations_command(user)
    associations = None if _is_silent(command, silent) else parse_associations(answers[command], facts.name)
    if not associations and user.isdigit():  # sacctmgr knows users by name alone, and slurmctld may know this one's
        associations = None
    # Of several clusters in one database each has a default account of its own, and the first is shown.
    one_cluster = len(clusters_of(answers[command])) <= 1
    default_account = answers[default_account_command(user)].strip().partition("\n")[0] or None
    return replace(
        facts,
        associations=associations,
        qos=parse_qos(answers[QOS]) or None,
        default_account=default_account if one_cluster else None,
    )


def _one_of_each(groups: Sequence[NodeGroup]) -> list[str]:
    names = [first_name(group.names) for group in groups]
    return list(dict.fromkeys(name for name in names if name))[:NODES_ASKED]


def _is_silent(command: Sequence[str], silent: Collection[str]) -> bool:
    return " ".join(command) in silent


def _answers(ask: Ask, commands: Sequence[tuple[str, ...]], silent: list[str]) -> dict[tuple[str, ...], str]:
    """Return the output of each command, "" for those that gave none, which are added to `silent`."""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        answers = list(pool.map(ask, commands))
    silent += [" ".join(command) for command, answer in zip(commands, answers, strict=True) if answer is None]
    return {command: answer or "" for command, answer in zip(commands, answers, strict=True)}
