"""Compare the facts of all ranks with each other and with what the config asks for: a pure function to findings.

The majority of the nodes decides what is right. Where there is none, as between two nodes that differ, nobody can tell which
of them is at fault, and the finding is the config's. A fact that is None is not known, and is no finding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.facts import GatheredFacts, GpuFacts, NodeFacts, RankFacts
from slurmtrain.runtime.preflight.findings import Fault, Finding, sorted_by_weight, without

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
LEAST_TMP_GB = 0.05  # of a node's own folder for temporary files: torch.compile, sockets and data workers need it
LEAST_FILES = 1000
BUSY_SHARE = 0.1  # of a GPU's memory: with more in use by others a job that fits may not fit
BUSY_GB = 2.0  # of one GPU: ranks of this job that have begun already take less
SPEED_SHARE = 0.5  # of the median: a network interface that is slower has lost its speed, or is another network
LATE_S = 5.0  # a folder that shows new files later than this makes restarts and saves wait
SHOWN_PACKAGES = 3


@dataclass(frozen=True)
class Expected:
    """What the config asks for.

    Attributes:
        world_size: ranks of the job.
        gpus_per_node: GPUs that the job has asked for.
        cpus_per_task: CPUs for each rank.
        mem_per_node_gb: memory asked for; None: it is not known.
        min_free_gb: least space where the run writes, in units of 1e9 bytes.
        clock_offset_s: how far a clock may be off.
        shared: the folders of `NodeFacts.disks` in which the run writes; the others are each node's own.
        managed: the job has nodes of its own (SLURM), so that a foreign process on its GPUs has no business there.
        alone: no other program of the same job may be on its GPUs, as other runs of a pack or a server beside a script.
        ignored: kinds of findings to leave out.
    """

    world_size: int
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem_per_node_gb: float | None = None
    min_free_gb: float = 0.2
    clock_offset_s: float = 5.0
    shared: tuple[str, ...] = ()
    managed: bool = True
    alone: bool = True
    ignored: tuple[str, ...] = field(default=())


def compare(facts: GatheredFacts, expected: Expected) -> list[Finding]:
    """Return what is not as it should be, the fatal first."""
    found = [finding for check in _CHECKS for finding in check(facts, expected)]
    return sorted_by_weight(without(found, expected.ignored))


@dataclass(frozen=True)
class _Outlier:
    """Nodes that have the same value, which is not that of the others; `others` is None where no value is right."""

    value: Hashable
    nodes: tuple[str, ...]
    others: Hashable | None

    @property
    def fault(self) -> Fault:
        return Fault.NODE if self.others is not None else Fault.CONFIG


def outliers(values: Mapping[str, Hashable]) -> list[_Outlier]:
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
    return [_Outlier(value, tuple(nodes), right) for value, nodes in groups.items()]


def _at_fault(nodes: Sequence[str], facts: GatheredFacts) -> Fault:
    """Return whose fault something is that these nodes have: that of all of them, or of most, is the config's."""
    return Fault.NODE if len(facts.nodes) == 1 or 2 * len(nodes) <= len(facts.nodes) else Fault.CONFIG


def _by_value(found: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the nodes by what was found on them, so that a hundred alike are one finding."""
    groups: dict[str, list[str]] = defaultdict(list)
    for node, value in found.items():
        groups[value].append(node)
    return {value: tuple(nodes) for value, nodes in groups.items()}


def _each(
    kind: FindingKind, found: Mapping[str, str], expected: str, facts: GatheredFacts, *, fatal: bool
) -> Iterator[Finding]:
    """Yield a finding for each value in `found`, which has the nodes where something is wrong by itself."""
    fault = _at_fault(list(found), facts)
    for value, nodes in _by_value(found).items():
        yield Finding(kind, nodes, value, expected, fatal, fault)


def _differing(
    kind: FindingKind,
    values: Mapping[str, Hashable],
    facts: GatheredFacts,
    *,
    fatal: bool,
    say: Callable[[Hashable], str],
) -> Iterator[Finding]:
    """Yield a finding for each value that is not that of the majority."""
    for odd in outliers(values):
        others = len([value for value in values.values() if value is not None]) - len(odd.nodes)
        right = "the same on all nodes" if odd.others is None else f"{say(odd.others)}, as on most of the others"
        if odd.others is not None and others == 1:
            right = f"{say(odd.others)}, as on the other node"
        yield Finding(kind, odd.nodes, say(odd.value), right, fatal, odd.fault)


# The checks, one for each kind of fact.


def _ranks(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
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
            yield Finding(
                FindingKind.RANKS, nodes, f"{count} processes are rank {rank}", "one", fatal=True, ranks=(rank,)
            )


def _gpus(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    if expected.gpus_per_node == 0:
        return
    asked = f"{expected.gpus_per_node} (cluster.gpus_per_node)"
    ranks_of: dict[str, list[RankFacts]] = defaultdict(list)
    for rank in facts.ranks:
        ranks_of[rank.node].append(rank)
    yield from _drivers(facts, ranks_of)
    missing = {
        each.node: f"{len(each.gpus)} GPUs are visible"
        for each in facts.nodes
        if each.gpus is not None and _gpus_of(each, len(ranks_of[each.node]), expected) < expected.gpus_per_node
    }
    blind = {each.node: None for each in facts.ranks if each.gpus_seen == 0 and each.node not in missing}
    yield from _each(FindingKind.GPU_MISSING, missing, asked, facts, fatal=True)
    for node in blind:
        ranks = tuple(each.rank for each in ranks_of[node] if each.gpus_seen == 0)
        fault = _at_fault(list(blind), facts)
        yield Finding(FindingKind.GPU_MISSING, (node,), "no GPU is visible", asked, True, fault, ranks)
    for each in facts.nodes:
        if len(each.gpus or ()) > expected.gpus_per_node:
            continue  # some are those of other jobs, and nobody knows which
        for gpu in each.gpus or ():
            yield from _gpu(each.node, gpu, [rank.pid for rank in ranks_of[each.node]], expected)
    names = {
        each.node: ", ".join(sorted({gpu.name for gpu in each.gpus if gpu.name})) or None
        for each in facts.nodes
        if each.gpus
    }
    yield from _differing(FindingKind.VERSIONS, names, facts, fatal=False, say=lambda value: f"GPUs are {value}")


def _drivers(facts: GatheredFacts, ranks_of: Mapping[str, Sequence[RankFacts]]) -> Iterator[Finding]:
    """Find the nodes whose driver does not answer NVML. Where torch sees GPUs all the same, that is a warning."""
    broken = {
        each.node: f"the driver says: {each.driver_error}" for each in facts.nodes if each.driver_error is not None
    }
    works = {node for node in broken if any(each.gpus_seen for each in ranks_of[node])}
    for nodes, fatal in ((broken.keys() - works, True), (works, False)):
        found = {node: said for node, said in broken.items() if node in nodes}
        yield from _each(FindingKind.GPU_DRIVER, found, "a driver that answers", facts, fatal=fatal)


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
    names = dict.fromkeys(name for each in facts.nodes for name in each.versions or {})
    for name in names:
        values = {each.node: (each.versions or {}).get(name) for each in facts.nodes}
        yield from _differing(
            FindingKind.VERSIONS,
            values,
            facts,
            fatal=name in FATAL_VERSIONS,
            say=lambda value, name=name: f"{name} {value}",  # type: ignore[misc]
        )


def _packages(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    known = {each.node: each.packages for each in facts.nodes if each.packages is not None}
    names = sorted({name for packages in known.values() for name in packages})
    odd: dict[tuple[str, ...], list[tuple[str, str, str]]] = defaultdict(list)  # nodes -> name, value, expected
    undecided: dict[tuple[str, ...], bool] = {}
    for name in names:
        for found in outliers({node: packages.get(name, "none") for node, packages in known.items()}):
            odd[found.nodes].append((name, str(found.value), "" if found.others is None else str(found.others)))
            undecided[found.nodes] = undecided.get(found.nodes, False) or found.others is None
    for nodes, differing in odd.items():
        fault = Fault.CONFIG if undecided[nodes] else Fault.NODE
        yield _of_packages(nodes, (), differing, fault)
    by_differences: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = defaultdict(list)
    for rank in facts.ranks:
        if rank.differs:
            by_differences[rank.node, tuple(sorted(rank.differs.items()))].append(rank.rank)
    for (node, differs), ranks in by_differences.items():
        own = known.get(node, {})
        yield _of_packages(
            (node,), tuple(ranks), [(name, value, own.get(name, "none")) for name, value in differs], Fault.CONFIG
        )


def _of_packages(
    nodes: tuple[str, ...], ranks: tuple[int, ...], differing: Sequence[tuple[str, str, str]], fault: Fault
) -> Finding:
    """Return one finding for all packages in which nodes, or ranks of a node, differ. Those that matter are named first."""
    ordered = sorted(differing, key=lambda each: (not matters(each[0]), each[0]))
    shown = ordered[:SHOWN_PACKAGES]
    more = f" and {len(ordered) - len(shown)} more" if len(ordered) > len(shown) else ""
    right = ", ".join(f"{name} {value}" for name, _, value in shown if value)
    return Finding(
        FindingKind.PACKAGES,
        nodes,
        ", ".join(f"{name} {value}" for name, value, _ in shown) + more,
        (f"{right}, as the other ranks of that node" if ranks else f"{right}, as on most of the others")
        if right
        else "the same on all nodes",
        any(matters(name) for name, _, _ in differing),
        fault,
        ranks,
    )


def matters(package: str) -> bool:
    """Return whether ranks with different versions of a package should not train together."""
    return package in FATAL_PACKAGES or package.startswith(FATAL_LIBRARIES)


def _code(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    known = {each.node: each.code for each in facts.nodes if each.code is not None}
    odd: dict[tuple[tuple[str, ...], Fault], list[str]] = defaultdict(list)
    for name in sorted({name for files in known.values() for name in files}):
        # Rank 0 loads modules that others do not, so only nodes that have loaded it are compared.
        for found in outliers({node: files[name] for node, files in known.items() if name in files}):
            odd[found.nodes, found.fault].append(name)
    for (nodes, fault), names in odd.items():
        more = f" and {len(names) - 1} more files" if len(names) > 1 else ""
        value = f"{names[0]}{more} have other contents" if more else f"{names[0]} has other contents"
        right = "those of most of the others" if fault is Fault.NODE else "the same on all nodes"
        yield Finding(FindingKind.CODE, nodes, value, right, True, fault)
    yield from _differing(
        FindingKind.CONFIG,
        {each.node: each.config_hash for each in facts.nodes},
        facts,
        fatal=True,
        say=lambda value: f"its config.yaml has the digest {str(value)[:12]}",
    )


def _data(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    for path in dict.fromkeys(path for each in facts.nodes for path in each.paths or {}):
        seen = {each.node: each.paths[path] for each in facts.nodes if each.paths and path in each.paths}
        missing = [node for node, found in seen.items() if found.kind == "missing"]
        there = len(seen) - len(missing)
        if not there:  # it may be no path at all, and if it is one, who reads it says so
            continue
        if missing:
            where = f", as on {'the other node' if there == 1 else f'{there} others'}"
            fault = Fault.NODE if there >= len(missing) else Fault.CONFIG
            yield Finding(
                FindingKind.DATA_MISSING, tuple(missing), f"{path} is not there", f"it is there{where}", True, fault
            )
        known = {node: found for node, found in seen.items() if node not in missing}
        folders = any(found.kind == "folder" for found in known.values())
        contents = {
            node: (found.kind, None if folders else found.size_bytes, found.digest) for node, found in known.items()
        }
        listings = {node: found.listing for node, found in known.items() if found.listing is not None}
        # Files may come to a folder while the nodes look, one after the other; its manifest stays as it is.
        for values, fatal in ((contents, True), ({} if outliers(contents) else listings, False)):
            yield from _differing(
                FindingKind.DATA_DIFFERS,
                values,
                facts,
                fatal=fatal,
                say=lambda value, path=path: _said_of_path(path, value),  # type: ignore[misc]
            )


def _said_of_path(path: str, value: Hashable) -> str:
    if not isinstance(value, tuple):
        return f"the names and sizes in {path} have the digest {str(value)[:12]}"
    kind, size, digest = value
    of = "" if size is None else f" of {size} bytes"
    return f"{path} is a {kind}{of} {f'with the digest {digest[:12]}' if digest else 'without a manifest'}"


def _clocks(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the clocks that are off: each node knows what its clock showed just before and after one moment.

    A clock is off only where that is certain: where its whole interval is away from the others' median. So a process that was
    held up in between is none.
    """
    known = {each.node: each.clock for each in facts.nodes if each.clock is not None}
    if len(known) < 2:
        return
    right = f"at most {expected.clock_offset_s:g} s (preflight.clock_offset_s)"
    if len(known) == 2:  # nobody knows which of the two is right
        (first, one), (second, other) = known.items()
        apart = max(one[0] - other[1], other[0] - one[1])
        if apart > expected.clock_offset_s:
            yield Finding(FindingKind.CLOCK, (first, second), f"their clocks are {apart:.1f} s apart", right)
        return
    middle = median((before + after) / 2 for before, after in known.values())
    for node, interval in known.items():
        off = _distance(interval, middle)
        if abs(off) > expected.clock_offset_s:
            value = f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            yield Finding(FindingKind.CLOCK, (node,), value, right, False, Fault.NODE)


def _distance(interval: tuple[float, float], moment: float) -> float:
    """Return how far an interval is after a moment, or, negative, before it; 0 when the moment is within."""
    before, after = interval
    return before - moment if before > moment else min(0.0, after - moment)


def _disks(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    for path in dict.fromkeys(path for each in facts.nodes for path in each.disks or {}):
        shared = path in expected.shared
        least = expected.min_free_gb if shared else LEAST_TMP_GB
        found: dict[str, str] = {}
        for node in facts.nodes:
            disk = (node.disks or {}).get(path)
            if disk is None:
                continue
            if disk.error is not None:
                found[node.node] = f"{path} cannot be written: {disk.error}"
            elif disk.free_gb is not None and disk.free_gb < least:
                found[node.node] = f"{path} has {disk.free_gb:.2g} GB left"
            elif disk.free_files is not None and disk.free_files < LEAST_FILES:
                found[node.node] = f"{path} has room for {disk.free_files} more files"
        right = f"at least {least:g} GB{' (preflight.min_free_gb)' if shared else ''} and {LEAST_FILES} files"
        fatal = shared or _at_fault(list(found), facts) is Fault.NODE
        for finding in _each(FindingKind.DISK_FULL, found, right, facts, fatal=fatal):
            # Free space of a shared folder is the same for all nodes, so a single node tells of all.
            alone = shared and len(facts.nodes) == 1
            yield Finding(
                finding.kind, finding.nodes, finding.value, right, fatal, Fault.CONFIG if alone else finding.fault
            )


def _memory(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    asked = expected.mem_per_node_gb
    if not asked or not expected.managed:
        return
    found = {
        each.node: f"{each.memory_gb:.0f} GB of memory are available"
        for each in facts.nodes
        if each.memory_gb is not None and each.memory_gb < 0.8 * asked
    }
    yield from _each(FindingKind.MEMORY, found, f"{asked:g} GB (cluster.mem_per_node_gb)", facts, fatal=False)


def _cpus(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    if not expected.managed:
        return
    few: dict[tuple[str, int], list[int]] = defaultdict(list)
    for each in facts.ranks:
        count = count_of(each.cpus)
        # A rank that may use the whole machine is not bound, and the machine of a sandbox has what it has.
        if count is not None and count < expected.cpus_per_task and count < (each.cpus_of_machine or 0):
            few[each.node, count].append(each.rank)
    for (node, count), ranks in few.items():
        value = f"{'they' if len(ranks) > 1 else 'it'} may run on {count} CPU{'s' if count > 1 else ''}"
        right = f"{expected.cpus_per_task} (cluster.cpus_per_task)"
        yield Finding(FindingKind.CPUS, (node,), value, right, False, Fault.CONFIG, tuple(ranks))
    yield from _sharing_cpus(facts)
    far: dict[tuple[str, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for each in facts.ranks:
        own = each.gpu_numa_node
        if own is not None and own >= 0 and each.numa_nodes and own not in each.numa_nodes:
            far[each.node, own, each.numa_nodes].append(each.rank)
    for (node, own, nodes), ranks in far.items():
        value = f"may run on the socket of NUMA node {', '.join(map(str, nodes))} only"
        right = f"that of node {own}, where its GPU is"
        yield Finding(FindingKind.NUMA, (node,), value, right, False, Fault.CONFIG, tuple(ranks))


def _sharing_cpus(facts: GatheredFacts) -> Iterator[Finding]:
    """Find ranks of a node that are bound to the very same CPUs, fewer than there are ranks: all on the first core, say."""
    sharing: dict[tuple[str, str], list[RankFacts]] = defaultdict(list)
    for each in facts.ranks:
        if each.cpus is not None:
            sharing[each.node, each.cpus].append(each)
    for (node, cpus), ranks in sharing.items():
        count = count_of(cpus) or 0
        bound = count < (ranks[0].cpus_of_machine or 0)
        if bound and len(ranks) > count:
            yield Finding(
                FindingKind.CPUS,
                (node,),
                f"{len(ranks)} ranks share CPU {cpus}",
                "CPUs of their own",
                False,
                Fault.CONFIG,
                tuple(each.rank for each in ranks),
            )


def count_of(cpus: str | None) -> int | None:
    """Return how many CPUs a list of the kernel has, such as "0-3,8"; None if it is none."""
    if not cpus:
        return None
    total = 0
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return None
        total += int(last or first) - int(first) + 1
    return total


def _variables(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    for said, nodes in _by_value_of_each(
        {each.node: [f"{name}={value}" for name, value in (each.variables or {}).items()] for each in facts.nodes}
    ).items():
        name = said.partition("=")[0]
        right = LEFT_OVER.get(name, "it is not set")
        yield Finding(FindingKind.VARIABLES, nodes, f"{said} is set", right, False, _at_fault(nodes, facts))
    names = dict.fromkeys(name for each in facts.ranks for name in each.variables or {})
    for name in names:
        values = {each.rank: (each.variables or {}).get(name) for each in facts.ranks if each.variables is not None}
        counts = Counter(values.values())
        if len(counts) < 2:
            continue
        ((common, _),) = counts.most_common(1)
        others = [each for each in facts.ranks if each.rank in values and values[each.rank] != common]
        told = ", ".join(sorted({str(values[each.rank]) for each in others})[:3])
        yield Finding(
            FindingKind.VARIABLES,
            tuple(dict.fromkeys(each.node for each in others)),
            f"{name} is {'not set' if told == 'None' else told}",
            f"{'not set' if common is None else common}, as for most ranks",
            ranks=tuple(each.rank for each in others),
        )


# Variables that a shell, another job or a search for a fault has left: what is expected in their place.
LEFT_OVER = {
    "CUDA_LAUNCH_BLOCKING": "it is not set: with it each kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "it is not DETAIL: with it each collective is checked by another one",
    "NCCL_P2P_DISABLE": "it is not set: with it GPUs of a node exchange through the CPU's memory",
    "NCCL_IB_DISABLE": "it is not set: with it InfiniBand is not used",
    "NCCL_SHM_DISABLE": "it is not set: with it GPUs of a node exchange through the network",
    "NCCL_SOCKET_IFNAME": "an interface that this node has",
    "GLOO_SOCKET_IFNAME": "an interface that this node has",
}


def _by_value_of_each(found: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for node, values in found.items():
        for value in values:
            groups[value].append(node)
    return {value: tuple(nodes) for value, nodes in groups.items()}


def _interfaces(facts: GatheredFacts) -> tuple[dict[str, Hashable], dict[str, Hashable]]:
    """Return the interface of each node, and the network that it is in."""
    return {each.node: each.interface for each in facts.nodes}, {each.node: each.network for each in facts.nodes}


def _network(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    if len(facts.nodes) < 2:
        return
    # Nodes name the same network differently, and each rack may have a network of its own: one of the two is no finding.
    names, networks = ({node: odd for odd in outliers(values) for node in odd.nodes} for values in _interfaces(facts))
    for node in names:
        if node in networks or not any(each.network for each in facts.nodes):
            right = names[node].others or "the same on all nodes"
            network = next((f" ({each.network})" for each in facts.nodes if each.node == node and each.network), "")
            value = f"its network interface is {names[node].value}{network}"
            yield Finding(FindingKind.INTERFACE, (node,), value, str(right), False, names[node].fault)
    speeds = {each.node: each.interface_mbit for each in facts.nodes if each.interface_mbit}
    if len(speeds) < 2:
        return
    usual = median(speeds.values())
    slow = {
        node: f"its network interface runs at {speed / 1000:g} Gbit/s"
        for node, speed in speeds.items()
        if speed < SPEED_SHARE * usual
    }
    yield from _each(FindingKind.NETWORK_SPEED, slow, f"{usual / 1000:g} Gbit/s, as on most nodes", facts, fatal=False)


def _folder(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    known = {each.node: each.folder for each in facts.nodes if each.folder is not None}
    errors = {node: f"cannot write into the run directory: {each.error}" for node, each in known.items() if each.error}
    yield from _each(FindingKind.SHARED_FOLDER, errors, "it can, as rank 0", facts, fatal=True)
    blind = {
        node: f"does not see in {each.limit_s:.0f} s what rank 0 has written into the run directory"
        for node, each in known.items()
        if each.seen_after_s is None and not each.stale and node not in errors
    }
    stale = {node: "sees what the run directory held before" for node, each in known.items() if each.stale}
    for found in (blind, stale):
        yield from _each(FindingKind.SHARED_FOLDER, found, "all nodes see it", facts, fatal=True)
    late = {
        node: f"has seen {each.seen_after_s:.1f} s late what rank 0 wrote into the run directory"
        for node, each in known.items()
        if each.seen_after_s is not None and each.seen_after_s > LATE_S and node not in stale
    }
    yield from _each(FindingKind.SHARED_FOLDER, late, f"within {LATE_S:g} s", facts, fatal=False)
    lost = [node for node in facts.unseen if node not in (*errors, *blind, *stale)]
    if lost:
        value = f"what it writes into the run directory is not seen on {facts.nodes[0].node}"
        yield from _each(FindingKind.SHARED_FOLDER, dict.fromkeys(lost, value), "it is", facts, fatal=True)


_CHECKS = (
    *(
        _ranks,
        _gpus,
        _versions,
        _packages,
        _code,
        _data,
        _clocks,
        _disks,
        _memory,
        _cpus,
        _variables,
        _network,
        _folder,
    ),
)
