"""Compare the facts of all ranks with each other and with what the config asks for: a pure function to findings.

A fact that is None is not known, and is no finding. What is wrong by itself is the fault of its node, unless most nodes have
it. Where nodes differ, the majority decides what is right; where there is none, as between two nodes, nobody can tell which
of them is at fault, and the finding is the config's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.facts import MISSING, GatheredFacts, NodeFacts
from slurmtrain.runtime.preflight.findings import Fault, Finding, sorted_by_weight, without
from slurmtrain.system.gpu import GpuFacts

BUSY_SHARE = 0.1  # of a GPU's memory: with more in use by others a job that fits may not fit
BUSY_GB = 2.0  # of one GPU: ranks of this job that have begun already take less
LATE_S = 5.0  # a folder that shows new files later than this makes restarts and saves wait
SHOWN_PACKAGES = 3
# Versions whose difference ends training sooner or later: two releases of NCCL or torch do not talk to each other, and other
# CUDA or Python releases compute other bits. Two releases of a driver work together.
FATAL_VERSIONS = ("python", "torch", "cuda", "nccl", "slurmtrain")
# The same for packages: those that compute, read data or write checkpoints.
FATAL_PACKAGES = (
    *("torch", "triton", "pytorch-triton", "numpy", "safetensors", "transformers", "tokenizers", "peft", "accelerate"),
    *("deepspeed", "lightning", "pytorch-lightning", "flash-attn", "transformer-engine", "xformers", "torchao"),
    *("bitsandbytes", "slurmtrain"),
)
# The libraries of CUDA with which these compute, communicate and read, whatever stands behind: nvidia-cublas-cu12. Other
# packages of nvidia monitor (nvidia-ml-py), profile (nvidia-cuda-cupti, nvidia-nvtx), or have nothing to do with training.
FATAL_LIBRARIES = (
    *("nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn", "nvidia-cufft", "nvidia-cufile"),
    *("nvidia-curand", "nvidia-cusolver", "nvidia-cusparse", "nvidia-cutlass", "nvidia-dali", "nvidia-modelopt"),
    *("nvidia-nccl", "nvidia-nvjitlink", "nvidia-nvshmem"),
)
# Variables that a shell, another job or a search for a fault has left, with the value that slows training down.
LEFT_OVER = {
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "it is not DETAIL: with it each collective is checked by another one",
    "CUDA_LAUNCH_BLOCKING=1": "it is not set: with it each kernel is waited for",
    "NCCL_P2P_DISABLE=1": "it is not set: with it GPUs of a node exchange through the CPU's memory",
    "NCCL_IB_DISABLE=1": "it is not set: with it InfiniBand is not used",
    "NCCL_SHM_DISABLE=1": "it is not set: with it GPUs of a node exchange through the network",
}


@dataclass(frozen=True)
class Expected:
    """What the config asks for.

    Attributes:
        world_size: ranks of the job.
        gpus_per_node: GPUs that the job has asked for.
        cpus_per_task: CPUs for each rank.
        clock_offset_s: how far a clock may be off.
        shared: the folder in which the run writes; the others of `NodeFacts.disks` are each node's own.
        managed: the job has nodes of its own (SLURM), so that a foreign process on its GPUs has no business there.
        alone: no other program of the same job may be on its GPUs, as other runs of a pack or a server beside a script.
        ignored: kinds of findings to leave out.
    """

    world_size: int
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    clock_offset_s: float = 5.0
    shared: str = ""
    managed: bool = True
    alone: bool = True
    ignored: tuple[str, ...] = ()


def compare(facts: GatheredFacts, expected: Expected) -> list[Finding]:
    """Return what is not as it should be, the fatal first."""
    comparisons = (
        _ranks,
        _gpus,
        _versions,
        _packages,
        _code_and_config,
        _data,
        _clocks,
        _disks,
        _cpus,
        _variables,
        _shared_folder,
    )
    found = [finding for comparison in comparisons for finding in comparison(facts, expected)]
    return sorted_by_weight(without(found, expected.ignored))


# By what is judged.


@dataclass(frozen=True)
class Outlier:
    """Nodes that have the same value, which is not that of the others; `others` is None where no value is right."""

    value: Hashable
    nodes: tuple[str, ...]
    others: Hashable | None

    @property
    def fault(self) -> Fault:
        return Fault.NODE if self.others is not None else Fault.CONFIG


def _outliers(values: Mapping[str, Hashable]) -> list[Outlier]:
    """Group the nodes whose value is not that of more than half of them; without such a value, all of them."""
    known = {node: value for node, value in values.items() if value is not None}
    counts = Counter(known.values())
    if len(counts) < 2:
        return []
    ((common, count),) = counts.most_common(1)
    right = common if 2 * count > len(known) else None
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for node, value in known.items():
        if value != right:
            groups[value].append(node)
    return [Outlier(value, tuple(nodes), right) for value, nodes in groups.items()]


def _differing(
    kind: FindingKind,
    values: Mapping[str, Hashable],
    *,
    fatal: bool,
    say: Callable[[Hashable], str],
) -> Iterator[Finding]:
    """Yield a finding for each value that is not that of the majority."""
    for odd in _outliers(values):
        right = "the same on all nodes"
        if odd.others is not None:
            others = len([value for value in values.values() if value is not None]) - len(odd.nodes)
            right = f"{say(odd.others)}, as on {'the other node' if others == 1 else 'most of the others'}"
        yield Finding(kind, odd.nodes, say(odd.value), right, fatal, odd.fault)


def _fault_of(nodes: Collection[str], facts: GatheredFacts) -> Fault:
    """Return whose fault something is that these nodes have: that of all of them, or of most, is the config's."""
    return Fault.NODE if len(facts.nodes) == 1 or 2 * len(nodes) <= len(facts.nodes) else Fault.CONFIG


def _wrong(
    kind: FindingKind,
    found: Mapping[str, str],
    expected: str,
    facts: GatheredFacts,
    *,
    fatal: bool,
    fault: Fault | None = None,
) -> Iterator[Finding]:
    """Yield a finding for each value in `found`, which has the nodes where something is wrong by itself."""
    for value in dict.fromkeys(found.values()):  # a hundred nodes alike are one finding
        nodes = tuple(node for node in found if found[node] == value)
        yield Finding(kind, nodes, value, expected, fatal, fault or _fault_of(found, facts))


# What is judged.


def _ranks(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find ranks that count the ranks of the job differently, and numbers that several processes have."""
    wrong = [each for each in facts.ranks if each.world_size != expected.world_size]
    if wrong:
        sizes = ", ".join(str(size) for size in dict.fromkeys(each.world_size for each in wrong))
        yield Finding(
            FindingKind.RANKS,
            tuple(dict.fromkeys(each.node for each in wrong)),
            f"it was told that the job has {sizes} ranks",
            f"{expected.world_size} ranks",
            fatal=True,
            ranks=tuple(each.rank for each in wrong),
        )
    for rank, count in Counter(each.rank for each in facts.ranks).items():
        if count > 1:
            nodes = tuple(dict.fromkeys(each.node for each in facts.ranks if each.rank == rank))
            value = f"{count} processes are rank {rank}"
            yield Finding(FindingKind.RANKS, nodes, value, "one", fatal=True, ranks=(rank,))


def _gpus(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find GPUs that are missing, broken, slowed or in use by others, and nodes with another model."""
    if expected.gpus_per_node == 0:
        return
    asked = f"{expected.gpus_per_node} (cluster.gpus_per_node)"
    ranks_of = {node.node: [each for each in facts.ranks if each.node == node.node] for node in facts.nodes}
    # Where torch sees GPUs although the driver does not answer NVML, that is a warning.
    silent = {each.node: f"the driver says: {each.driver_error}" for each in facts.nodes if each.driver_error}
    works = {node for node in silent if any(each.gpus_seen for each in ranks_of[node])}
    for fatal in (True, False):
        found = {node: said for node, said in silent.items() if (node not in works) == fatal}
        yield from _wrong(FindingKind.GPU_DRIVER, found, "a driver that answers", facts, fatal=fatal)
    missing = {
        each.node: f"{len(each.gpus)} GPUs are visible"
        for each in facts.nodes
        if each.gpus is not None and _gpus_of(each, len(ranks_of[each.node]), expected) < expected.gpus_per_node
    }
    yield from _wrong(FindingKind.GPU_MISSING, missing, asked, facts, fatal=True)
    blind = {each.node for each in facts.ranks if each.gpus_seen == 0 and each.node not in missing}
    for node in sorted(blind):
        ranks = tuple(each.rank for each in ranks_of[node] if each.gpus_seen == 0)
        fault = _fault_of(blind, facts)
        yield Finding(FindingKind.GPU_MISSING, (node,), "no GPU is visible", asked, True, fault, ranks)
    for each in facts.nodes:
        if len(each.gpus or ()) > expected.gpus_per_node:
            continue  # some are those of other jobs, and nobody knows which
        for gpu in each.gpus or ():
            yield from _gpu(each.node, gpu, [rank.pid for rank in ranks_of[each.node]], expected)
    models = {
        each.node: ", ".join(sorted({gpu.name for gpu in each.gpus or () if gpu.name})) or None for each in facts.nodes
    }
    yield from _differing(FindingKind.VERSIONS, models, fatal=False, say=lambda value: f"GPUs are {value}")


def _gpus_of(node: NodeFacts, ranks: int, expected: Expected) -> int:
    """Return how many GPUs the ranks of a node have together, as seen from its first rank.

    SLURM may show each rank only its own share of them, and NVML shows no slices of a GPU.
    """
    count = len(node.gpus or ())
    if any(gpu.sliced for gpu in node.gpus or ()):
        return expected.gpus_per_node
    return count * ranks if 0 < count <= expected.gpus_per_node // max(1, ranks) else count


def _gpu(node: str, gpu: GpuFacts, own: Collection[int], expected: Expected) -> Iterator[Finding]:
    def finding(kind: FindingKind, value: str, right: str, *, fatal: bool) -> Finding:
        return Finding(kind, (node,), f"GPU {gpu.index} {value}", right, fatal, Fault.NODE)

    # Since Ampere the driver takes memory with errors out of use, also before a reset replaces it, and new programs may begin.
    # It says itself if they may not (NVIDIA GPU Memory Error Management). Of older GPUs only the count is known.
    is_mended = gpu.remap_pending is not None or gpu.needs is not None
    if gpu.remap_failed:
        yield finding(FindingKind.GPU_BROKEN, "has memory that cannot be remapped", "spare rows", fatal=True)
    elif gpu.needs:
        value = f"needs {gpu.needs} after an error (Xid)"
        yield finding(FindingKind.GPU_BROKEN, value, "nothing", fatal=not gpu.needs_later)
    elif gpu.ecc_errors:
        value = f"has {gpu.ecc_errors} uncorrectable ECC errors"
        yield finding(FindingKind.GPU_BROKEN, value, "none since its reset", fatal=not is_mended)
    elif gpu.remap_pending:
        yield finding(FindingKind.GPU_BROKEN, "has memory that waits to be remapped", "none", fatal=False)
    if gpu.slowed_by:
        yield finding(FindingKind.GPU_SLOWED, f"is slowed by {', '.join(gpu.slowed_by)}", "its full clock", fatal=False)
    # A slice (MIG) is the job's own, and the memory in use is that of all slices, which may be those of other jobs.
    others = [pid for pid in gpu.processes or () if pid not in own and not gpu.sliced]
    # In a container's own space of process ids a rank is not known by its own; what a rank takes before it trains is little.
    if others and expected.alone and gpu.used_gb is not None and gpu.used_gb > BUSY_GB:
        share = gpu.used_gb / gpu.memory_gb if gpu.memory_gb else 0.0
        pids = ", ".join(map(str, others[:4]))
        yield finding(
            FindingKind.GPU_BUSY,
            f"has {gpu.used_gb:.1f} GB in use, by processes that are none of this job ({pids})",
            "no other process",
            fatal=expected.managed and share > BUSY_SHARE,
        )


def _versions(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes with other versions of Python, torch, CUDA, the driver and the like."""
    for name in dict.fromkeys(name for each in facts.nodes for name in each.versions or {}):
        yield from _differing(
            FindingKind.VERSIONS,
            {each.node: (each.versions or {}).get(name) for each in facts.nodes},
            fatal=name in FATAL_VERSIONS,
            say=lambda value, name=name: f"{name} {value}",  # type: ignore[misc]
        )


def _packages(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes that have other packages: one finding for all in which they differ, those that matter first."""
    known = {each.node: each.packages for each in facts.nodes if each.packages is not None}
    odd: dict[tuple[str, ...], dict[str, Outlier]] = defaultdict(dict)
    for name in sorted(
        {name for packages in known.values() for name in packages}, key=lambda name: (not matters(name), name)
    ):
        for found in _outliers({node: packages.get(name, "none") for node, packages in known.items()}):
            odd[found.nodes][name] = found
    for nodes, differing in odd.items():
        shown = list(differing.items())[:SHOWN_PACKAGES]
        more = f" and {len(differing) - len(shown)} more" if len(differing) > len(shown) else ""
        right = ", ".join(f"{name} {each.others}" for name, each in shown if each.others is not None)
        yield Finding(
            FindingKind.PACKAGES,
            nodes,
            ", ".join(f"{name} {each.value}" for name, each in shown) + more,
            f"{right}, as on most of the others" if right else "the same on all nodes",
            any(map(matters, differing)),
            Fault.NODE if all(each.fault is Fault.NODE for each in differing.values()) else Fault.CONFIG,
        )


def matters(package: str) -> bool:
    """Return whether ranks with different versions of a package should not train together."""
    return package in FATAL_PACKAGES or package.startswith(FATAL_LIBRARIES)


def _code_and_config(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes whose files of code, or whose config.yaml, have other contents."""
    known = {each.node: each.code for each in facts.nodes if each.code is not None}
    odd: dict[tuple[tuple[str, ...], Fault], list[str]] = defaultdict(list)
    for name in sorted({name for files in known.values() for name in files}):
        # Rank 0 loads modules that others do not, so only nodes that have loaded it are compared.
        for found in _outliers({node: files[name] for node, files in known.items() if name in files}):
            odd[found.nodes, found.fault].append(name)
    for (nodes, fault), names in odd.items():
        value = f"{names[0]} has other contents"
        if len(names) > 1:
            value = f"{names[0]} and {len(names) - 1} more files have other contents"
        right = "those of most of the others" if fault is Fault.NODE else "the same on all nodes"
        yield Finding(FindingKind.CODE, nodes, value, right, True, fault)
    hashes = {each.node: each.config_hash for each in facts.nodes}
    say = lambda value: f"its config.yaml has the digest {str(value)[:12]}"  # noqa: E731
    yield from _differing(FindingKind.CONFIG, hashes, fatal=True, say=say)


def _data(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find files and folders of the config that are missing on some nodes, or differ between them."""
    for path in dict.fromkeys(path for each in facts.nodes for path in each.paths):
        seen = {each.node: each.paths[path] for each in facts.nodes if path in each.paths}
        missing = {node: f"{path} is not there" for node, found in seen.items() if found == MISSING}
        there = {node: found for node, found in seen.items() if found != MISSING}
        if not there:  # it may be no path at all, and if it is one, who reads it says so
            continue
        right = f"it is there, as on {'the other node' if len(there) == 1 else f'{len(there)} others'}"
        fault = Fault.NODE if len(there) >= len(missing) else Fault.CONFIG
        yield from _wrong(FindingKind.DATA_MISSING, missing, right, facts, fatal=True, fault=fault)
        yield from _differing(
            FindingKind.DATA_DIFFERS,
            there,
            fatal=True,
            say=lambda value, path=path: f"{path} is {value}",  # type: ignore[misc]
        )


def _clocks(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the clocks that are off: of each node it is known by how much at least and at most it is ahead of rank 0's.

    A clock is off only where that is certain: where its whole interval is away from the others' median. So a node that came
    late is none.
    """
    known = {each.node: each.clock for each in facts.nodes if each.clock is not None}
    right = f"at most {expected.clock_offset_s:g} s (preflight.clock_offset_s)"
    if len(known) == 2:  # nobody knows which of the two is right
        (first, one), (second, other) = known.items()
        apart = max(one[0] - other[1], other[0] - one[1])
        if apart > expected.clock_offset_s:
            yield Finding(FindingKind.CLOCK, (first, second), f"their clocks are {apart:.1f} s apart", right)
        return
    middle = median(sum(interval) / 2 for interval in known.values()) if known else 0.0
    for node, (least, most) in known.items():
        off = max(0.0, least - middle) or min(0.0, most - middle)
        if abs(off) > expected.clock_offset_s:
            value = f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            yield Finding(FindingKind.CLOCK, (node,), value, right, False, Fault.NODE)


def _disks(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find folders that cannot be written, or have no space left."""
    for path in dict.fromkeys(path for each in facts.nodes for path in each.disks):
        shared = path == expected.shared
        found = {each.node: f"{path} {said}" for each in facts.nodes if (said := each.disks.get(path))}
        fault = _fault_of(found, facts)
        if shared and len(facts.nodes) == 1:  # its space is the same for all nodes, so a single node tells of all
            fault = Fault.CONFIG
        right = "enough space (preflight.min_free_gb)" if shared else "enough space"
        fatal = shared or fault is Fault.NODE
        yield from _wrong(FindingKind.DISK_FULL, found, right, facts, fatal=fatal, fault=fault)


def _cpus(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find ranks that are bound to few CPUs, or to the very same ones: all on the first core, say."""
    bound: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for each in facts.ranks if expected.managed else ():
        if each.cpus is not None:
            bound[each.node, each.cpus].append(each.rank)
    few: dict[tuple[str, int], list[int]] = defaultdict(list)
    for (node, cpus), ranks in bound.items():
        if len(cpus) < expected.cpus_per_task:
            few[node, len(cpus)] += ranks
        if len(ranks) > len(cpus):
            value = f"{len(ranks)} ranks share CPU {', '.join(map(str, cpus))}"
            yield Finding(FindingKind.CPUS, (node,), value, "CPUs of their own", ranks=tuple(ranks))
    for (node, count), ranks in few.items():
        value = f"{'they' if len(ranks) > 1 else 'it'} may run on {count} CPU{'s' if count > 1 else ''}"
        right = f"{expected.cpus_per_task} (cluster.cpus_per_task)"
        yield Finding(FindingKind.CPUS, (node,), value, right, ranks=tuple(ranks))


def _variables(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find variables that slow training down, and those in which ranks differ."""
    ranks = [each for each in facts.ranks if each.variables is not None]
    for setting, right in LEFT_OVER.items():
        name, _, value = setting.partition("=")
        nodes = tuple(dict.fromkeys(each.node for each in ranks if (each.variables or {}).get(name) == value))
        if nodes and (expected.gpus_per_node or name == "TORCH_DISTRIBUTED_DEBUG"):
            yield Finding(FindingKind.VARIABLES, nodes, f"{setting} is set", right, False, _fault_of(nodes, facts))
    left_over = {setting.partition("=")[0] for setting in LEFT_OVER}
    for name in dict.fromkeys(name for each in ranks for name in each.variables or {} if name not in left_over):
        values = {each.rank: (each.variables or {}).get(name) for each in ranks}
        ((common, _),) = Counter(values.values()).most_common(1)
        others = [each for each in ranks if values[each.rank] != common]
        if others:
            told = ", ".join(sorted({str(values[each.rank]) for each in others})[:3])
            yield Finding(
                FindingKind.VARIABLES,
                tuple(dict.fromkeys(each.node for each in others)),
                f"{name} is {'not set' if told == 'None' else told}",
                f"{'not set' if common is None else common}, as for most ranks",
                ranks=tuple(each.rank for each in others),
            )


def _shared_folder(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes that do not see, or see late, what another one writes into the run directory."""
    wrong: dict[str, str] = {}
    late: dict[str, str] = {}
    for node in facts.nodes:
        folder = node.folder
        if folder is None:
            continue
        if folder.error:
            wrong[node.node] = f"cannot write into the run directory: {folder.error}"
        elif folder.stale:
            wrong[node.node] = "sees what the run directory held before"
        elif folder.seen_after_s is None:
            wrong[node.node] = f"does not see in {folder.limit_s:.0f} s what rank 0 has written into the run directory"
        elif folder.seen_after_s > LATE_S:
            late[node.node] = f"has seen {folder.seen_after_s:.1f} s late what rank 0 wrote into the run directory"
    for name in facts.unseen:
        wrong.setdefault(name, f"what it writes into the run directory is not seen on {facts.nodes[0].node}")
    yield from _wrong(FindingKind.SHARED_FOLDER, wrong, "all nodes see it", facts, fatal=True)
    yield from _wrong(FindingKind.SHARED_FOLDER, late, f"within {LATE_S:g} s", facts, fatal=False)
