"""Facts of a cluster: its partitions, nodes, GPUs, limits and settings.

Plain values: `slurm.parse_facts` makes them of the output of SLURM's commands, and `slurm.read_facts` runs those.
"""

from __future__ import annotations

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
        user_tres: amounts of all jobs of a user together, and so of one.
        account_tres: amounts of all jobs of an account together, and so of one.
    """

    wall_min: int | None = None
    tres: Mapping[str, int] = field(default_factory=dict)
    tres_per_node: Mapping[str, int] = field(default_factory=dict)
    group_tres: Mapping[str, int] = field(default_factory=dict)
    user_tres: Mapping[str, int] = field(default_factory=dict)
    account_tres: Mapping[str, int] = field(default_factory=dict)


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
    """

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    limits: Limits = Limits()


@dataclass(frozen=True)
class Partition:
    """A partition, with None or () where there is no limit.

    Attributes:
        state: "UP": starts jobs; "DOWN": lets them wait; "DRAIN" and "INACTIVE": takes none.
        nodes: how many there are.
        node_names: SLURM's list of their names; "": not known.
        max_time_min: minutes.
        allowed_accounts, allowed_qos: None: all.
        qos: the partition's own QOS, whose limits hold for all of its jobs.
        priority_tier: where partitions preempt each other, jobs of a higher one preempt those of a lower one.
        preempt_mode: "OFF", "REQUEUE", "CANCEL" or "SUSPEND,GANG".
        grace_s: seconds from the announcement of a preemption to the end.
        exclusive: a job gets whole nodes, whatever it asks for.
        cpus_per_node, memory_mb: what a job may have of a node at most.
        memory_per_cpu_mb: what a job may have for each CPU; SLURM gives a job that asks for more the CPUs for it.
    """

    name: str
    default: bool = False
    state: str = "UP"
    nodes: int = 0
    node_names: str = ""
    max_time_min: int | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    allowed_accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    allowed_qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()
    qos: str = ""
    priority_tier: int = 0
    preempt_mode: str = ""
    grace_s: float | None = None
    exclusive: bool = False
    root_only: bool = False
    cpus_per_node: int | None = None
    memory_mb: int | None = None
    memory_per_cpu_mb: int | None = None

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


def keeps_accounts(config: Mapping[str, str]) -> bool:
    """Return whether slurm.conf names a database of accounts and limits."""
    return config.get("AccountingStorageType", "").endswith("slurmdbd")
