"""From the facts of a cluster to the text of conf/cluster/NAME.yaml: pure functions.

Every value has a comment that tells where it comes from. What SLURM does not say becomes a commented line with a question.
What the file was made of stands at its end, for `probe --check`, which is in `launch.cluster_drift`.
"""

from __future__ import annotations

import ipaddress
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import yaml

from slurmtrain.errors import ConfigError, EnvironmentMismatchError
from slurmtrain.launch.login_node import Folder, LoginNode
from slurmtrain.planner.gpus import gpu_of
from slurmtrain.slurm.client import parse_duration
from slurmtrain.slurm.facts import ClusterFacts, NodeGroup, Partition
from slurmtrain.slurm.job_limits import (
    Bound,
    Limit,
    association_of,
    bounds_of,
    job_limit,
    node_limit,
    qos_of,
    wall_limit,
)
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.slurm.preemption import NOT_AT_ALL, preemption_of
from slurmtrain.slurm.versions import STARTS_PREEMPTED_JOBS_ONCE_MORE, Version

WIDTH = 112
COMMENT_COLUMN = 26
DAY_MIN = 1440
LEAD_S = 300
OBSERVED = "# What it was made of, for `probe --check`; not to be edited:"
OBSERVED_LINE = re.compile(r"^# \* ([^:]+): (.*)$")
# Models of GPU that are sold with several amounts of memory, in GB. `planner.gpus` has the smallest.
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


@dataclass(frozen=True)
class ClusterFile:
    """The content of a cluster's file.

    Attributes:
        name: of the file without .yaml, and so of the cluster in commands.
        notes: what SLURM does here, a sentence or two each.
        observed: what the file was made of, by name.
    """

    name: str
    partition: str
    title: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    observed: Mapping[str, str]

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
            lines += _lines_of(entry)
        lines += ["", "# What SLURM does here"]
        for note in self.notes:
            lines += _comment(f"- {note}", indent="  ")
        lines += ["", OBSERVED, *(f"# * {_plain(name)}: {_plain(value)}" for name, value in self.observed.items())]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Shape:
    """What a job asks for on each node so that it has as much of it as it may.

    Attributes:
        group: the nodes that it is made for.
        memory_gb: 0: all of a node's memory; None: memory is not asked for.
        why: where each comes from, by field.
    """

    group: NodeGroup
    gpu_type: str
    gpus: int
    tasks: int
    cpus_per_task: int
    memory_gb: int | None
    why: Mapping[str, str]


def describe(
    facts: ClusterFacts,
    login: LoginNode,
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
        slurm_conf: path of a slurm.conf other than the machine's own.
        taken: names that the file cannot have.
        version: of this package, for the first line.

    Raises:
        ConfigError: there is no such partition, or no node in it.
    """
    chosen = choose_partition(facts, partition)
    groups = facts.nodes_of(chosen.name)
    if not groups:
        raise ConfigError(f"partition {chosen.name!r} has no nodes that sinfo shows", hint="probe --partition NAME")
    bounds = bounds_of(facts, chosen, account, qos)
    shape = shape_of(facts, chosen, groups, bounds)
    entries = [
        *_where(facts, chosen, account, qos, slurm_conf),
        *_shape_entries(chosen, shape, groups),
        *_time(chosen, bounds),
        *_network(shape, groups),
        *_software(facts, login),
        *_storage(login),
    ]
    file_name = name or name_of(facts, chosen, taken)
    title = (
        f"Cluster {facts.name}, partition {chosen.name}: written by `python -m slurmtrain probe` of slurmtrain {version}. "
        f"Use it: python -m slurmtrain +cluster={file_name} submit. Has the cluster changed since? "
        f"python -m slurmtrain probe --check {file_name}"
    )
    return ClusterFile(
        file_name,
        chosen.name,
        title,
        tuple(entries),
        notes_of(facts, chosen, account, qos, login),
        observed(facts, chosen, account, qos),
    )


def choose_partition(facts: ClusterFacts, name: str | None) -> Partition:
    """Return a partition by name, the default one, or if there is none, the one with the most GPUs or CPUs.

    Raises:
        ConfigError: there is no such partition.
    """
    known = ", ".join(each.name for each in facts.partitions)
    if not facts.partitions:
        raise ConfigError("SLURM shows no partitions", hint="`scontrol show partition` says why")
    found = facts.partition(name)
    if found is not None:
        return found
    if name is not None:
        raise ConfigError(f"there is no partition {name!r} on this cluster", hint=f"there are: {known}")
    amounts = {
        each.name: (
            sum(group.count * group.gpu_count for group in facts.nodes_of(each.name)),
            sum(group.count * group.cpus for group in facts.nodes_of(each.name)),
        )
        for each in facts.partitions
    }
    return max(facts.partitions, key=lambda each: amounts[each.name])


def name_of(facts: ClusterFacts, partition: Partition, taken: Collection[str]) -> str:
    """Return the name of the file: SLURM's of the cluster, with that of a partition that is not the default one."""
    cluster, its = (re.sub(r"[^A-Za-z0-9_.-]+", "-", each).strip("-.") for each in (facts.name, partition.name))
    plain = cluster or "cluster"
    return plain if partition.default and plain not in taken else f"{plain}-{its}"


def shape_of(facts: ClusterFacts, partition: Partition, groups: Sequence[NodeGroup], bounds: Sequence[Bound]) -> Shape:
    """Return the largest request on a node of the most frequent kind with the most GPUs, within all limits."""
    group = max(groups, key=lambda each: (each.usable > 0, each.count * each.gpu_count, each.count * each.cpus))
    gpu_type, there = max(group.gpus, key=lambda each: each[1], default=("", 0))
    why: dict[str, str] = {}
    gpus, limit = _within(
        there,
        *(job_limit(bounds, key) for key in ("gres/gpu", f"gres/gpu:{gpu_type}".lower())),
        node_limit(bounds, "gres/gpu"),
    )
    gres = f"gpu:{gpu_type}:{there}" if gpu_type else f"gpu:{there}"
    why["gpus_per_node"] = f"{limit.of} allows so many; its nodes have {gres}" if limit else f"sinfo: {gres}"
    partition_limit = (
        Limit(partition.cpus_per_node, f"partition {partition.name}") if partition.cpus_per_node is not None else None
    )
    cpus, limit = _within(group.cpus, partition_limit, job_limit(bounds, "cpu"), node_limit(bounds, "cpu"))
    cpus = max(1, cpus)
    gpus = min(gpus, cpus)
    if gpus > 1 and _PART.search(gpu_type):
        gpus, why["gpus_per_node"] = 1, f"sinfo: {gres}; a rank uses one part of a GPU (MIG), and NCCL joins no parts"
    tasks = max(1, gpus)
    each = max(1, cpus // tasks)
    each -= each % group.threads if each > group.threads else 0  # SLURM gives whole cores
    of = f"the {cpus} CPUs that {limit.of} allows" if limit else f"the {cpus} CPUs of a node that jobs can have (sinfo)"
    why["cpus_per_task"] = of if tasks == 1 else f"{of}, shared by {tasks} ranks"
    memory_gb, memory_why = _memory(facts, partition, group, bounds, tasks * each)
    why["mem_per_node_gb"] = memory_why
    return Shape(group, gpu_type, gpus, tasks, each, memory_gb, why)


def _within(amount: int, *limits: Limit | None) -> tuple[int, Limit | None]:
    """Return the largest amount within all limits, and the limit that made it smaller."""
    lowest = min((limit for limit in limits if limit is not None), key=lambda limit: limit.most, default=None)
    if lowest is None or lowest.most >= amount:
        return amount, None
    return lowest.most, lowest


def _memory(
    facts: ClusterFacts, partition: Partition, group: NodeGroup, bounds: Sequence[Bound], cpus: int
) -> tuple[int | None, str]:
    if "MEMORY" not in facts.config.get("SelectTypeParameters", "").upper():
        return None, "SLURM does not share out memory here (SelectTypeParameters), so no amount is asked for"
    limits = [job_limit(bounds, "mem"), node_limit(bounds, "mem")]
    if partition.memory_mb is not None:
        limits.append(Limit(partition.memory_mb, f"MaxMemPerNode of partition {partition.name}"))
    if partition.memory_per_cpu_mb is not None:  # SLURM gives more CPUs to a job that asks for more
        limits.append(Limit(partition.memory_per_cpu_mb * cpus, f"MaxMemPerCPU of partition {partition.name}"))
    megabytes, limit = _within(group.memory_mb, *limits)
    if limit is None:
        return 0, f"0: all of a node's memory, {group.memory_mb} MB"
    if megabytes < 1024:
        return None, f"{limit.of} allows {megabytes} MB, less than a GB, so the cluster's default holds"
    return megabytes // 1024, f"{limit.of} allows {megabytes} MB; a node has {group.memory_mb} MB"


def _where(
    facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None, slurm_conf: str | None
) -> Iterable[Entry]:
    if slurm_conf is not None:
        yield Entry("slurm_conf", slurm_conf, "the one that was probed, instead of the machine's own")
    why = "the default one" if partition.default else "the one that was asked for"
    if not any(each.default for each in facts.partitions):
        why = "no partition is the default one"
    yield Entry("partition", partition.name, f"{why}; there are {_list(each.name for each in facts.partitions)}")
    yield from _account(facts, partition, account)
    association = association_of(facts, account, partition.name)
    if qos is not None:
        yield Entry("qos", qos, "the one that was asked for")
    elif facts.enforces("qos") and association is not None and len(association.qos) > 1:
        its = qos_of(facts, association, None)
        usable = [each for each in association.qos if partition.takes_qos(each)]
        if partition.allowed_qos is not None and (its is None or not partition.takes_qos(its.name)) and usable:
            yield Entry("qos", usable[0], f"the partition takes {_list(partition.allowed_qos)} alone (AllowQos)")
        elif its is not None and not partition.takes_qos(its.name) and usable:
            yield Entry("qos", usable[0], f"the partition does not take {its.name}, your default one (DenyQos)")
        else:
            default = f"; it is {its.name} unless you name one" if its is not None else ""
            yield Entry("qos", None, f"Which QOS? You may use {_list(usable)}{default}", question=True)


def _account(facts: ClusterFacts, partition: Partition, account: str | None) -> Iterable[Entry]:
    if account is not None:
        yield Entry("account", account, "the one that was asked for")
        return
    if facts.associations is None:
        if facts.keeps_accounts:
            yield Entry("account", None, "Which account do your jobs count for? sacctmgr did not say", question=True)
        elif "none" not in facts.config.get("JobSubmitPlugins", "none").replace("(null)", "none"):
            why = (
                f"Does it have to be named? A plugin judges jobs (JobSubmitPlugins={facts.config['JobSubmitPlugins']})"
            )
            yield Entry("account", None, why, question=True)
        return
    mine = list(dict.fromkeys(each.account for each in facts.associations if each.partition in ("", partition.name)))
    usable = [each for each in mine if partition.takes_account(each)]
    if not mine:
        why = f"Which one? Accounting knows none of yours for partition {partition.name}; ask who runs the cluster"
        yield Entry("account", None, why, question=True)
    elif facts.default_account in usable and len(usable) > 1:
        yield Entry("account", facts.default_account, f"your default one; yours are {_list(usable)} (sacctmgr)")
    elif usable:
        only = "the only one of yours" if len(mine) == 1 else "yours that may run in this partition"
        yield Entry("account", usable[0], f"{only} (sacctmgr)")
    else:
        takes = (
            f": ask for one of {_list(partition.allowed_accounts)}" if partition.allowed_accounts else " (DenyAccounts)"
        )
        why = f"The partition takes none of yours ({_list(mine)}){takes}"
        yield Entry("account", None, why, question=True)


def _shape_entries(partition: Partition, shape: Shape, groups: Sequence[NodeGroup]) -> Iterable[Entry]:
    group = shape.group
    least = max(1, partition.min_nodes)
    many = f"{group.count} of this kind" + (f", of which {group.usable} work now" if group.usable < group.count else "")
    yield Entry("nodes", least, f"there are {many}" if least == 1 else f"MinNodes of the partition; there are {many}")
    yield Entry("tasks_per_node", shape.tasks, "one rank per GPU" if shape.gpus else "one rank, as there are no GPUs")
    if shape.gpus:
        yield Entry("gpus_per_node", shape.gpus, shape.why["gpus_per_node"])
        if shape.gpu_type:
            yield Entry("gpu_type", shape.gpu_type, "SLURM's name of their type")
        yield _gpu_memory(shape)
    yield Entry("cpus_per_task", shape.cpus_per_task, shape.why["cpus_per_task"])
    if shape.memory_gb is not None:
        yield Entry("mem_per_node_gb", shape.memory_gb, shape.why["mem_per_node_gb"])
    if partition.exclusive:
        yield Entry("exclusive", True, "the partition gives whole nodes (OverSubscribe=EXCLUSIVE)")
    apart = _constraint(shape, groups)
    if apart:
        yield Entry(
            "constraint", apart, "other nodes of the partition, which have less or another GPU, lack this feature"
        )


def _gpu_memory(shape: Shape) -> Entry:
    """Return the memory of a GPU: as its type or a feature of its nodes says, or that of its model."""
    part = _PART.search(shape.gpu_type)
    if part is not None:
        return Entry("gpu_memory_gb", int(part[1]), "the type is a part of a GPU (MIG)")
    for word in (shape.gpu_type, *shape.group.features):
        gpu = gpu_of(word)
        if gpu is None:
            continue
        of = "by its type" if word == shape.gpu_type else f"by the nodes' feature {word}"
        sizes = SEVERAL_MEMORIES.get(gpu.name, (gpu.memory_gb,))
        said = [int(size) for text in (shape.gpu_type, *shape.group.features) for size in _MEMORY.findall(text)]
        named = next((size for size in said if size in sizes), None)
        if named is not None or len(sizes) == 1:
            visible = usable_memory_gb(gpu.name, named or sizes[0])
            return Entry(
                "gpu_memory_gb", visible, f"{gpu.name} ({of}): {named or sizes[0]:g} GB, less what a driver keeps"
            )
        amounts = " and ".join(f"{size:g}" for size in sizes)
        why = f"How much has one? {gpu.name} ({of}) is sold with {amounts} GB; `nvidia-smi` on a node shows it"
        return Entry("gpu_memory_gb", usable_memory_gb(gpu.name, sizes[0]), why, question=True)
    kind = f"type {shape.gpu_type!r}" if shape.gpu_type else "no type"
    why = f"How much has one? SLURM says {kind}; `nvidia-smi` on a node shows it"
    return Entry("gpu_memory_gb", None, why, question=True)


def usable_memory_gb(name: str, sold_with_gb: float) -> int:
    """Return about what nvidia-smi shows of the memory that a model is sold with, in GiB."""
    return int(sold_with_gb * (15 / 16 if name in ECC_IN_MEMORY else 0.99))


def _constraint(shape: Shape, groups: Sequence[NodeGroup]) -> str | None:
    """Return a feature that only these nodes have, where GPUs differ and SLURM has no types by which to ask for them."""
    others = [each for each in groups if each is not shape.group and each.gpus_of(None) >= shape.gpus > 0]
    if shape.gpu_type or not others:
        return None
    shared = {feature for each in others for feature in each.features}
    own = [feature for feature in shape.group.features if feature not in shared]
    if not own or all(each.cpus == shape.group.cpus and not each.features for each in others):
        return None
    return next((feature for feature in own if gpu_of(feature) is not None), None)


def _time(partition: Partition, bounds: Sequence[Bound]) -> Iterable[Entry]:
    limits = [wall_limit(bounds)]
    if partition.max_time_min is not None:
        limits.append(Limit(partition.max_time_min, f"MaxTime of partition {partition.name}"))
    minutes, limit = _within(DAY_MIN, *limits)
    minutes = max(1, minutes)
    most = min((each.most for each in limits if each is not None), default=None)
    why = (
        limit.of if limit else "a day" + (f"; {_minutes(most)} are allowed" if most else "; the cluster sets no limit")
    )
    yield Entry("time_limit_min", minutes, why)
    lead = min(LEAD_S, max(0, minutes * 60 - 60) // 4)
    yield Entry("signal_lead_s", lead, "one step and one save have to fit; `submit` says so if they did not before")


def _network(shape: Shape, groups: Sequence[NodeGroup]) -> Iterable[Entry]:
    addresses = [each.address for each in groups if each.address]
    if addresses and all(map(_is_loopback, addresses)):
        yield Entry("network_interface", "lo", f"all of its nodes are this machine (NodeAddr={addresses[0]})")
    gpu = next((found for word in (shape.gpu_type, *shape.group.features) if (found := gpu_of(word))), None)
    if shape.gpus and (gpu is None or gpu.network_gb_per_s is None):
        why = "How fast is a node's network, all its adapters together, one way? `plan` needs it (8 of 400 Gbit/s: 400)"
        yield Entry("network_gb_per_s", None, why, question=True)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _software(facts: ClusterFacts, login: LoginNode) -> Iterable[Entry]:
    if login.modules:
        shown = f" There are {_list(login.module_names)}" if login.module_names else ""
        why = f"Which modules does your code need, CUDA, say?{shown}"
        yield Entry("modules", list(login.module_names[:1]) or None, why, question=True)
    kind = "pyxis" if facts.pyxis else "apptainer" if {"apptainer", "singularity"} & {*login.containers} else None
    if kind is not None:
        found = "srun takes --container-image" if facts.pyxis else f"this machine has {_list(login.containers)}"
        why = f"Do you train in an image? {found}; container: {{kind: {kind}, image: ...}}"
        yield Entry("container", None, why, question=True)


def _storage(login: LoginNode) -> Iterable[Entry]:
    why = "What do all nodes together write to the file system of the checkpoints? `plan` and checkpoint.auto use it"
    measured = next((each for each in login.folders if each.write_mb_per_s is not None), None)
    if measured is not None:
        why += f". One process here wrote {measured.write_mb_per_s:.0f} MB/s, roughly"
    yield Entry("storage_gb_per_s", None, why, question=True)


def notes_of(
    facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None, login: LoginNode
) -> tuple[str, ...]:
    """Return what else a person should know, a sentence or two each."""
    groups = facts.nodes_of(partition.name)
    found = [_versions(facts, groups), preemption_note(facts, partition, account, qos), _requeue_note(facts)]
    if len(groups) > 1:
        found.append("Nodes of this partition: " + "; ".join(map(group_words, groups)) + ".")
    others = [each for each in facts.partitions if each.name != partition.name]
    if others:
        found.append(
            f"Other partitions: {_list(_partition_words(facts, each) for each in others)}. `probe --partition NAME` "
            "writes a file for one."
        )
    found += [_topology_note(facts), _job_limits_note(facts), _containers_note(facts, login)]
    found += [_folder_note(each) for each in login.folders]
    if facts.silent:
        found.append(f"Not known, since these commands gave no answer: {'; '.join(facts.silent)}.")
    return tuple(each for each in found if each)


def _versions(facts: ClusterFacts, groups: Sequence[NodeGroup]) -> str:
    text = f"SLURM {facts.config.get('SLURM_VERSION', 'of unknown version')}."
    older = {each.version for each in groups if each.version is not None} - {facts.version}
    if older:
        text += f" Its nodes run {_list(_release(each) for each in sorted(older))}."
    return text


def _release(version: Version) -> str:
    return f"{version[0]}.{version[1]:02d}"


def preemption_note(facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None) -> str:
    """Say what happens to a job of this partition that is preempted, and how long it has."""
    found = preemption_of(facts, partition, account=account, qos=qos)
    mode, grace_s, of = found.mode, found.grace_s, found.of
    if facts.config.get("PreemptType", "") in NOT_AT_ALL or mode in ("", "OFF"):
        return "Jobs of this partition are not preempted."
    if "SUSPEND" in mode:
        return "A preempted job is suspended on its nodes and goes on later: nothing is saved, and it is not requeued."
    then = {"REQUEUE": "is requeued", "CANCEL": "is cancelled by SLURM"}.get(mode, f"ends ({mode})")
    kill_wait = parse_duration(facts.config.get("KillWait", ""))
    has_signal = "send_user_signal" in (
        facts.config.get("PreemptParameters", "") + facts.config.get("SlurmctldParameters", "")
    )
    signal = "the early signal (USR2)" if has_signal else "SIGTERM"
    first = (
        f"it gets {signal} {grace_s:.0f} s (GraceTime of {of}) before its end" if grace_s else f"GraceTime of {of} is 0"
    )
    rest = f", and has {kill_wait:.0f} s more (KillWait) from the last SIGTERM on" if kill_wait is not None else ""
    tight = " A save has to fit into that, else the last regular checkpoint counts: checkpoint.every_minutes." * (
        (grace_s or 0) + (kill_wait or 0) < 60
    )
    once_more = (
        " After a preemption such a job ends as PREEMPTED although its run has finished; for `submit --after` set "
        "requeue=chain or requeue=resubmit."
        if mode == "CANCEL" and STARTS_PREEMPTED_JOBS_ONCE_MORE.applies_to(facts.version)
        else ""
    )
    return f"A preempted job {then}: {first}{rest}.{tight} slurmtrain requeues it itself.{once_more}"


def _requeue_note(facts: ClusterFacts) -> str:
    if facts.config.get("JobRequeue") == "0":
        return (
            "SLURM requeues no job that does not ask for it (JobRequeue=0); slurmtrain's jobs ask. Where the cluster "
            "forbids it, requeue=chain or requeue=resubmit needs no requeue."
        )
    return ""


def _topology_note(facts: ClusterFacts) -> str:
    sizes = switch_sizes(facts.switches)
    if not sizes:
        return ""
    kind = facts.config.get("TopologyPlugin", "").removeprefix("topology/")
    part = "block" if kind == "block" else "leaf switch"
    return f"Nodes are in {len(sizes)} groups (topology/{kind}); the largest {part} has {max(sizes)} nodes."


def switch_sizes(text: str) -> tuple[int, ...]:
    """Return the number of nodes of each leaf switch or block in `scontrol show topology`."""
    sizes = []
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields.get("Level", "0") == "0" and fields.get("Nodes") and {"SwitchName", "BlockName"} & fields.keys():
            try:
                sizes.append(len(expand_nodelist(fields["Nodes"])))
            except EnvironmentMismatchError:
                continue
    return tuple(sizes)


def _job_limits_note(facts: ClusterFacts) -> str:
    size = facts.config.get("MaxArraySize", "")
    text = f"An array has at most {int(size) - 1} as its largest index (MaxArraySize)." if size.isdigit() else ""
    if not facts.keeps_accounts:
        return text + " There is no accounting database, so no limits by account or QOS, and no `sacct`."
    if not facts.enforces("associations"):
        return text + " Accounting is kept, and limits nothing (AccountingStorageEnforce)."
    return text


def _containers_note(facts: ClusterFacts, login: LoginNode) -> str:
    there = [*(["pyxis"] if facts.pyxis else []), *login.containers]
    mpi = f" srun --mpi takes {_list(facts.mpi_types)}." if facts.mpi_types else ""
    return f"Containers: {_list(there) if there else 'none found on this machine'}.{mpi}"


def _folder_note(folder: Folder) -> str:
    if folder.mount is None:
        return f"What {folder.called} lies on is not known: {folder.path}."
    words = f"{folder.called} ({folder.path}) is on {folder.mount.kind}"
    if folder.write_mb_per_s is not None:
        words += f"; one process wrote about {folder.write_mb_per_s:.0f} MB/s there, roughly"
    if folder.mount.shared is False:
        words += ". That kind is this machine's own: do compute nodes see it?"
        words += " Runs have to be on a shared one (job.runs_dir)" * (not folder.called.startswith("$"))
    elif folder.mount.shared is None:
        words += ". Whether compute nodes see it is not known"
    return words[0].upper() + words[1:].removesuffix("?") + ("?" if words.endswith("?") else ".")


def _partition_words(facts: ClusterFacts, partition: Partition) -> str:
    groups = facts.nodes_of(partition.name)
    gpus = sorted({name or "GPUs" for group in groups for name, _ in group.gpus})
    count = sum(group.count for group in groups)
    what = f"{count} node{'s' * (count != 1)}" + (f" with {'/'.join(gpus)}" if gpus else "")
    return f"{partition.name} ({what})"


def group_words(group: NodeGroup) -> str:
    """Describe nodes that are alike: "4 with 64 CPUs, 515000 MB and gpu:a100:4"."""
    gpus = " and " + ", ".join(f"gpu:{name}:{number}" if name else f"gpu:{number}" for name, number in group.gpus)
    return f"{group.count} with {group.cpus} CPUs, {group.memory_mb} MB{gpus if group.gpus else ''}"


def observed(facts: ClusterFacts, partition: Partition, account: str | None, qos: str | None) -> dict[str, str]:
    """Return what a file is made of, by name: when one of these differs, the file may have to change."""
    settings = {
        name: facts.config[name]
        for name in (
            *("PreemptType", "KillWait", "JobRequeue", "MaxArraySize", "AccountingStorageEnforce"),
            *("SelectTypeParameters", "TopologyPlugin", "PreemptParameters", "TaskPlugin"),
        )
        if name in facts.config
    }
    preemption = preemption_of(facts, partition, account=account, qos=qos)
    bounds = bounds_of(facts, partition, account, qos)
    found = {
        "SLURM": facts.config.get("SLURM_VERSION", "?"),
        "partition": partition.name,
        **settings,
        "PreemptMode": preemption.mode or "?",
        "GraceTime": "?" if preemption.grace_s is None else f"{preemption.grace_s:.0f} s",
        "time limit": "none" if partition.max_time_min is None else _minutes(partition.max_time_min),
        "nodes": "; ".join(sorted(map(group_words, facts.nodes_of(partition.name)))),
        "accounts": _known(None if facts.associations is None else {each.account for each in facts.associations}),
        "QOS": _known(
            None if facts.associations is None else {name for each in facts.associations for name in each.qos}
        ),
    }
    for bound in bounds:
        found[f"limits of {bound.of}"] = _limit_words(bound)
    return {name: _plain(value) for name, value in found.items()}


def _limit_words(bound: Bound) -> str:
    limits = bound.limits
    parts = [f"{limits.wall_min} min"] if limits.wall_min is not None else []
    for label, amounts in (
        ("a job", limits.tres),
        ("a node", limits.tres_per_node),
        ("a user", limits.user_tres),
        ("all", limits.group_tres),
        ("at least", limits.least_tres),
    ):
        parts += [f"{name}={amount} {label}" for name, amount in sorted(amounts.items())]
    return ", ".join(parts) or "none"


def _known(names: Collection[str] | None) -> str:
    return "?" if names is None else ", ".join(sorted(names)) or "none"


def _minutes(minutes: int) -> str:
    days, rest = divmod(minutes, DAY_MIN)
    hours, rest = divmod(rest, 60)
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else "", f"{rest} min" if rest else ""]
    return " ".join(part for part in parts if part) or "0 min"


def _list(words: Iterable[str]) -> str:
    found = list(words)
    shown = found[:12]
    return ", ".join(shown) + (f" and {len(found) - len(shown)} more" if len(found) > len(shown) else "")


def _lines_of(entry: Entry) -> list[str]:
    """Return a field with its comment beside it, or above it where it is long."""
    value = "..." if entry.value is None else _yaml(entry.value)
    setting = f"{'# ' if entry.question else ''}{entry.field}: {value}"
    why = _plain(entry.why)
    beside = f"{setting.ljust(COMMENT_COLUMN)} # {why}"
    return [beside] if len(beside) <= WIDTH else [*_comment(why), setting]


def _yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        _plain(text),
        WIDTH,
        initial_indent="# ",
        subsequent_indent=f"# {indent}",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _plain(text: str) -> str:
    """Return the text on one line, without anything that could end a comment."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
