"""Facts of a cluster: its partitions, nodes, GPUs, limits and settings.

Plain values, which `slurm.read_facts` makes of the output of SLURM's commands, and what follows from them for a job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from msgspec.structs import replace

from slurmtrain.slurm.parse_values import Version, parse_duration, parse_version

DEFAULT_QOS = "normal"  # which SLURM's database always has (slurmctld's job_mgr.c)


class Qos(msgspec.Struct, frozen=True):
    """A quality of service.

    Attributes:
        flags: its flags in lower case; "denyonlimit" refuses a job above a limit, "overpartqos" puts its limits before
            those of a partition's QOS, "partitiontimelimit" lets a job exceed the partition's.
        grace_s: seconds that a preempted job of it lives on; None: not known.
        wall_min: minutes that a job of it may take; None: no limit.
    """

    name: str
    flags: frozenset[str] = frozenset()
    grace_s: float | None = None
    preempt: tuple[str, ...] = ()
    preempt_mode: str = ""
    wall_min: int | None = None


class Association(msgspec.Struct, frozen=True):
    """What accounting allows this user under one account.

    Attributes:
        partition: the only partition that it is for; "": all.
        qos: those that may be used; (): not known.
        wall_min: minutes that a job under it may take; None: no limit.
    """

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    wall_min: int | None = None


class Partition(msgspec.Struct, frozen=True):
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


class NodeGroup(msgspec.Struct, frozen=True):
    """Nodes of a partition that are alike.

    Attributes:
        count, usable: how many there are, and how many are in a state in which jobs run now or soon.
        cpus: CPUs as SLURM counts them: threads, if it tells cores from threads.
        threads: threads of each core.
        memory_mb: memory that jobs can have.
        gpus: GPUs of each node by type; the type is "" where SLURM is not told one.
        names: SLURM's list of their names, of those that sinfo put together first.
        address: address of one of them; "": not asked.
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

    @property
    def gpu_count(self) -> int:
        return sum(number for _, number in self.gpus)


class ClusterFacts(msgspec.Struct, frozen=True):
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
    """

    config: Mapping[str, str] = msgspec.field(default_factory=dict)
    partitions: tuple[Partition, ...] = ()
    groups: tuple[NodeGroup, ...] = ()
    qos: tuple[Qos, ...] | None = None
    associations: tuple[Association, ...] | None = None
    default_account: str | None = None
    federation: str | None = None
    pyxis: bool | None = None

    @property
    def name(self) -> str:
        return self.config.get("ClusterName", "").strip()

    @property
    def version(self) -> Version | None:
        return parse_version(self.config.get("SLURM_VERSION", ""))

    @property
    def keeps_accounts(self) -> bool:
        """Whether there is a database of accounts and limits."""
        return self.config.get("AccountingStorageType", "").endswith("slurmdbd")

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


class Limit(msgspec.Struct, frozen=True):
    """One limit that holds.

    Attributes:
        most: the largest amount.
        of: whose it is, in words: "QOS normal", "account ml".
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


def wall_limit(facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None) -> Limit | None:
    """Return the limit on the minutes of a job that accounting sets, besides the partition's own; None if there is none.

    SLURM takes it from the first of these that sets it (slurm.schedmd.com/resource_limits.html, "Hierarchy"): the
    partition's QOS, the job's QOS, the user's association. The flag OverPartQOS puts the job's QOS first. It is not known
    where it is not known which QOS the job gets: that one may lift the limit of an account.
    """
    association = association_of(facts, account, partition.name)
    own = qos_of(facts, association, qos)
    its = facts.qos_named(partition.qos) if partition.qos else None
    if own is None or not facts.enforces("limits"):
        return None
    found = [(own.wall_min, f"QOS {own.name}")]
    if its is not None:
        of_partition = (its.wall_min, f"QOS {its.name} of partition {partition.name}")
        found.insert(1 if "overpartqos" in own.flags else 0, of_partition)
    if association is not None:
        found.append((association.wall_min, f"account {association.account}"))
    return next((Limit(most, of) for most, of in found if most is not None), None)


# How a job is preempted here, and how long it lives on then.


NOT_AT_ALL = ("", "preempt/none", "(null)")  # of PreemptType


class Preemption(msgspec.Struct, frozen=True):
    """How a job is preempted, and how long it lives on then, as far as SLURM says.

    Attributes:
        mode: in SLURM's words: "OFF", "REQUEUE", "CANCEL" or "SUSPEND,GANG"; "": not known.
        of: whose settings these are: "partition low", "QOS cheap".
        grace_s: seconds from the announcement to SIGTERM, for a job that ends; None: not known.
        kill_wait_s: seconds from SIGTERM at the end to SIGKILL, also at the time limit; None: not known.
    """

    mode: str
    of: str = ""
    grace_s: float | None = None
    kill_wait_s: float | None = None

    @property
    def ends_jobs(self) -> bool:
        """Whether a preempted job ends, rather than being suspended, or left alone."""
        return self.mode in ("REQUEUE", "CANCEL")

    @property
    def to_leave_s(self) -> float | None:
        """Seconds from the announcement of a preemption to SIGKILL; None if SLURM does not say."""
        return None if self.kill_wait_s is None else (self.grace_s or 0.0) + self.kill_wait_s


def preemption_of(
    facts: ClusterFacts, partition: str | None, *, account: str | None = None, qos: str | None = None
) -> Preemption:
    """Return how a job of this partition, account and QOS is preempted.

    Args:
        partition: of several names, separated by commas, the first counts: where the job will run is not known yet. None: the
            default one.
        account, qos: None: the default ones.
    """
    by, mode = facts.config.get("PreemptType", ""), facts.config.get("PreemptMode", "").upper()
    kill_wait_s, own = parse_duration(facts.config.get("KillWait", "")), facts.partition(first_partition(partition))
    if own is None or by in NOT_AT_ALL:
        return Preemption("OFF", kill_wait_s=kill_wait_s)
    found = Preemption(own.preempt_mode.upper() or mode, f"partition {own.name}", own.grace_s, kill_wait_s)
    if by == "preempt/qos":
        found = Preemption(mode, f"QOS {qos}" if qos else "its QOS", None, kill_wait_s)
        its = qos_of(facts, association_of(facts, account, own.name), qos)
        if its is not None:
            mode = mode if its.preempt_mode.upper() in ("", "CLUSTER") else its.preempt_mode.upper()
            found = Preemption(mode, f"QOS {its.name}", its.grace_s, kill_wait_s)
    return found if found.ends_jobs else replace(found, grace_s=None)


def first_partition(names: str | None) -> str | None:
    """Return the first of several partitions that a job may run in, as a person writes them: "high,low"."""
    return names.partition(",")[0] if names else None
