"""Facts of a cluster: its partitions, nodes, GPUs, limits and settings.

Plain values: `slurm.parse_facts` makes them of the output of SLURM's commands, and `slurm.read_facts` runs those.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from slurmtrain.slurm.versions import Version, parse_version


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
        account_tres: amounts of all jobs of an account together, and so of one.
        tres_min: amounts of a job times the minutes of its time limit.
        counts: numbers of jobs, by `slurm.parse_facts.COUNTS`: where one is 0, no job gets through.
    """

    wall_min: int | None = None
    tres: Mapping[str, int] = field(default_factory=dict)
    tres_per_node: Mapping[str, int] = field(default_factory=dict)
    group_tres: Mapping[str, int] = field(default_factory=dict)
    least_tres: Mapping[str, int] = field(default_factory=dict)
    user_tres: Mapping[str, int] = field(default_factory=dict)
    account_tres: Mapping[str, int] = field(default_factory=dict)
    tres_min: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Qos:
    """A quality of service.

    Attributes:
        flags: its flags in lower case; "denyonlimit" refuses a job above a limit, "overpartqos" puts its limits before
            those of a partition's QOS, "partitiontimelimit" lets a job exceed the partition's.
        grace_s: seconds that a preempted job of it lives on; None: not known.
        limit_factor: the factor of the amounts of accounts, for its jobs; None: they are as they are.
    """

    name: str
    flags: frozenset[str] = frozenset()
    grace_s: float | None = None
    preempt: tuple[str, ...] = ()
    preempt_mode: str = ""
    limits: Limits = Limits()
    limit_factor: float | None = None


@dataclass(frozen=True)
class Account:
    """A whole account.

    Attributes:
        parent: the account above it; "": it is the root.
        group_tres: amounts of all jobs of it and of the accounts below it together, and so of one.
        counts: as of `Limits`, for all of these jobs.
    """

    name: str
    parent: str = ""
    group_tres: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Association:
    """What accounting allows this user under one account.

    Attributes:
        partition: the only partition that it is for; "": all.
        qos: those that may be used; (): not known.
        accounts: the account itself and those above it, up to the root, as far as they are known.
    """

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    limits: Limits = Limits()
    accounts: tuple[Account, ...] = ()


@dataclass(frozen=True)
class Partition:
    """A partition, with None or () where there is no limit.

    Attributes:
        state: "UP": starts jobs; "DOWN": lets them wait; "DRAIN" and "INACTIVE": takes none.
        alternate: the partition that gets its jobs while it takes none; "": there is none.
        nodes: how many there are.
        node_names: SLURM's list of their names; "": not known.
        max_time_min: minutes.
        allowed_accounts, allowed_qos, allowed_groups: None: all.
        qos: the partition's own QOS, whose limits hold for all of its jobs.
        priority_tier: where partitions preempt each other, jobs of a higher one preempt those of a lower one.
        preempt_mode: "OFF", "REQUEUE", "CANCEL" or "SUSPEND,GANG".
        grace_s: seconds from the announcement of a preemption to the end.
        exclusive: a job gets whole nodes, whatever it asks for.
        cpus_per_node, memory_mb: what a job may have of a node at most.
        memory_per_cpu_mb: what a job may have for each CPU; SLURM gives a job that asks for more the CPUs for it.
        default_memory_mb, default_memory_per_cpu_mb: what a job that names no memory gets of a node, or for each CPU; None for
            both: what the cluster says. 0: not known.
        allocates: its own SelectTypeParameters, which say what is given to one job alone; "": those of the cluster.
    """

    name: str
    default: bool = False
    state: str = "UP"
    alternate: str = ""
    nodes: int = 0
    node_names: str = ""
    max_time_min: int | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    allowed_accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    allowed_qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()
    allowed_groups: tuple[str, ...] | None = None
    qos: str = ""
    priority_tier: int = 0
    preempt_mode: str = ""
    grace_s: float | None = None
    exclusive: bool = False
    root_only: bool = False
    needs_reservation: bool = False
    cpus_per_node: int | None = None
    memory_mb: int | None = None
    memory_per_cpu_mb: int | None = None
    default_memory_mb: int | None = None
    default_memory_per_cpu_mb: int | None = None
    allocates: str = ""

    @property
    def takes_jobs(self) -> bool:
        """Whether jobs can be submitted to it; they may have to wait until it is up."""
        return self.state not in ("DRAIN", "INACTIVE")

    def takes_account(self, name: str) -> bool:
        """Return whether jobs of an account may be submitted to it (AllowAccounts, DenyAccounts)."""
        return _is_taken(name, self.allowed_accounts, self.denied_accounts)

    def takes_qos(self, name: str) -> bool:
        """Return whether jobs of a QOS may be submitted to it (AllowQos, DenyQos)."""
        return _is_taken(name, self.allowed_qos, self.denied_qos)


def _is_taken(name: str, allowed: Collection[str] | None, denied: Collection[str]) -> bool:
    low = name.lower()  # accounting knows no case
    if allowed is not None:  # with AllowAccounts, DenyAccounts is not looked at, and so for QOS (slurm.conf(5))
        return low in {each.lower() for each in allowed}
    return low not in {each.lower() for each in denied}


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
        federation: SLURM's words for the federation of which the cluster is a part; "": none; None: not known.
        default_account: this user's; None: not known.
        pyxis: whether srun on this machine takes --container-image; None: not known.
        silent: commands that gave no answer, as typed.
    """

    config: Mapping[str, str] = field(default_factory=dict)
    partitions: tuple[Partition, ...] = ()
    groups: tuple[NodeGroup, ...] = ()
    qos: tuple[Qos, ...] | None = None
    associations: tuple[Association, ...] | None = None
    default_account: str | None = None
    federation: str | None = None
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

    @property
    def is_alone(self) -> bool:
        """Whether jobs that are submitted here run here, and not at another cluster of a federation, as far as is known.

        Only clusters that share a database of accounts can be a federation.
        """
        return self.federation == "" or not self.keeps_accounts

    @property
    def slurm_user_id(self) -> int | None:
        """The number of SLURM's own user, which may do what root may; None: not known."""
        match = re.search(r"\((\d{1,10})\)$", self.config.get("SlurmUser", "").strip())
        return int(match[1]) if match else None

    def gives_memory(self, partition: Partition) -> bool:
        """Return whether the memory that a job asks for is its own, and so limits it.

        Otherwise only --mem is looked at, to leave out nodes that have less, whatever runs there (slurm.conf(5),
        SelectTypeParameters).
        """
        words = partition.allocates or self.config.get("SelectTypeParameters", "")
        return "MEMORY" in words.upper()

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
