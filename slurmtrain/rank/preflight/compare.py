"""Compare the facts of all ranks with each other and with what the config asks for: a pure function to findings.

A fact that is not known is no finding. What is wrong by itself is the fault of its node, unless most nodes have it. Where nodes
differ, the majority decides what is right; where there is none, as between two nodes, nobody can tell which of them is at
fault, and the finding is the config's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurmtrain.choices import Backend, FindingKind, JobKind
from slurmtrain.config.schema import Config
from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.rank.preflight.facts import FOLDER_LIMIT_S, MISSING, NodeFacts, RankFacts, gpus_of
from slurmtrain.system.gpu import GpuFacts

BUSY_SHARE = 0.1  # of a GPU's memory: with more in use by others a job that fits may not fit
BUSY_GB = 2.0  # of one GPU: ranks of this job that have begun already take less
LATE_S = 5.0  # a folder that shows new files later than this makes restarts and saves wait
SHOWN = 3  # names in which nodes differ
MOST_NAMED = 8  # nodes in one sentence
# Versions whose difference ends training sooner or later: two releases of NCCL or torch do not talk to each other, and other
# CUDA or Python releases compute other bits. Two releases of a driver work together. Of packages, those that compute, read
# data or write checkpoints.
FATAL_VERSIONS = (
    *("python", "cuda", "nccl", "slurmtrain", "torch", "triton", "pytorch-triton", "numpy", "safetensors", "torchao"),
    *("transformers", "tokenizers", "peft", "accelerate", "deepspeed", "lightning", "pytorch-lightning", "flash-attn"),
    *("transformer-engine", "xformers", "bitsandbytes"),
)
# The libraries of CUDA with which these compute, communicate and read, whatever stands behind: nvidia-cublas-cu12. Other
# packages of nvidia monitor (nvidia-ml-py), profile (nvidia-cuda-cupti, nvidia-nvtx), or have nothing to do with training.
FATAL_LIBRARIES = (
    *("nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn", "nvidia-cufft", "nvidia-cufile"),
    *("nvidia-curand", "nvidia-cusolver", "nvidia-cusparse", "nvidia-cutlass", "nvidia-dali", "nvidia-modelopt"),
    *("nvidia-nccl", "nvidia-nvjitlink", "nvidia-nvshmem"),
)


# What is found: each kind with what to do about it, and whose fault it is.


class Fault(StrEnum):
    """Who has to put it right. Another start leaves out a node at fault; nothing but a person mends the config."""

    NODE = "node"
    CONFIG = "config"  # the config, the environment of the job, or all nodes alike


ADVICE = {
    FindingKind.GPU_MISSING: "`nvidia-smi` on {node} shows its GPUs; cluster.exclude={node} leaves that node out",
    FindingKind.GPU_DRIVER: "tell the admins of the cluster; cluster.exclude={node} leaves that node out",
    FindingKind.GPU_BROKEN: "tell the admins of the cluster; cluster.exclude={node} leaves that node out",
    FindingKind.GPU_SLOWED: "`nvidia-smi -q -d PERFORMANCE` on {node} says why; tell the admins if it stays so",
    FindingKind.GPU_BUSY: "`nvidia-smi` on {node} shows them; a job that has ended may have left them behind",
    FindingKind.VERSIONS: "use one environment for all nodes, or a container; PYTHONPATH and ~/.local/lib of {node} may put "
    "another one first",
    FindingKind.CODE: "config.yaml lies in the run directory: is that the same folder on {node}? Bytes that are stale there "
    "vanish when the node mounts it anew",
    FindingKind.DATA: "is it mounted on {node}? Copy the data there once more, or name a folder that all nodes share",
    FindingKind.CLOCK: "tell the admins of the cluster: chronyd or ntpd of {node} does not run, or has lost its server",
    FindingKind.DISK_FULL: "make room there: `runs prune`, `checkpoints RUN prune`, `df -h` and `df -i` on {node}",
    FindingKind.CPUS: "cluster.cpus_per_task asks for them, and srun binds ranks to them: see --cpu-bind of cluster.srun_args",
    FindingKind.SHARED_FOLDER: "job.runs_dir has to be one folder for all nodes: is it mounted on {node}?",
    FindingKind.SLOW_NODE: "cluster.exclude={node} leaves that node out, preflight.exclude_slow=true does so by itself",
    FindingKind.SLOW_LINK: "tell the admins of the cluster which pair it is",
    FindingKind.SLOW_NETWORK: "NCCL_DEBUG=INFO logs which network NCCL uses, and cluster.network_interface names another one; "
    "or correct cluster.network_gb_per_s",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        nodes: on which it is.
        ranks: which ranks it is about; () for all of those nodes.
        value: what was found, and `expected` what was not.
        fatal: training must not begin with it.
        fault: who has to put it right.
    """

    kind: FindingKind
    nodes: tuple[str, ...]
    value: str
    expected: str
    fatal: bool = False
    fault: Fault = Fault.CONFIG
    ranks: tuple[int, ...] = ()

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind].replace("{node}", ",".join(self.nodes[:MOST_NAMED]) or "the node")

    @property
    def sentence(self) -> str:
        """Say where it is, with the ranks if not all of the nodes' are meant, what was found and what was expected."""
        where = _first_few(self.nodes)
        if self.ranks:
            where = f"rank{'s' if len(self.ranks) > 1 else ''} {_first_few(self.ranks)} on {where}"
        return f"{where}: {self.value}; expected: {self.expected}"


def _first_few(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:MOST_NAMED]))
    return f"{shown} and {len(values) - MOST_NAMED} more" if len(values) > MOST_NAMED else shown


def error_of(found: Sequence[Finding]) -> EnvironmentMismatchError | None:
    """Return the error that ends an attempt with these findings; None if it may go on.

    Where only nodes are at fault, it names them, so that another start leaves them out. A fault of the config would be
    there on other nodes, too.
    """
    fatal = [each for each in found if each.fatal]
    if not fatal:
        return None
    of_config = [each for each in fatal if each.fault is Fault.CONFIG]
    first = (of_config or fatal)[0]
    nodes = () if of_config else tuple(dict.fromkeys(node for each in fatal for node in each.nodes))
    more = len(fatal) - 1
    also = f" (and {more} more: {', '.join(dict.fromkeys(str(each.kind) for each in fatal[1:]))})" if more else ""
    return EnvironmentMismatchError(
        f"preflight, {first.kind}: {first.sentence}{also}",
        hint=f"{first.advice}; preflight.ignore=[{first.kind}] ignores it",
        nodes=nodes,
        told_all=True,
    )


# What it is found in.


@dataclass(frozen=True)
class Gathered:
    """The facts of all ranks.

    Attributes:
        run_dir: the folder in which the run writes; the others of `NodeFacts.disks` are each node's own.
        managed: the job has nodes of its own (SLURM), so that a foreign process on its GPUs has no business there.
    """

    ranks: Sequence[RankFacts]
    run_dir: str = ""
    managed: bool = True

    @property
    def nodes(self) -> dict[str, NodeFacts]:
        return {each.node: each.of_node for each in self.ranks if each.of_node is not None}

    def fault_of(self, nodes: Collection[str]) -> Fault:
        """Return whose fault something is that these nodes have: that of all of them, or of most, is the config's."""
        count = len(self.nodes)
        return Fault.NODE if count == 1 or 2 * len(nodes) <= count else Fault.CONFIG


def compare(facts: Gathered, config: Config) -> list[Finding]:
    """Return what is not as it should be, the fatal first, and of those the config's own first."""
    comparisons = (_gpus, _same, _clocks, _disks, _cpus, _shared_folder)
    found = [each for comparison in comparisons for each in comparison(facts, config)]
    found = [each for each in found if each.kind not in config.preflight.ignore]
    return sorted(found, key=lambda each: (not each.fatal, each.fault is Fault.NODE, each.kind, each.nodes))


def _wrong(
    kind: FindingKind,
    found: Mapping[str, str],
    expected: str,
    facts: Gathered,
    *,
    fatal: bool,
    fault: Fault | None = None,
) -> Iterator[Finding]:
    """Yield a finding for each value in `found`, which has the nodes where something is wrong by itself."""
    for value in dict.fromkeys(found.values()):  # a hundred nodes alike are one finding
        nodes = tuple(node for node in found if found[node] == value)
        yield Finding(kind, nodes, value, expected, fatal, fault or facts.fault_of(found))


# What is judged.


def _same(facts: Gathered, config: Config) -> Iterator[Finding]:
    """Find the nodes with other versions, config or data: one finding for all in which they differ, those that matter first."""
    nodes = facts.nodes
    for kind in (FindingKind.VERSIONS, FindingKind.CODE, FindingKind.DATA):
        known = {node: each.same.get(kind, {}) for node, each in nodes.items()}
        odd: dict[tuple[tuple[str, ...], bool], list[tuple[str, str, str | None]]] = defaultdict(list)
        for name in sorted(
            {name for each in known.values() for name in each}, key=lambda name: (not matters(name), name)
        ):
            # A package may be installed on some nodes only, so only nodes that have it are compared.
            values = {node: each[name] for node, each in known.items() if name in each}
            right = _right(values.values())
            for value in dict.fromkeys(values.values()):
                if value != right and len(set(values.values())) > 1:
                    others = tuple(node for node in values if values[node] == value)
                    odd[others, right is None].append((name, value, right))
        for (others, undecided), differing in odd.items():
            more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            right = ", ".join(f"{name} {right}" for name, _, right in differing[:SHOWN])
            yield Finding(
                kind,
                others,
                ", ".join(f"{name} {value}" for name, value, _ in differing[:SHOWN]) + more,
                "the same on all nodes" if undecided else f"{right}, as on most of the others",
                kind != FindingKind.VERSIONS or any(matters(name) for name, _, _ in differing),
                Fault.CONFIG if undecided else Fault.NODE,
            )


def _right(values: Collection[str]) -> str | None:
    """Return the value of more than half of the nodes; None: there is none. Of what is missing on some, half are enough."""
    counts = Counter(value for value in values if value != MISSING)
    if not counts:
        return MISSING
    ((common, count),) = counts.most_common(1)
    return common if 2 * count > len(values) or (MISSING in values and 2 * count == len(values)) else None


def matters(name: str) -> bool:
    """Return whether ranks with different versions of this should not train together."""
    return name in FATAL_VERSIONS or name.startswith(FATAL_LIBRARIES)


def _gpus(facts: Gathered, config: Config) -> Iterator[Finding]:
    """Find GPUs that are missing, broken, slowed or in use by others."""
    wanted, nodes = gpus_of(config), facts.nodes
    if wanted == 0:
        return
    asked = f"{wanted} (cluster.gpus_per_node)"
    ranks_of = {node: [each for each in facts.ranks if each.node == node] for node in nodes}
    silent = {node: f"the driver says: {each.driver_error}" for node, each in nodes.items() if each.driver_error}
    for fatal in (True, False):  # a warning where torch sees GPUs although the driver does not answer NVML
        found = {node: said for node, said in silent.items() if fatal != any(each.gpus_seen for each in ranks_of[node])}
        yield from _wrong(FindingKind.GPU_DRIVER, found, "a driver that answers", facts, fatal=fatal)
    missing = {
        node: f"{len(each.gpus)} GPUs are visible"
        for node, each in nodes.items()
        if each.gpus is not None and _gpus_shown(each.gpus, len(ranks_of[node]), wanted) < wanted
    }
    yield from _wrong(FindingKind.GPU_MISSING, missing, asked, facts, fatal=True)
    blind = [each for each in facts.ranks if each.gpus_seen == 0 and each.node not in missing]
    for node in dict.fromkeys(each.node for each in blind):
        ranks = tuple(each.rank for each in blind if each.node == node)
        fault = facts.fault_of({each.node for each in blind})
        yield Finding(FindingKind.GPU_MISSING, (node,), "no GPU is visible", asked, True, fault, ranks)
    # No other program of the same job may be on its GPUs, unless it is one run of a pack, or a server beside a script.
    alone = config.job.kind != JobKind.COMMAND and config.sweep.pack == 1
    for node, each in nodes.items():
        gpus = each.gpus or ()
        for gpu in gpus if len(gpus) <= wanted else ():  # else some are those of other jobs, and nobody knows which
            yield from _gpu(node, gpu, [rank.pid for rank in ranks_of[node]], alone=alone, managed=facts.managed)


def _gpus_shown(gpus: Sequence[GpuFacts], ranks: int, wanted: int) -> int:
    """Return how many GPUs the ranks of a node have together, as seen from its first rank.

    SLURM may show each rank only its own share of them, and NVML shows no slices of a GPU.
    """
    count = len(gpus)
    if any(gpu.sliced for gpu in gpus):
        return wanted
    return count * ranks if 0 < count <= wanted // max(1, ranks) else count


def _gpu(node: str, gpu: GpuFacts, own: Collection[int], *, alone: bool, managed: bool) -> Iterator[Finding]:
    def finding(kind: FindingKind, value: str, right: str, *, fatal: bool) -> Finding:
        return Finding(kind, (node,), value, right, fatal, Fault.NODE)

    # Since Ampere the driver takes memory with errors out of use, also before a reset replaces it, and new programs may begin.
    # It says itself if they may not (NVIDIA GPU Memory Error Management). Of older GPUs only the count is known.
    is_mended = gpu.remap_pending is not None or gpu.needs is not None
    if gpu.needs and not gpu.remap_failed:
        value = f"GPU {gpu.index} needs {gpu.needs} after an error (Xid)"
        yield finding(FindingKind.GPU_BROKEN, value, "nothing", fatal=not gpu.needs_later)
    elif gpu.broken:
        fatal = bool(gpu.remap_failed or (gpu.ecc_errors and not is_mended))
        yield finding(FindingKind.GPU_BROKEN, gpu.broken, "sound memory", fatal=fatal)
    if gpu.slowed_by:
        value = f"GPU {gpu.index} is slowed by {', '.join(gpu.slowed_by)}"
        yield finding(FindingKind.GPU_SLOWED, value, "its full clock", fatal=False)
    # A slice (MIG) is the job's own, and the memory in use is that of all slices, which may be those of other jobs.
    others = [pid for pid in gpu.processes or () if pid not in own and not gpu.sliced]
    # In a container's own space of process ids a rank is not known by its own; what a rank takes before it trains is little.
    if others and alone and gpu.used_gb is not None and gpu.used_gb > BUSY_GB:
        share = gpu.used_gb / gpu.memory_gb if gpu.memory_gb else 0.0
        pids = ", ".join(map(str, others[:4]))
        value = f"GPU {gpu.index} has {gpu.used_gb:.1f} GB in use, by processes that are none of this job ({pids})"
        yield finding(FindingKind.GPU_BUSY, value, "no other process", fatal=managed and share > BUSY_SHARE)


def _clocks(facts: Gathered, config: Config) -> Iterator[Finding]:
    """Find the clocks that are off, seen from rank 0's."""
    limit_s = config.preflight.clock_offset_s
    for node, each in facts.nodes.items():
        if abs(off := each.clock_ahead_s) > limit_s:
            value = f"its clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} that of {facts.ranks[0].node}"
            right = f"at most {limit_s:g} s (preflight.clock_offset_s)"
            yield Finding(FindingKind.CLOCK, (node,), value, right, False, Fault.NODE)


def _disks(facts: Gathered, config: Config) -> Iterator[Finding]:
    """Find folders that cannot be written, or have no space left."""
    nodes = facts.nodes
    for path in dict.fromkeys(path for each in nodes.values() for path in each.disks):
        shared = path == facts.run_dir
        found = {node: f"{path} {said}" for node, each in nodes.items() if (said := each.disks.get(path))}
        # The space of a shared folder is the same for all nodes, so a single node speaks for all.
        fault = Fault.CONFIG if shared and len(nodes) == 1 else facts.fault_of(found)
        right = "enough space (preflight.min_free_gb)" if shared else "enough space"
        fatal = shared or fault is Fault.NODE
        yield from _wrong(FindingKind.DISK_FULL, found, right, facts, fatal=fatal, fault=fault)


def _cpus(facts: Gathered, config: Config) -> Iterator[Finding]:
    """Find nodes whose ranks are bound to fewer CPUs together than the config asks for: all to the first core, say."""
    threads = 1 if config.cluster.backend == Backend.LOCAL else config.cluster.cpus_per_task
    bound: dict[str, list[RankFacts]] = defaultdict(list)
    for each in facts.ranks if facts.managed else ():
        bound[each.node].append(each)
    found = {}
    for node, ranks in bound.items():
        cpus = {cpu for each in ranks for cpu in each.cpus or ()}
        if all(each.cpus is not None for each in ranks) and len(cpus) < threads * len(ranks):
            found[node] = f"its {len(ranks)} ranks may run on {len(cpus)} CPUs, and need {threads * len(ranks)}"
    right = f"{threads} for each rank (cluster.cpus_per_task)"
    yield from _wrong(FindingKind.CPUS, found, right, facts, fatal=False)


def _shared_folder(facts: Gathered, config: Config) -> Iterator[Finding]:
    """Find the nodes that do not see, or see late, what rank 0 writes into the run directory."""
    what = "what rank 0 has written into the run directory"
    seen = {node: each.folder_after_s for node, each in facts.nodes.items()}
    blind = {node: f"does not see in {FOLDER_LIMIT_S:.0f} s {what}" for node, s in seen.items() if s is None}
    late = {node: f"has seen {s:.1f} s late {what}" for node, s in seen.items() if s is not None and s > LATE_S}
    yield from _wrong(FindingKind.SHARED_FOLDER, blind, "all nodes see it", facts, fatal=True)
    yield from _wrong(FindingKind.SHARED_FOLDER, late, f"within {LATE_S:g} s", facts, fatal=False)
