"""Facts of a cluster: its partitions, nodes, GPUs, limits and settings, as SLURM's commands print them.

Parsing only; `slurm.read_facts` runs the commands. The plain output is read, not `--json`: its fields have had the same
names from 22.05 to 25.11, while the JSON changes its shape with each release (data_parser/v0.0.39, 40, ...), and Debian's
22.05 is built without it. Whatever cannot be understood is left out, so that an odd cluster has fewer facts, not wrong ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurmtrain.slurm.client import AT_WORK, parse_duration, parse_show_config
from slurmtrain.slurm.versions import Version, parse_version

# Columns of `sinfo --format`: partition, nodes, CPUs, sockets, cores, threads, memory, GRES, features, state, node list.
SINFO_FORMAT = "%R|%D|%c|%X|%Y|%Z|%m|%G|%f|%T|%N"
QOS_COLUMNS = (
    *("Name", "Flags", "GraceTime", "Preempt", "PreemptMode", "MaxWall", "MaxTRES", "MaxTRESPerNode", "MaxTRESPU"),
    *("GrpTRES", "MinTRES", "MaxJobsPU", "MaxSubmitPU"),
)
ASSOC_COLUMNS = (
    *("Cluster", "Account", "Partition", "QOS", "DefaultQOS", "MaxWall", "MaxTRES", "MaxTRESPerNode", "GrpTRES"),
    *("MaxJobs", "MaxSubmit"),
)
_UNLIMITED = {"", "UNLIMITED", "INFINITE", "NONE", "N/A", "(null)", "-1"}
_KILO = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}  # in MB


@dataclass(frozen=True)
class Limits:
    """What one job may ask for; None or a missing key: no limit.

    Attributes:
        wall_min: minutes.
        tres: amounts of a job by SLURM's name: "cpu", "mem" (MB), "node", "gres/gpu", "gres/gpu:a100".
        tres_per_node: the same for each of its nodes.
        group_tres: amounts of all jobs together, and so of one.
        least_tres: a job asks for this much at least.
        user_tres: amounts of all jobs of a user together, and so of one.
    """

    wall_min: int | None = None
    tres: Mapping[str, int] = field(default_factory=dict)
    tres_per_node: Mapping[str, int] = field(default_factory=dict)
    group_tres: Mapping[str, int] = field(default_factory=dict)
    least_tres: Mapping[str, int] = field(default_factory=dict)
    user_tres: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Qos:
    """A quality of service.

    Attributes:
        flags: its flags in lower case; "denyonlimit" refuses a job above a limit, "overpartqos" puts its limits before
            those of a partition's QOS, "partitiontimelimit" lets a job exceed the partition's.
        grace_s: seconds that a preempted job of it lives on; None: not known.
    """

    name: str
    flags: frozenset[str] = frozenset()
    grace_s: float | None = None
    preempt: tuple[str, ...] = ()
    preempt_mode: str = ""
    limits: Limits = Limits()


@dataclass(frozen=True)
class Association:
    """What accounting allows this user under one account.

    Attributes:
        partition: the only partition that it is for; "": all.
        qos: those that may be used; (): not known.
        account_tres: amounts of all jobs of the account together, and so of one.
    """

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    limits: Limits = Limits()
    account_tres: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Partition:
    """A partition, with None or () where there is no limit.

    Attributes:
        state: "UP" if it starts jobs.
        max_time_min, default_time_min: minutes.
        allowed_accounts, allowed_qos, allowed_groups: None: all.
        qos: the partition's own QOS, whose limits hold for all of its jobs.
        preempt_mode: "OFF", "REQUEUE", "CANCEL" or "SUSPEND,GANG".
        grace_s: seconds from the announcement of a preemption to the end.
        exclusive: a job gets whole nodes, whatever it asks for.
        cpus_per_node, memory_mb: what a job may have of a node at most.
        memory_per_cpu_mb: what a job may have for each CPU; SLURM gives a job that asks for more the CPUs for it.
        no_default_memory: no amount is named for jobs that ask for none, so that they get all of a node's memory.
    """

    name: str
    default: bool = False
    state: str = "UP"
    nodes: int = 0
    max_time_min: int | None = None
    default_time_min: int | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    allowed_accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    allowed_qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()
    allowed_groups: tuple[str, ...] | None = None
    qos: str = ""
    preempt_mode: str = ""
    grace_s: float | None = None
    exclusive: bool = False
    root_only: bool = False
    needs_reservation: bool = False
    cpus_per_node: int | None = None
    memory_mb: int | None = None
    memory_per_cpu_mb: int | None = None
    no_default_memory: bool = False


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of a partition that are alike.

    Attributes:
        count, usable: how many there are, and how many are in a state in which jobs run now or soon.
        cpus: CPUs as SLURM counts them: threads, if it tells cores from threads.
        threads: threads of each core.
        memory_mb: memory that jobs can have.
        gpus: GPUs of each node by type; the type is "" where SLURM is not told one.
        names: SLURM's list of their names, of those that sinfo put together first.
        address: address of one of them; "": not asked.
        version: release of slurmd on one of them.
    """

    partition: str
    count: int
    usable: int
    cpus: int
    threads: int
    memory_mb: int
    gpus: tuple[tuple[str, int], ...] = ()
    features: tuple[str, ...] = ()
    names: str = ""
    address: str = ""
    version: Version | None = None

    @property
    def gpu_count(self) -> int:
        return sum(number for _, number in self.gpus)

    def gpus_of(self, gpu_type: str | None) -> int:
        """Return the number of GPUs of a type (None: of any) on each node."""
        return sum(number for name, number in self.gpus if gpu_type is None or name.lower() == gpu_type.lower())


@dataclass(frozen=True)
class ClusterFacts:
    """What SLURM has said about a cluster.

    Attributes:
        config: slurm.conf as the controller sees it; {}: it did not answer, and nothing else is known either.
        partitions: all that there are; (): not known.
        groups: nodes of each partition; (): not known.
        qos: all that there are; None: not known, or no accounting.
        associations: this user's on this cluster; None: not known, or no accounting.
        default_account: this user's; None: not known.
        switches: text of `scontrol show topology`; "": none.
        mpi_types: what `srun --mpi` takes.
        pyxis: whether srun on this machine takes --container-image; None: not known.
        silent: commands that gave no answer, as typed.
    """

    config: Mapping[str, str] = field(default_factory=dict)
    partitions: tuple[Partition, ...] = ()
    groups: tuple[NodeGroup, ...] = ()
    qos: tuple[Qos, ...] | None = None
    associations: tuple[Association, ...] | None = None
    default_account: str | None = None
    switches: str = ""
    mpi_types: tuple[str, ...] = ()
    pyxis: bool | None = None
    silent: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.config.get("ClusterName", "").strip()

    @property
    def version(self) -> Version | None:
        return parse_version(self.config.get("SLURM_VERSION", ""))

    @property
    def keeps_accounts(self) -> bool:
        """Whether there is a database of accounts and limits."""
        return keeps_accounts(self.config)

    def enforces(self, what: str) -> bool:
        """Return whether accounting refuses jobs for `what`: "associations", "limits", "qos"."""
        words = {word.strip().lower() for word in self.config.get("AccountingStorageEnforce", "").split(",")}
        implied = {
            "associations": {"limits", "qos", "safe", "wckeys", "all"},
            "limits": {"safe", "all"},
            "qos": {"all"},
        }
        return bool(words & {what, *implied.get(what, ())})

    def partition(self, name: str | None) -> Partition | None:
        """Return a partition by its name (None: the default one), or None if there is none."""
        for each in self.partitions:
            if each.name == name or (name is None and each.default):
                return each
        return None

    def nodes_of(self, partition: str) -> tuple[NodeGroup, ...]:
        return tuple(group for group in self.groups if group.partition == partition)

    def qos_named(self, name: str) -> Qos | None:
        return next((each for each in self.qos or () if each.name.lower() == name.lower()), None)

    @property
    def dynamic(self) -> bool:
        """Whether nodes may join that SLURM does not list now, so that what is there today is no limit."""
        suspends = self.config.get("SuspendProgram", "(null)") not in ("", "(null)")
        return suspends or "cloud" in self.config.get("SlurmctldParameters", "").lower()


def keeps_accounts(config: Mapping[str, str]) -> bool:
    """Return whether slurm.conf names a database of accounts and limits."""
    return config.get("AccountingStorageType", "").endswith("slurmdbd")


def parse_config(text: str) -> dict[str, str]:
    """Read `scontrol show config`; {} for anything else."""
    found = parse_show_config(text)
    return found if "ClusterName" in found and "SLURM_VERSION" in found else {}


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Read `scontrol show partition --oneliner`."""
    return tuple(_partition(fields) for line in text.splitlines() if (fields := _fields(line)).get("PartitionName"))


def _partition(fields: Mapping[str, str]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        default=fields.get("Default") == "YES",
        state=fields.get("State", "UP"),
        nodes=_count(fields.get("TotalNodes", "")) or 0,
        max_time_min=parse_minutes(fields.get("MaxTime", "")),
        default_time_min=parse_minutes(fields.get("DefaultTime", "")),
        min_nodes=_count(fields.get("MinNodes", "")) or 0,
        max_nodes=_count(fields.get("MaxNodes", "")),
        allowed_accounts=_names(fields.get("AllowAccounts", "ALL")),
        denied_accounts=_names(fields.get("DenyAccounts", "")) or (),
        allowed_qos=_names(fields.get("AllowQos", "ALL")),
        denied_qos=_names(fields.get("DenyQos", "")) or (),
        allowed_groups=_names(fields.get("AllowGroups", "ALL")),
        qos=_word(fields.get("QoS", "")),
        preempt_mode=fields.get("PreemptMode", ""),
        grace_s=parse_duration(fields.get("GraceTime", "")),
        exclusive=fields.get("OverSubscribe") == "EXCLUSIVE",
        root_only=fields.get("RootOnly") == "YES",
        needs_reservation=fields.get("ReqResv") == "YES",
        cpus_per_node=_count(fields.get("MaxCPUsPerNode", "")),
        memory_mb=_count(fields.get("MaxMemPerNode", "")),
        memory_per_cpu_mb=_count(fields.get("MaxMemPerCPU", "")),
        no_default_memory=not any(_count(fields.get(name, "")) for name in ("DefMemPerCPU", "DefMemPerNode"))
        and "DefMemPerGPU" not in fields.get("JobDefaults", ""),
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
    """Return the GPUs in SLURM's words for the GRES of a node: "gpu:a100:4(S:0-1),nic:2" -> (("a100", 4),)."""
    found: dict[str, int] = {}
    for word in _outside_brackets(text):
        parts = word.strip().split(":")
        if parts[0].lower() != "gpu":
            continue
        number = _count(parts[-1]) if len(parts) > 1 else 1
        if number:
            kind = ":".join(parts[1:-1])
            found[kind] = found.get(kind, 0) + number
    return tuple(found.items())


def _outside_brackets(text: str) -> list[str]:
    """Split at commas, without what stands in brackets: (S:0-1,3), (IDX:0,2)."""
    return re.sub(r"\([^()]*\)", "", text).split(",") if text and text != "(null)" else []


def with_nodes(groups: Iterable[NodeGroup], text: str) -> tuple[NodeGroup, ...]:
    """Add what `scontrol show node --oneliner` says of one node of each group.

    Those are CPUs and memory without what is kept for the system, the address and the version.
    """
    by_name = {fields["NodeName"]: fields for line in text.splitlines() if (fields := _fields(line)).get("NodeName")}
    found = []
    for group in groups:
        its = by_name.get(first_name(group.names))
        if its is not None:
            kept_mb = _count(its.get("MemSpecLimit", "")) or 0
            group = replace(
                group,
                cpus=_count(its.get("CPUEfctv", "")) or group.cpus,
                memory_mb=max(0, group.memory_mb - kept_mb),
                address=its.get("NodeAddr", ""),
                version=parse_version(its.get("Version", "")),
            )
        found.append(group)
    return tuple(found)


def first_name(names: str) -> str:
    """Return the first name of SLURM's list of nodes, "rack[1-2]-n[01-04],x" -> "rack1-n01"; "" if it cannot be read."""
    from slurmtrain.errors import EnvironmentMismatchError
    from slurmtrain.slurm.nodelist import expand_nodelist

    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+(?=,|$)", names)
    if first is None:
        return ""
    # Of a range only its beginning: a list of all names of a large cluster is long.
    shortened = re.sub(r"\[([0-9]+)[^\]]*\]", r"[\1]", first[0])
    try:
        return expand_nodelist(shortened)[0]
    except EnvironmentMismatchError:
        return ""


def parse_qos(text: str) -> tuple[Qos, ...]:
    """Read `sacctmgr -nP show qos format=...` with QOS_COLUMNS."""
    found = []
    for row in _rows(text, QOS_COLUMNS):
        limits = replace(_limits(row), least_tres=parse_tres(row["MinTRES"]), user_tres=parse_tres(row["MaxTRESPU"]))
        flags = frozenset(flag.lower() for flag in _words(row["Flags"]))
        preempt = tuple(_words(row["Preempt"]))
        grace_s = parse_duration(row["GraceTime"])
        found.append(Qos(row["Name"], flags, grace_s, preempt, row["PreemptMode"], limits))
    return tuple(found)


def parse_associations(text: str, cluster: str) -> tuple[Association, ...]:
    """Read `sacctmgr -nP show assoc user=... format=...` with ASSOC_COLUMNS, and keep those of one cluster."""
    return tuple(
        Association(
            account=row["Account"],
            partition=row["Partition"],
            qos=tuple(_words(row["QOS"])),
            default_qos=row["DefaultQOS"],
            limits=_limits(row),
        )
        for row in _rows(text, ASSOC_COLUMNS)
        if row["Cluster"].lower() == cluster.lower()
    )


def with_account_limits(associations: Iterable[Association], text: str) -> tuple[Association, ...]:
    """Add the limits of whole accounts, of which `sacctmgr -nP show assoc account=... user= format=...` shows the own ones."""
    amounts = {row["Account"].lower(): parse_tres(row["GrpTRES"]) for row in _rows(text, ASSOC_COLUMNS)}
    return tuple(replace(each, account_tres=amounts.get(each.account.lower(), {})) for each in associations)


def _limits(row: Mapping[str, str]) -> Limits:
    return Limits(
        wall_min=parse_minutes(row["MaxWall"]),
        tres=parse_tres(row["MaxTRES"]),
        tres_per_node=parse_tres(row["MaxTRESPerNode"]),
        group_tres=parse_tres(row["GrpTRES"]),
    )


def _rows(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    rows = [line.split("|") for line in text.splitlines()]
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns) and row[0]]


def parse_tres(text: str) -> dict[str, int]:
    """Read amounts as sacctmgr writes them: "cpu=8,gres/gpu:a100=2,mem=64G" -> memory in MB."""
    found = {}
    for word in _words(text):
        name, _, amount = word.partition("=")
        number = _megabytes(amount) if name == "mem" else _count(amount)
        if number is not None:
            found[name.lower()] = number
    return found


def parse_minutes(text: str) -> int | None:
    """Return minutes of a limit as scontrol and sacctmgr write it, "1-00:00:00"; None: there is none."""
    text = text.strip()
    if text.upper() in _UNLIMITED:
        return None
    seconds = parse_duration(text)
    return None if seconds is None else int(seconds // 60)


def parse_mpi_types(text: str) -> tuple[str, ...]:
    """Read `srun --mpi=list`, which prints a heading and then a name on each line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and ":" not in line]
    return tuple(line for line in lines if re.fullmatch(r"[a-z0-9_]+", line) and line != "none")


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


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text.strip()) else None


def _least(text: str) -> int | None:
    """Return the number in a column of sinfo, where "8+" is at least 8 and "4K" is 4,096 (it shortens large counts)."""
    match = re.fullmatch(r"([0-9]{1,12})(K?)\+?", text.strip())
    return int(match[1]) * (1024 if match[2] else 1) if match else None


def _megabytes(text: str) -> int | None:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]+)?)([KMGTP]?)", text.strip())
    return int(float(match[1]) * _KILO[match[2]]) if match else None
