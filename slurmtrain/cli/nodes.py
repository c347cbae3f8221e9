"""nodes: the ledger of nodes: list what is on record, blame a node, forgive one. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmtrain.cli.columns import one_line, print_table
from slurmtrain.cli.json_output import emit, fields_of, print_json
from slurmtrain.config.schema import RequeueConfig
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.node_ledger import (
    ALL,
    FAULTS,
    NODE_NAME,
    BlamePolicy,
    NodeEvent,
    NodeRecord,
    append_to_ledger,
    blamed_nodes,
    ledger_file,
    read_ledger,
    short,
    state_folder,
    why_blamed,
)
from slurmtrain.system.durations import roughly

HEADER = ("cluster", "node", "left out", "what", "last", "")
# What a run is submitted with unless its config says otherwise: no run is asked here.
POLICY = BlamePolicy(RequeueConfig().blame_threshold, 3600 * RequeueConfig().blame_expiry_h)


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    if options.action != "list":
        cluster, node, said = (_blame if options.action == "blame" else _forgive)(options)
        emit({"cluster": cluster, "node": node, "said": said}, said, as_json=options.json)
        return 0
    with _explaining("there is no ledger of nodes", "set HOME or XDG_STATE_HOME"):
        ledgers = state_folder().glob("*.jsonl")
    clusters = [options.cluster] if options.cluster else sorted(path.stem for path in ledgers)
    now = time.time()
    objects = [each for cluster in clusters for each in _objects(cluster, now)]
    if options.json:
        print_json(objects)
    elif objects:
        print_table(HEADER, [_row(each, now) for each in objects])
    else:
        print("no incidents are recorded for any node")
    return 0


def _objects(cluster: str, now: float) -> list[dict[str, Any]]:
    """Return the nodes of a cluster that something is on record against: what `nodes list --json` prints.

    cluster, node
    until        unix time until which all runs leave it out; null: they do not
    why          what counts against it, or is on record
    records      what has been recorded of it, oldest first: time, event, run, attempt, said, lasted_s
    """
    found = read_ledger(_ledger(cluster))
    blamed = {each.node: each for each in blamed_nodes(found, POLICY, now=now)}
    by_node: dict[str, list[NodeRecord]] = {}
    for each in found:
        if each.event in FAULTS and now - each.time < POLICY.expiry_s:
            by_node.setdefault(each.node, []).append(each)
    return [
        {
            "cluster": cluster,
            "node": node,
            "until": blamed[node].until if node in blamed else None,
            "why": blamed[node].why if node in blamed else why_blamed(on_record),
            "records": [fields_of(each, "time event run attempt said lasted_s") for each in on_record],
        }
        for node, on_record in sorted(by_node.items())
    ]


def _row(node: dict[str, Any], now: float) -> list[str]:
    last = node["records"][-1]
    until = "no" if node["until"] is None else f"for {roughly(node['until'] - now)}"
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(last["time"]))
    return [node["cluster"], node["node"], until, one_line(node["why"]), when, one_line(last["said"])]


def _blame(options: argparse.Namespace) -> tuple[str, str, str]:
    """Return the cluster, the node, and what was done."""
    cluster, node = _cluster(options), _node(options.node)
    known = SlurmClient().existing_nodes([node]) if not options.cluster else None
    if known is not None and node not in known:
        raise UsageError(f"cluster {cluster} has no node {node!r}", hint="`sinfo -N` lists its nodes")
    now = time.time()
    _append(cluster, NodeRecord(now, node, NodeEvent.BY_HAND, said=short(options.reason)))
    until = time.strftime("%m-%d %H:%M", time.localtime(now + POLICY.expiry_s))
    return cluster, node, f"{node} is left out of the next starts of your runs on {cluster} until {until}"


def _forgive(options: argparse.Namespace) -> tuple[str, str, str]:
    """Return the cluster, the node or `ALL`, and what was done."""
    if options.all == (options.node is not None):
        raise UsageError("name the nodes to forgive", hint="nodes forgive NODE, or nodes forgive --all")
    cluster = _cluster(options)
    node = ALL if options.all else _node(options.node)
    now = time.time()
    against = [each for each in read_ledger(_ledger(cluster)) if each.event in FAULTS and node in (ALL, each.node)]
    if not against:
        which = "any node" if options.all else node
        return cluster, node, f"nothing is on record against {which} on {cluster}"
    latest = max([now, *(each.time for each in against)])  # a node's clock may be ahead of this machine's
    _append(cluster, NodeRecord(latest, node, NodeEvent.FORGIVEN))
    return cluster, node, f"{'all nodes are' if options.all else f'{node} is'} forgiven on {cluster}"


def _cluster(options: argparse.Namespace) -> str:
    """Return SLURM's name of the cluster that is meant.

    Raises:
        ClusterError: SLURM cannot be asked for it.
    """
    cluster = options.cluster or SlurmClient().cluster_name()
    if cluster is None:
        raise ClusterError(
            "SLURM does not report the name of this cluster", hint="--cluster NAME; `nodes list` shows the names"
        )
    return str(cluster)


def _node(name: str) -> str:
    if NODE_NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} is not a node name", hint="one node, as `sinfo -N` shows it, such as n3")
    return name


@contextlib.contextmanager
def _explaining(what: str, hint: str) -> Iterator[None]:
    """Raise errors of the storage as a sentence."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}", hint=hint) from None


def _ledger(cluster: str) -> Path:
    with _explaining(f"there is no ledger of cluster {cluster!r}", "--cluster NAME"):
        return ledger_file(cluster)


def _append(cluster: str, record: NodeRecord) -> None:
    path = _ledger(cluster)
    with _explaining(f"{path} cannot be written", "is its disk full, or another user's?"):
        append_to_ledger(path, [record])
