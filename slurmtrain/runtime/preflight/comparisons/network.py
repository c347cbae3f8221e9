"""The network interface by which each node is reached: its name, its network and its speed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from statistics import median

from slurmtrain.choices import FindingKind
from slurmtrain.runtime.preflight.comparisons.majority import outliers, wrong_values
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import GatheredFacts
from slurmtrain.runtime.preflight.findings import Finding

SPEED_SHARE = 0.5  # of the median: a network interface that is slower has lost its speed, or is another network


def compare_network(facts: GatheredFacts, expected: Expected) -> Iterator[Finding]:
    """Find the nodes that are reached by another interface than most, or by a slower one."""
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
    yield from wrong_values(
        FindingKind.NETWORK_SPEED, slow, f"{usual / 1000:g} Gbit/s, as on most nodes", facts, fatal=False
    )


def _interfaces(facts: GatheredFacts) -> tuple[dict[str, Hashable], dict[str, Hashable]]:
    """Return the interface of each node, and the network that it is in."""
    return {each.node: each.interface for each in facts.nodes}, {each.node: each.network for each in facts.nodes}
