"""What SLURM's configuration says of the network: whether it knows one, and whether the order of nodes follows it.

A job's nodes are in the order of slurmctld's table of nodes, which is that of their names, unless the cluster has the nodes
ranked by switch or block. Ranks are numbered along that order.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurmtrain.slurm.versions import TOPOLOGIES_IN_YAML, parse_version

# By plugin: what groups nodes, one and several, the word of TopologyParam by which nodes are ordered by that, and the first
# release with it (SLURM's CHANGELOG, and the source of both plugins).
GROUPS = {
    "tree": ("switch", "switches", "SwitchAsNodeRank", "23.02"),
    "block": ("block", "blocks", "BlockAsNodeRank", "25.11"),
}


def kind_of_topology(config: Mapping[str, str]) -> str | None:
    """Return the kind of topology that SLURM knows, as in "tree"; None if it knows none.

    Args:
        config: what `scontrol show config` says.
    """
    kind = config.get("TopologyPlugin", "").removeprefix("topology/")
    return kind if kind not in ("", "none", "default", "flat", "(null)") else None


def knows_no_topology(config: Mapping[str, str]) -> bool:
    """Return whether SLURM certainly knows no topology of the cluster, by what `scontrol show config` says."""
    version = parse_version(config.get("SLURM_VERSION", ""))
    elsewhere = version is not None and TOPOLOGIES_IN_YAML.applies_to(version)
    return kind_of_topology(config) is None and not elsewhere


def order_of_ranks(config: Mapping[str, str]) -> str | None:
    """Say in which order ranks are numbered over the nodes of a job; None if SLURM's configuration does not say."""
    if "TopologyPlugin" not in config:
        return None
    kind = kind_of_topology(config)
    if kind is None and not knows_no_topology(config):
        return None
    if kind is None:
        return "ranks are numbered along the names of nodes: SLURM knows no topology of this cluster"
    if kind not in GROUPS:
        return f"ranks are numbered along SLURM's order of nodes (topology/{kind})"
    group, groups, word, since = GROUPS[kind]
    if word.lower() in config.get("TopologyParam", "").lower():
        return f"ranks are numbered {group} by {group} (TopologyParam={word})"
    return (
        f"ranks are numbered along the names of nodes, which need not follow the {groups} of topology/{kind}: with "
        f"TopologyParam={word} in slurm.conf ({since} and later) they would"
    )
