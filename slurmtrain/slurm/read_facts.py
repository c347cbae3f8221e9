"""Ask SLURM for the facts of a cluster, by few commands with short time-outs: a login node and a controller serve many people.

About a dozen commands, whose answers do not grow with the number of jobs, in a few rounds. Those of a round run at the same
time, so that a controller that does not answer costs seconds. A command that is missing or fails leaves its facts unknown.

The plain output is read, not `--json`: its fields have had the same names from 22.05 to 25.11, while the JSON changes its
shape with each release (data_parser/v0.0.39, 40, ...), and Debian's 22.05 is built without it. Whatever cannot be
understood is left out, so that an odd cluster has fewer facts, not wrong ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.slurm.facts import Association, ClusterFacts, NodeGroup, Partition, Qos
from slurmtrain.slurm.nodelist import AT_WORK, GROUP, expand_nodelist
from slurmtrain.slurm.parse_values import parse_duration, parse_show_config
from slurmtrain.system.files import own_user

Ask = Callable[[Sequence[str]], str | None]
Command = tuple[str, ...]

NODES_ASKED = 16  # one for each kind of node
AT_ONCE = 8  # commands at the same time, of which at most three reach the controller

# Columns of `sinfo --format`: partition, nodes, CPUs, sockets, cores, threads, memory, GRES, features, state, node list.
SINFO_FORMAT = "%R|%D|%c|%X|%Y|%Z|%m|%G|%f|%T|%N"
QOS_COLUMNS = ("Name", "Flags", "GraceTime", "Preempt", "PreemptMode", "MaxWall")
ASSOC_COLUMNS = ("Cluster", "Account", "Partition", "QOS", "DefaultQOS", "MaxWall")
_UNLIMITED = {"", "UNLIMITED", "INFINITE", "NONE", "N/A", "(null)", "-1"}

CONFIG = ("scontrol", "show", "config")
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
GROUPS = ("sinfo", "--noheader", "--all", "--exact", f"--format={SINFO_FORMAT}")
QOS = ("sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_COLUMNS)}")
SRUN_HELP = ("srun", "--help")
FEDERATION = ("scontrol", "show", "federation")  # prints nothing where there is none


def associations_command(user: str) -> Command:
    """Return the command that lists what accounting allows a user."""
    return ("sacctmgr", "-nP", "show", "assoc", f"user={user}", f"format={','.join(ASSOC_COLUMNS)}")


def default_account_command(user: str) -> Command:
    """Return the command that prints a user's default account."""
    return ("sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount")


Answers = Mapping[Command, str | None]  # None: it gave none in time


def _asked(ask: Ask, *commands: Command) -> dict[Command, str | None]:
    """Run the commands at the same time, and return their answers."""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return dict(zip(commands, pool.map(ask, commands), strict=True))


def read_facts(ask: Ask, *, whole: bool = True, user: str | None = None) -> ClusterFacts:
    """Return the facts of a cluster; those that cannot be had are unknown.

    Args:
        ask: returns the output of a command, or None if there is none in time; `SlurmClient.glance`.
        whole: also those that only a description of the cluster needs: nodes one by one, pyxis. Without them
            it takes three commands, and where there are accounts four more.
        user: whose accounts; None: this user's.
    """
    answers = _asked(ask, CONFIG, PARTITIONS, GROUPS)
    found = ClusterFacts(config=parse_config(answers.get(CONFIG) or ""))
    if not found.config:
        return found
    groups = parse_groups(answers.get(GROUPS) or "")
    user = user or own_user()
    names = dict.fromkeys(filter(None, (first_name(group.names) for group in groups)))
    nodes = ("scontrol", "--oneliner", "show", "node", ",".join(list(names)[:NODES_ASKED]))
    answers |= _asked(
        ask,
        *((*_of_accounts(user), FEDERATION) if found.keeps_accounts else ()),
        *((SRUN_HELP, *([nodes] if names else [])) if whole else ()),
    )
    help_of_srun, federation = answers.get(SRUN_HELP), answers.get(FEDERATION)
    found = replace(
        found,
        partitions=parse_partitions(answers.get(PARTITIONS) or ""),
        groups=with_nodes(groups, answers.get(nodes) or ""),
        pyxis="--container-image" in help_of_srun if help_of_srun else None,
        federation=federation.strip() if federation is not None else None,
    )
    return _with_accounts(found, answers, user) if found.keeps_accounts else found


def _of_accounts(user: str) -> tuple[Command, ...]:
    """Return the commands that show what a user may use."""
    return associations_command(user), QOS, default_account_command(user)


def _with_accounts(facts: ClusterFacts, answers: Answers, user: str) -> ClusterFacts:
    """Add the answers to the commands of `_of_accounts` to what is known of a cluster."""
    listed = answers.get(associations_command(user))
    associations = None if listed is None else parse_associations(listed, facts.name)
    if not associations and user.isdigit():  # sacctmgr knows users by name alone, and slurmctld may know this one's
        associations = None
    # Of several clusters in one database each has a default account of its own, and the first is shown.
    one_cluster = len({line.partition("|")[0].lower() for line in (listed or "").splitlines()}) <= 1
    default_account = (answers.get(default_account_command(user)) or "").strip().partition("\n")[0] or None
    return replace(
        facts,
        associations=associations,
        qos=parse_qos(answers.get(QOS) or "") or None,
        default_account=default_account if one_cluster else None,
    )


def parse_config(text: str) -> dict[str, str]:
    """Read `scontrol show config`; {} for anything else."""
    found = parse_show_config(text)
    return found if "ClusterName" in found and "SLURM_VERSION" in found else {}


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Read `scontrol show partition --oneliner`; () if a line cannot be read, since it may be that of any partition."""
    found = [_fields(line) for line in text.splitlines() if line.strip()]
    return tuple(map(_partition, found)) if all(fields.get("PartitionName") for fields in found) else ()


def _partition(fields: Mapping[str, str]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        default=fields.get("Default") == "YES",
        state=fields.get("State", "UP"),
        nodes=parse_count(fields.get("TotalNodes", "")) or 0,
        node_names=_word(fields.get("Nodes", "")),
        max_time_min=parse_minutes(fields.get("MaxTime", "")),
        min_nodes=parse_count(fields.get("MinNodes", "")) or 0,
        max_nodes=parse_count(fields.get("MaxNodes", "")),
        allowed_accounts=_names(fields.get("AllowAccounts", "ALL")),
        denied_accounts=_names(fields.get("DenyAccounts", "")) or (),
        allowed_qos=_names(fields.get("AllowQos", "ALL")),
        denied_qos=_names(fields.get("DenyQos", "")) or (),
        qos=_word(fields.get("QoS", "")),
        priority_tier=parse_count(fields.get("PriorityTier", "")) or 0,
        preempt_mode=fields.get("PreemptMode", ""),
        grace_s=parse_duration(fields.get("GraceTime", "")),
        exclusive=fields.get("OverSubscribe") == "EXCLUSIVE",
        cpus_per_node=parse_count(fields.get("MaxCPUsPerNode", "")),
        memory_mb=parse_count(fields.get("MaxMemPerNode", "")),
        memory_per_cpu_mb=parse_count(fields.get("MaxMemPerCPU", "")),
    )


def parse_groups(text: str) -> tuple[NodeGroup, ...]:
    """Read `sinfo --noheader --exact --format=SINFO_FORMAT`: a line for nodes that are alike and in one state."""
    found: dict[tuple[object, ...], NodeGroup] = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) != len(SINFO_FORMAT.split("|")):
            continue
        name, number, cpus, _sockets, _cores, threads, memory, gres, features, state, names = words
        count = _least(number)
        if not count:
            continue
        group = NodeGroup(
            partition=name,
            count=count,
            usable=count if state.rstrip("~#!%@^+-$") in AT_WORK else 0,
            cpus=_least(cpus) or 0,
            threads=_least(threads) or 1,
            memory_mb=_least(memory) or 0,
            gpus=parse_gres(gres),
            features=tuple(sorted(_names(features) or ())),
            names=names,
        )
        kind = (name, group.cpus, group.threads, group.memory_mb, group.gpus, group.features)
        known = found.get(kind)
        if known is None:
            found[kind] = group
        else:
            # Of nodes in several states, those that work stand for all.
            first = known if known.usable >= group.usable else group
            found[kind] = replace(first, count=known.count + count, usable=known.usable + group.usable)
    return tuple(found.values())


def parse_gres(text: str) -> tuple[tuple[str, int], ...]:
    """Return the GPUs in SLURM's words for the GRES of a node: "gpu:a100:4(S:0-1),nic:2" -> (("a100", 4),).

    They are NAME[:TYPE][:no_consume]:NUMBER (slurm.conf(5), Gres). Without a number there is one. GPUs that are not consumed
    are given to several jobs, and one job still has no more than there are.
    """
    found: dict[str, int] = {}
    for word in re.sub(r"\([^()]*\)", "", text).split(","):  # "(null)" is none
        name, *parts = word.strip().split(":")
        if name.lower() != "gpu":
            continue
        parts = [part for part in parts if part.lower() != "no_consume"]
        number = _amount(parts[-1]) if parts else 1
        if number is None and len(parts) == 1:
            parts, number = [*parts, "1"], 1
        if number:
            kind = ":".join(parts[:-1])
            found[kind] = found.get(kind, 0) + number
    return tuple(found.items())


def _amount(text: str) -> int | None:
    """Return a number of a GRES, "4" or "2K"."""
    match = re.fullmatch(r"([0-9]{1,12})([KMGTP]?)", text.strip().upper())
    return int(match[1]) * 1024 ** ("KMGTP".index(match[2]) + 1 if match[2] else 0) if match else None


def with_nodes(groups: Iterable[NodeGroup], text: str) -> tuple[NodeGroup, ...]:
    """Add what `scontrol show node --oneliner` says of one node of each group.

    Those are CPUs and memory without what is kept for the system, and the address.
    """
    by_name = {fields["NodeName"]: fields for line in text.splitlines() if (fields := _fields(line)).get("NodeName")}
    found = []
    for group in groups:
        its = by_name.get(first_name(group.names))
        if its is not None:
            kept_mb = parse_count(its.get("MemSpecLimit", "")) or 0
            group = replace(
                group,
                cpus=parse_count(its.get("CPUEfctv", "")) or group.cpus,
                memory_mb=max(0, group.memory_mb - kept_mb),
                address=its.get("NodeAddr", ""),
            )
        found.append(group)
    return tuple(found)


def first_name(names: str) -> str:
    """Return the first name of SLURM's list of nodes, "rack[1-2]-n[01-04],x" -> "rack1-n01"; "" if it cannot be read."""
    first = re.match(f"{GROUP}(?=,|$)", names)
    if first is None:
        return ""
    # Of a range only its beginning: a list of all names of a large cluster is long.
    shortened = re.sub(r"\[([0-9]+)[^\]]*\]", r"[\1]", first[0])
    try:
        return expand_nodelist(shortened)[0]
    except EnvironmentMismatchError:
        return ""


def parse_qos(text: str) -> tuple[Qos, ...] | None:
    """Read `sacctmgr -nP show qos format=...` with QOS_COLUMNS; None if a row cannot be read, since it may be that of any."""
    rows = _rows(text, QOS_COLUMNS)
    return None if rows is None else tuple(map(_qos, rows))


def _qos(row: Mapping[str, str]) -> Qos:
    return Qos(
        name=row["Name"],
        flags=frozenset(flag.lower() for flag in _words(row["Flags"])),
        grace_s=parse_duration(row["GraceTime"]),
        preempt=tuple(_words(row["Preempt"])),
        preempt_mode=row["PreemptMode"],
        wall_min=parse_minutes(row["MaxWall"]),
    )


def parse_associations(text: str, cluster: str) -> tuple[Association, ...] | None:
    """Read `sacctmgr -nP show assoc user=... format=...` with ASSOC_COLUMNS, and keep those of one cluster; None as above."""
    rows = _rows(text, ASSOC_COLUMNS)
    return (
        None if rows is None else tuple(_association(row) for row in rows if row["Cluster"].lower() == cluster.lower())
    )


def _association(row: Mapping[str, str]) -> Association:
    return Association(
        account=row["Account"],
        partition=row["Partition"],
        qos=tuple(_words(row["QOS"])),
        default_qos=row["DefaultQOS"],
        wall_min=parse_minutes(row["MaxWall"]),
    )


def _rows(text: str, columns: Sequence[str]) -> list[dict[str, str]] | None:
    """Return the rows of sacctmgr's output; None if one cannot be read, since it may be that of any account or QOS."""
    rows = [line.split("|") for line in text.splitlines() if line.strip()]
    if not all(len(row) == len(columns) and row[0] for row in rows):
        return None
    return [dict(zip(columns, row, strict=True)) for row in rows]


def parse_minutes(text: str) -> int | None:
    """Return minutes of a limit as scontrol and sacctmgr write it, "1-00:00:00"; None: there is none."""
    text = text.strip()
    if text.upper() in _UNLIMITED:
        return None
    seconds = parse_duration(text)
    return None if seconds is None else int(seconds // 60)


def _fields(line: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in line.split():
        name, equals, value = word.partition("=")
        if equals:
            fields.setdefault(name, value)
    return fields


def _names(text: str) -> tuple[str, ...] | None:
    """Return the names of a list; None for ALL."""
    return None if text == "ALL" else tuple(_words(text))


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word and word not in ("(null)", "N/A")]


def _word(text: str) -> str:
    return "" if text in ("N/A", "(null)") else text


def parse_count(text: str) -> int | None:
    """Return a number without a unit; None for UNLIMITED and all else."""
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text.strip()) else None


def _least(text: str) -> int | None:
    """Return the number in a column of sinfo, where "8+" is at least 8 and "4K" is 4,096 (it shortens large counts)."""
    match = re.fullmatch(r"([0-9]{1,12})(K?)\+?", text.strip())
    return int(match[1]) * (1024 if match[2] else 1) if match else None
