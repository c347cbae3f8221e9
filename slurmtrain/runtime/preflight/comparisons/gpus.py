"""The GPUs of each node: whether those that the job has asked for are there, work, and are its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.comparisons.majority import differing_values, fault_of, wrong_values
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import GatheredFacts, GpuFacts, NodeFacts, RankFacts
from slurmtrain.runtime.preflight.findings import Fault, Finding

BUSY_SHARE = 0.1  # of a GPU's memory: with more in use by others a job that fits may not fit
BUSY_GB = 2.0  # of one GPU: ranks of this job that have begun already take less


def compare_gpus(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find GPUs that are missing, broken, slowed or in use by others, and nodes with another model."""
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
    yield from wrong_values(FindingKind.GPU_MISSING, missing, asked, facts, fatal=True)
    for node in blind:
        ranks = tuple(each.rank for each in ranks_of[node] if each.gpus_seen == 0)
        fault = fault_of(list(blind), facts)
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
    yield from differing_values(FindingKind.VERSIONS, names, facts, fatal=False, say=lambda value: f"GPUs are {value}")


def _drivers(facts: GatheredFacts, ranks_of: Mapping[str, Sequence[RankFacts]]) -> Iterator[Finding]:
    """Find the nodes whose driver does not answer NVML. Where torch sees GPUs all the same, that is a warning."""
    broken = {
        each.node: f"the driver says: {each.driver_error}" for each in facts.nodes if each.driver_error is not None
    }
    works = {node for node in broken if any(each.gpus_seen for each in ranks_of[node])}
    for nodes, fatal in ((broken.keys() - works, True), (works, False)):
        found = {node: said for node, said in broken.items() if node in nodes}
        yield from wrong_values(FindingKind.GPU_DRIVER, found, "a driver that answers", facts, fatal=fatal)


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
