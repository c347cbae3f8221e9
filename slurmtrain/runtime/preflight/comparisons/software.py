"""Whether all ranks run the same program: versions, packages, the program's own code, and its config.

A difference is fatal where it ends training sooner or later, or changes what is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.comparisons.majority import differing_values, outliers
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import GatheredFacts
from slurmtrain.runtime.preflight.findings import Fault, Finding

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
SHOWN_PACKAGES = 3


def compare_versions(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes with other versions of Python, torch, CUDA, the driver and the like."""
    names = dict.fromkeys(name for each in facts.nodes for name in each.versions or {})
    for name in names:
        values = {each.node: (each.versions or {}).get(name) for each in facts.nodes}
        yield from differing_values(
            FindingKind.VERSIONS,
            values,
            facts,
            fatal=name in FATAL_VERSIONS,
            say=lambda value, name=name: f"{name} {value}",  # type: ignore[misc]
        )


def compare_packages(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes, and the ranks of a node, that have other packages."""
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


def compare_code_and_config(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes whose files of code, or whose config.yaml, have other contents."""
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
    yield from differing_values(
        FindingKind.CONFIG,
        {each.node: each.config_hash for each in facts.nodes},
        facts,
        fatal=True,
        say=lambda value: f"its config.yaml has the digest {str(value)[:12]}",
    )
