"""Ask SLURM for the facts of a cluster, by few commands with short time-outs: a login node and a controller serve many people.

At most eleven commands, whose answers do not grow with the number of jobs, in two or three rounds. Those of a round run at
the same time, so that a controller that does not answer costs seconds. A command that is missing or fails leaves its facts
unknown.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from slurmtrain.slurm.facts import (
    ASSOC_COLUMNS,
    QOS_COLUMNS,
    SINFO_FORMAT,
    ClusterFacts,
    first_name,
    keeps_accounts,
    parse_associations,
    parse_config,
    parse_groups,
    parse_mpi_types,
    parse_partitions,
    parse_qos,
    with_account_limits,
    with_nodes,
)
from slurmtrain.slurm.topology import kind_of_topology

Ask = Callable[[Sequence[str]], str | None]

NODES_ASKED = 16  # one for each kind of node
AT_ONCE = 8  # commands at the same time, of which at most three reach the controller

CONFIG = ("scontrol", "show", "config")
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
GROUPS = ("sinfo", "--noheader", "--all", "--exact", f"--format={SINFO_FORMAT}")
QOS = ("sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_COLUMNS)}")
MPI_TYPES = ("srun", "--mpi=list")
SRUN_HELP = ("srun", "--help")
TOPOLOGY = ("scontrol", "show", "topology")


def associations_command(user: str) -> tuple[str, ...]:
    """Return the command that lists what accounting allows a user."""
    return ("sacctmgr", "-nP", "show", "assoc", f"user={user}", f"format={','.join(ASSOC_COLUMNS)}")


def account_limits_command(accounts: Iterable[str]) -> tuple[str, ...]:
    """Return the command that lists the limits of whole accounts."""
    names = ",".join(dict.fromkeys(accounts))
    return ("sacctmgr", "-nP", "show", "assoc", f"account={names}", "user=", f"format={','.join(ASSOC_COLUMNS)}")


def default_account_command(user: str) -> tuple[str, ...]:
    """Return the command that prints a user's default account."""
    return ("sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount")


def read_facts(ask: Ask, *, whole: bool = True, user: str | None = None) -> ClusterFacts:
    """Return the facts of a cluster; those that cannot be had are unknown.

    Args:
        ask: returns the output of a command, or None if there is none in time; `SlurmClient.glance`.
        whole: also those that only a description of the cluster needs: nodes one by one, topology, MPI, pyxis. Without them
            it takes three commands, and four more where there are accounts.
        user: whose accounts; None: this user's.
    """
    silent: list[str] = []
    first = _answers(ask, [CONFIG, PARTITIONS, GROUPS], silent)
    config = parse_config(first[CONFIG])
    if not config:
        return ClusterFacts(silent=tuple(silent))
    groups = parse_groups(first[GROUPS])
    user = user or own_user()
    associations, default_account = associations_command(user), default_account_command(user)
    nodes = ("scontrol", "--oneliner", "show", "node", ",".join(_one_of_each(groups)))
    wanted: list[tuple[str, ...]] = []
    if keeps_accounts(config):
        wanted += [associations, QOS, default_account]
    if whole:
        wanted += [MPI_TYPES, SRUN_HELP, *([nodes] if nodes[-1] else [])]
        wanted += [TOPOLOGY] if kind_of_topology(config) is not None else []
    answers = _answers(ask, wanted, silent)
    found = ClusterFacts(
        config=config,
        partitions=parse_partitions(first[PARTITIONS]),
        groups=with_nodes(groups, answers.get(nodes, "")),
        switches=answers.get(TOPOLOGY, ""),
        mpi_types=parse_mpi_types(answers.get(MPI_TYPES, "")),
        pyxis="--container-image" in answers[SRUN_HELP] if answers.get(SRUN_HELP) else None,
        silent=tuple(silent),
    )
    if associations not in answers:
        return found
    known = parse_associations(answers[associations], found.name)
    if known and found.enforces("limits"):
        together = account_limits_command(each.account for each in known)
        known = with_account_limits(known, _answers(ask, [together], silent)[together])
    return replace(
        found,
        associations=known if " ".join(associations) not in silent else None,
        qos=parse_qos(answers[QOS]) or None,
        silent=tuple(silent),
        default_account=answers[default_account].strip().partition("\n")[0] or None,
    )


def _one_of_each(groups: Sequence[object]) -> list[str]:
    names = [first_name(getattr(group, "names", "")) for group in groups]
    return list(dict.fromkeys(name for name in names if name))[:NODES_ASKED]


def _answers(ask: Ask, commands: Sequence[tuple[str, ...]], silent: list[str]) -> dict[tuple[str, ...], str]:
    """Return the output of each command, "" for those that gave none, which are added to `silent`."""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        answers = list(pool.map(ask, commands))
    silent += [" ".join(command) for command, answer in zip(commands, answers, strict=True) if answer is None]
    return {command: answer or "" for command, answer in zip(commands, answers, strict=True)}


def own_user() -> str:
    """Return the name of this process's user, for SLURM's accounting; the variables of a shell may be of another one."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def own_groups() -> frozenset[str]:
    """Return the names of the groups that this process belongs to."""
    names = set()
    for number in {os.getegid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return frozenset(names)
