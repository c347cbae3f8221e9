"""conf/cluster/NAME.yaml, as `probe` writes it, from the facts of a cluster: pure functions.

Every value has a comment that tells where it comes from. What SLURM does not say becomes a commented line with a question.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import yaml

from slurmtrain.errors import ConfigError
from slurmtrain.planner.hardware import gpu_of
from slurmtrain.report.page.units import listed
from slurmtrain.slurm.facts import ClusterFacts, Limit, NodeGroup, Partition, association_of, qos_of, wall_limit
from slurmtrain.system.texts import roughly

WIDTH = 112
COMMENT_COLUMN = 26
DAY_MIN = 1440
LEAD_S = 300
# Models of GPU that are sold with several amounts of memory, in GB. `planner.hardware` has the smallest.
SEVERAL_MEMORIES = {"A100": (40, 80), "V100": (16, 32), "GH200": (96, 144), "H20": (96, 141)}
# Cards whose error correction takes a sixteenth of their memory.
ECC_IN_MEMORY = {"L40S", "L40", "L4", "A40", "A10G", "A10", "T4"}
_MEMORY = re.compile(r"(?<![0-9])(\d{1,3})\s?gi?b?\b", re.IGNORECASE)
_PART = re.compile(r"\d+g[._](\d+)gb", re.IGNORECASE)  # a part of a GPU (MIG) and its memory


@dataclass(frozen=True)
class Entry:
    """A field of the file.

    Attributes:
        value: what is written; with `question` a proposal, in a comment. None: there is none to propose.
        why: where it comes from, or the question.
    """

    field: str
    value: object
    why: str
    question: bool = False

    def lines(self) -> list[str]:
        """Return the field with its comment beside it, or above it where it is long."""
        text = yaml.safe_dump(self.value, default_flow_style=True, width=10_000, allow_unicode=True)
        value = "..." if self.value is None else text.removesuffix("...\n").strip()
        setting = f"{'# ' if self.question else ''}{self.field}: {value}"
        beside = f"{setting.ljust(COMMENT_COLUMN)} # {on_one_line(self.why)}"
        return [beside] if len(beside) <= WIDTH else [*_comment(self.why), setting]


@dataclass(frozen=True)
class ClusterFile:
    """The content of a cluster's file.

    Attributes:
        name: of the file without .yaml, and so of the cluster in commands.
    """

    name: str
    partition: str
    title: str
    entries: tuple[Entry, ...]

    @property
    def values(self) -> dict[str, object]:
        """The fields that it sets."""
        return {each.field: each.value for each in self.entries if not each.question}

    @property
    def questions(self) -> tuple[str, ...]:
        return tuple(f"{each.field}: {each.why}" for each in self.entries if each.question)

    def text(self) -> str:
        """Return the file."""
        lines = [*_comment(self.title), ""]
        for entry in self.entries:
            lines += entry.lines()
        return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    lines = textwrap.wrap(on_one_line(text), WIDTH - 2, break_on_hyphens=False, break_long_words=False)
    return [f"# {line}" for line in lines]


def on_one_line(text: str) -> str:
    """Return the text on one line, without anything that could end a comment."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def describe(
    facts: ClusterFacts,
    *,
    partition: str | None = None,
    name: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    slurm_conf: str | None = None,
    taken: Collection[str] = (),
    version: str = "",
) -> ClusterFile:
    """Return the file for one partition of a cluster.

    Args:
        partition: its name; None: the default one, or if there is none, the one with the most GPUs or CPUs.
        name: of the file; None: made of SLURM's names of the cluster and, unless it is the default one, the partition.
        account, qos: what the jobs are to be submitted with; None: SLURM's defaults.
        slurm_conf: path of a slurm.conf to use instead of the machine's own.
        taken: names that the file cannot have.
        version: of this package, for the first line.

    Raises:
        ConfigError: there is no such partition, or no node in it.
    """
    chosen = choose_partition(facts, partition)
    groups = facts.nodes_of(chosen.name)
    if not groups:
        raise ConfigError(f"partition {chosen.name!r} has no nodes that sinfo shows", hint="probe --partition NAME")
    entries = [
        *_where(facts, chosen, account, qos, slurm_conf),
        *_shape(facts, chosen, groups),
        *_time(chosen, wall_limit(facts, chosen, account, qos)),
        *_of_the_person(facts, groups),
    ]
    file_name = name or name_of(facts, chosen, taken)
    title = (
        f"Cluster {facts.name}, partition {chosen.name}: written by `python -m slurmtrain probe` of slurmtrain {version}. "
        f"Use it: python -m slurmtrain +cluster={file_name} submit. Has the cluster changed since? "
        f"python -m slurmtrain probe --partition {chosen.name} --out - | diff - FILE"
    )
    return ClusterFile(file_name, chosen.name, title, tuple(entries))


def choose_partition(facts: ClusterFacts, name: str | None) -> Partition:
    """Return a partition by name, the default one, or if there is none, the one with the most GPUs or CPUs.

    Raises:
        ConfigError: there is no such partition.
    """
    if not facts.partitions:
        raise ConfigError("SLURM reports no partitions", hint="`scontrol show partition` says why")
    found = facts.partition(name)
    if found is None and name is not None:
        known = ", ".join(each.name for each in facts.partitions)
        raise ConfigError(f"there is no partition {name!r} on this cluster", hint=f"there are: {known}")

    def size(partition: Partition) -> tuple[int, int]:
        groups = facts.nodes_of(partition.name)
        return sum(each.count * each.gpu_count for each in groups), sum(each.count * each.cpus for each in groups)

    return found or max(facts.partitions, key=size)


def name_of(facts: ClusterFacts, partition: Partition, taken: Collection[str]) -> str:
    """Return the name of the file: SLURM's of the cluster, with that of a partition that is not the default one."""
    cluster, its = (re.sub(r"[^A-Za-z0-9_.-]+", "-", each).strip("-.") for each in (facts.name, partition.name))
    plain = cluster or "cluster"
    return plain if partition.default and plain not in taken else f"{plain}-{its}"


def _where(
    facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None, slurm_conf: str | None
) -> Iterable[Entry]:
    if slurm_conf is not None:
        yield Entry("slurm_conf", slurm_conf, "the one that was probed, instead of the machine's own")
    why = "the default one" if partition.default else "the one that was asked for"
    if not any(each.default for each in facts.partitions):
        why = "no partition is the default one"
    yield Entry("partition", partition.name, f"{why}; there are {listed(each.name for each in facts.partitions)}")
    if account is not None:
        yield Entry("account", account, "the one that was asked for")
    else:
        yield from _account(facts, partition)
    if qos is not None:
        yield Entry("qos", qos, "the one that was asked for")
    else:
        yield from _qos(facts, partition, account)


def _qos(facts: ClusterFacts, partition: Partition, account: str | None) -> Iterable[Entry]:
    association = association_of(facts, account, partition.name)
    if not facts.enforces("qos") or association is None or len(association.qos) < 2:
        return
    default = qos_of(facts, association, None)
    usable = [each for each in association.qos if partition.takes_qos(each)]
    if default is not None and partition.takes_qos(default.name):
        why = f"Which QOS? You may use {listed(usable)}; it is {default.name} unless you name one"
        yield Entry("qos", None, why, question=True)
    elif usable:
        yield Entry("qos", usable[0], f"of yours, the partition takes {listed(usable)} (AllowQos, DenyQos)")


def _account(facts: ClusterFacts, partition: Partition) -> Iterable[Entry]:
    plugin = facts.config.get("JobSubmitPlugins", "none").replace("(null)", "none")
    if facts.associations is None:
        if facts.keeps_accounts or "none" not in plugin:
            yield Entry("account", None, "Does it have to be named? SLURM did not say which are yours", question=True)
        return
    mine = list(dict.fromkeys(each.account for each in facts.associations if each.partition in ("", partition.name)))
    usable = [each for each in mine if partition.takes_account(each)]
    if facts.default_account in usable:
        yield Entry("account", facts.default_account, f"your default one; yours are {listed(mine)} (sacctmgr)")
    elif usable:
        yield Entry(
            "account",
            usable[0],
            f"the partition takes {listed(usable)} of yours, {listed(mine)} (sacctmgr)",
        )
    else:
        takes = f" It takes {listed(partition.allowed_accounts)}." if partition.allowed_accounts else ""
        why = f"Which one? Partition {partition.name} takes none of yours ({listed(mine) or 'there are none'}).{takes}"
        yield Entry("account", None, why, question=True)


def _shape(facts: ClusterFacts, partition: Partition, groups: Sequence[NodeGroup]) -> Iterable[Entry]:
    """Return the fields that say what a job asks for: as much of a node as it may have.

    The node is of the most frequent kind with the most GPUs.
    """
    group = max(groups, key=lambda each: (each.usable > 0, each.count * each.gpu_count, each.count * each.cpus))
    gpu_type, there = max(group.gpus, key=lambda each: each[1], default=("", 0))
    least = max(1, partition.min_nodes)
    many = f"{group.count} of this kind" + (f", of which {group.usable} work now" if group.usable < group.count else "")
    yield Entry("nodes", least, f"there are {many}" if least == 1 else f"MinNodes of the partition; there are {many}")

    most_cpus = partition.cpus_per_node
    partition_limit = Limit(most_cpus, f"partition {partition.name}") if most_cpus is not None else None
    cpus, limit = _within(group.cpus, partition_limit)
    cpus = max(1, cpus)
    of_cpus = f"that {limit.of} allows" if limit else "of a node that jobs can have (sinfo)"
    gpus = min(there, cpus)
    gres = f"gpu:{gpu_type}:{there}" if gpu_type else f"gpu:{there}"
    of_gpus = f"sinfo: {gres}"
    if gpus > 1 and _PART.search(gpu_type):
        gpus, of_gpus = 1, f"sinfo: {gres}; a rank uses one part of a GPU (MIG), and NCCL joins no parts"

    tasks = max(1, gpus)
    yield Entry("tasks_per_node", tasks, "one rank per GPU" if gpus else "one rank, as there are no GPUs")
    if gpus:
        yield Entry("gpus_per_node", gpus, of_gpus)
        if gpu_type:
            yield Entry("gpu_type", gpu_type, "SLURM's name of their type")
        yield _gpu_memory(gpu_type, group)
    each = max(1, cpus // tasks)
    each -= each % group.threads if each > group.threads else 0  # SLURM gives whole cores
    shared = "" if tasks == 1 else f", shared by {tasks} ranks"
    yield Entry("cpus_per_task", each, f"the {cpus} CPUs {of_cpus}{shared}")
    yield from _memory(facts, partition, group, tasks * each)
    if partition.exclusive:
        yield Entry("exclusive", True, "the partition gives whole nodes (OverSubscribe=EXCLUSIVE)")
    gpu = next((found for word in (gpu_type, *group.features) if (found := gpu_of(word))), None)
    if gpus and (gpu is None or gpu.network_gb_per_s is None):
        why = "How fast is a node's network, all its adapters together, one way? `plan` needs it (8 of 400 Gbit/s: 400)"
        yield Entry("network_gb_per_s", None, why, question=True)


def _within(amount: int, *limits: Limit | None) -> tuple[int, Limit | None]:
    """Return the largest amount within all limits, and the limit that made it smaller."""
    lowest = min((limit for limit in limits if limit is not None), key=lambda limit: limit.most, default=None)
    if lowest is None or lowest.most >= amount:
        return amount, None
    return lowest.most, lowest


def _memory(facts: ClusterFacts, partition: Partition, group: NodeGroup, cpus: int) -> Iterable[Entry]:
    if "MEMORY" not in facts.config.get("SelectTypeParameters", "").upper():
        return  # SLURM does not share out memory, so no amount is asked for
    limits = []
    if partition.memory_mb is not None:
        limits.append(Limit(partition.memory_mb, f"MaxMemPerNode of partition {partition.name}"))
    if partition.memory_per_cpu_mb is not None:  # SLURM gives more CPUs to a job that asks for more
        limits.append(Limit(partition.memory_per_cpu_mb * cpus, f"MaxMemPerCPU of partition {partition.name}"))
    megabytes, limit = _within(group.memory_mb, *limits)
    if limit is None:
        yield Entry("mem_per_node_gb", 0, f"0: all of a node's memory, {group.memory_mb} MB")
    elif megabytes >= 1024:  # with less, the cluster's default holds
        why = f"{limit.of} allows {megabytes} MB; a node has {group.memory_mb} MB"
        yield Entry("mem_per_node_gb", megabytes // 1024, why)


def _gpu_memory(gpu_type: str, group: NodeGroup) -> Entry:
    """Return the memory of a GPU: as its type or a feature of its nodes says, or that of its model."""
    words = (gpu_type, *group.features)
    part = _PART.search(gpu_type)
    if part is not None:
        return Entry("gpu_memory_gb", int(part[1]), "the type is a part of a GPU (MIG)")
    found = next(((word, gpu) for word in words if (gpu := gpu_of(word)) is not None), None)
    if found is None:
        kind = f"type {gpu_type!r}" if gpu_type else "no type"
        why = f"How much has one? SLURM says {kind}; `nvidia-smi` on a node shows it"
        return Entry("gpu_memory_gb", None, why, question=True)
    word, gpu = found
    model = f"{gpu.name} ({'by its type' if word == gpu_type else f'by the feature {word} of the nodes'})"
    sizes = SEVERAL_MEMORIES.get(gpu.name, (gpu.memory_gb,))
    said = [int(size) for text in words for size in _MEMORY.findall(text)]
    size = next((size for size in said if size in sizes), sizes[0])
    visible = int(size * (15 / 16 if gpu.name in ECC_IN_MEMORY else 0.99))  # about what nvidia-smi shows, in GiB
    if len(sizes) == 1 or size in said:
        return Entry("gpu_memory_gb", visible, f"{model}: {size:g} GB, less what a driver keeps")
    amounts = " and ".join(f"{each:g}" for each in sizes)
    why = f"How much has one? {model} is sold with {amounts} GB; `nvidia-smi` on a node shows it"
    return Entry("gpu_memory_gb", visible, why, question=True)


def _time(partition: Partition, wall: Limit | None) -> Iterable[Entry]:
    limits = [wall]
    if partition.max_time_min is not None:
        limits.append(Limit(partition.max_time_min, f"MaxTime of partition {partition.name}"))
    minutes, limit = _within(DAY_MIN, *limits)
    minutes = max(1, minutes)
    most = min((each.most for each in limits if each is not None), default=None)
    why = (
        limit.of
        if limit
        else "a day" + (f"; {roughly(60 * most)} are allowed" if most else "; the cluster sets no limit")
    )
    yield Entry("time_limit_min", minutes, why)
    lead = min(LEAD_S, max(0, minutes * 60 - 60) // 4)
    yield Entry("signal_lead_s", lead, "one step and one save have to fit; `submit` says so if they did not before")


def _of_the_person(facts: ClusterFacts, groups: Sequence[NodeGroup]) -> Iterable[Entry]:
    """Return what SLURM does not know, as questions; the network only of a cluster within this machine."""
    addresses = [each.address for each in groups if each.address]
    if addresses and all(each == "localhost" or each.startswith("127.") for each in addresses):
        yield Entry("network_interface", "lo", f"all of its nodes are this machine (NodeAddr={addresses[0]})")
    yield Entry("modules", None, "Which modules does your code need? `module avail` lists them", question=True)
    kind = "pyxis" if facts.pyxis else "apptainer"
    why = f"Do you train in an image? container: {{kind: {kind}, image: ...}}"
    yield Entry("container", None, why, question=True)
    why = "What do all nodes together write to the file system of the checkpoints? `plan` and checkpoint.auto use it"
    yield Entry("storage_gb_per_s", None, why, question=True)
