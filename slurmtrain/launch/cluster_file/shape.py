"""What a job asks for on each node so that it has as much of it as it may: ranks, GPUs, CPUs and memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.launch.cluster_file.content import Entry
from slurmtrain.planner.gpus import gpu_of
from slurmtrain.slurm.facts import ClusterFacts, NodeGroup, Partition
from slurmtrain.slurm.job_limits import Bound, Limit, job_limit, node_limit

# Models of GPU that are sold with several amounts of memory, in GB. `planner.gpus` has the smallest.
SEVERAL_MEMORIES = {"A100": (40, 80), "V100": (16, 32), "GH200": (96, 144), "H20": (96, 141)}
# Cards whose error correction takes a sixteenth of their memory.
ECC_IN_MEMORY = {"L40S", "L40", "L4", "A40", "A10G", "A10", "T4"}
_MEMORY = re.compile(r"(?<![0-9])(\d{1,3})\s?gi?b?\b", re.IGNORECASE)
_PART = re.compile(r"\d+g[._](\d+)gb", re.IGNORECASE)  # a part of a GPU (MIG) and its memory


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


def shape_of(facts: ClusterFacts, partition: Partition, groups: Sequence[NodeGroup], bounds: Sequence[Bound]) -> Shape:
    """Return the largest request on a node of the most frequent kind with the most GPUs, within all limits."""
    group = max(groups, key=lambda each: (each.usable > 0, each.count * each.gpu_count, each.count * each.cpus))
    gpu_type, there = max(group.gpus, key=lambda each: each[1], default=("", 0))
    why: dict[str, str] = {}
    gpus, limit = within(
        there,
        *(job_limit(bounds, key) for key in ("gres/gpu", f"gres/gpu:{gpu_type}".lower())),
        node_limit(bounds, "gres/gpu"),
    )
    gres = f"gpu:{gpu_type}:{there}" if gpu_type else f"gpu:{there}"
    why["gpus_per_node"] = f"{limit.of} allows so many; its nodes have {gres}" if limit else f"sinfo: {gres}"
    partition_limit = (
        Limit(partition.cpus_per_node, f"partition {partition.name}") if partition.cpus_per_node is not None else None
    )
    cpus, limit = within(group.cpus, partition_limit, job_limit(bounds, "cpu"), node_limit(bounds, "cpu"))
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


def within(amount: int, *limits: Limit | None) -> tuple[int, Limit | None]:
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
    megabytes, limit = within(group.memory_mb, *limits)
    if limit is None:
        return 0, f"0: all of a node's memory, {group.memory_mb} MB"
    if megabytes < 1024:
        return None, f"{limit.of} allows {megabytes} MB, less than a GB, so the cluster's default holds"
    return megabytes // 1024, f"{limit.of} allows {megabytes} MB; a node has {group.memory_mb} MB"


def shape_entries(partition: Partition, shape: Shape, groups: Sequence[NodeGroup]) -> Iterable[Entry]:
    """Return the fields of the file that say what a job asks for."""
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
