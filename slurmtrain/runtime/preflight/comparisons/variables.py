"""Environment variables that other programs have left or that slow training down, and those in which ranks differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.comparisons.majority import fault_of
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import GatheredFacts
from slurmtrain.runtime.preflight.findings import Finding

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


def compare_variables(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find variables that should not be set on a node, and those in which ranks differ."""
    for said, nodes in _by_value_of_each(
        {each.node: [f"{name}={value}" for name, value in (each.variables or {}).items()] for each in facts.nodes}
    ).items():
        name = said.partition("=")[0]
        right = LEFT_OVER.get(name, "it is not set")
        yield Finding(FindingKind.VARIABLES, nodes, f"{said} is set", right, False, fault_of(nodes, facts))
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


def _by_value_of_each(found: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for node, values in found.items():
        for value in values:
            groups[value].append(node)
    return {value: tuple(nodes) for value, nodes in groups.items()}
