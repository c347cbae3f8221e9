"""nodes: the ledger of nodes: list what is on record, blame a node, forgive one. Imports no torch."""

from __future__ import annotations

import argparse
import time
from typing import Any

from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import emit, print_json
from slurmtrain.config.schema import RequeueConfig
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.slurm import node_ledger
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.node_ledger import ALL, FAULTS, NodeEvent, NodeRecord
from slurmtrain.system.texts import roughly

# What a run is submitted with unless its config says otherwise: no run is asked here.
POLICY = node_ledger.BlamePolicy(RequeueConfig().blame_threshold, 3600 * RequeueConfig().blame_expiry_h)


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    now = time.time()
    try:
        (_list if options.action == "list" else _judge)(options, now)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise UsageError(
            f"the ledger of nodes cannot be used: {where}{error.strerror}",
            hint="it lies in ~/.local/state/slurmtrain/nodes, or below XDG_STATE_HOME, one file for each cluster",
        ) from None
    return 0


def _list(options: argparse.Namespace, now: float) -> None:
    """Print the nodes that something is on record against.

    `--json` prints for each of them

    cluster, node
    until        unix time until which all runs leave it out; null: they do not
    why          what counts against it, or is on record
    records      what has been recorded of it, oldest first: `NodeRecord`
    """
    known = sorted(path.stem for path in node_ledger.state_folder().glob("*.jsonl"))
    found: list[dict[str, Any]] = []
    for cluster in [options.cluster] if options.cluster else known:
        records = node_ledger.read_ledger(node_ledger.ledger_file(cluster))
        blamed = {each.node: each for each in node_ledger.blamed_nodes(records, POLICY, now=now)}
        by_node: dict[str, list[NodeRecord]] = {}
        for each in records:
            if each.event in FAULTS and now - each.time < POLICY.expiry_s:
                by_node.setdefault(each.node, []).append(each)
        for node, against in sorted(by_node.items()):
            until = blamed[node].until if node in blamed else None
            why = blamed[node].why if node in blamed else node_ledger.why_blamed(against)
            found.append({"cluster": cluster, "node": node, "until": until, "why": why, "records": against})
    rows = []
    for facts in found:
        last, until = facts["records"][-1], facts["until"]
        left_out = "no" if until is None else f"for {roughly(until - now)}"
        rows.append([facts["cluster"], facts["node"], left_out, facts["why"], _time(last.time), last.said])
    if options.json:
        print_json(found)
    elif rows:
        print_table(("cluster", "node", "left out", "what", "last", ""), rows)
    else:
        print("no incidents are recorded for any node")


def _judge(options: argparse.Namespace, now: float) -> None:
    """Blame a node, or forgive one or all, and print what was done."""
    blames = options.action == "blame"
    if not blames and options.all == (options.node is not None):
        raise UsageError("name the nodes to forgive", hint="nodes forgive NODE, or nodes forgive --all")
    cluster, node = options.cluster or SlurmClient().cluster_name(), options.node or ALL
    if cluster is None:
        raise ClusterError(
            "SLURM does not report the name of this cluster", hint="--cluster NAME; `nodes list` shows the names"
        )
    if node != ALL and node_ledger.NODE_NAME.fullmatch(node) is None:
        raise UsageError(f"{node!r} is not a node name", hint="one node, as `sinfo -N` shows it, such as n3")
    ledger, record = node_ledger.ledger_file(cluster), None
    if blames:
        known = SlurmClient().existing_nodes([node]) if not options.cluster else None
        if known is not None and node not in known:
            raise UsageError(f"cluster {cluster} has no node {node!r}", hint="`sinfo -N` lists its nodes")
        record = NodeRecord(now, node, NodeEvent.BY_HAND, said=node_ledger.short(options.reason))
        until = _time(now + POLICY.expiry_s)
        said = f"{node} is left out of the next starts of your runs on {cluster} until {until}"
    else:
        records = node_ledger.read_ledger(ledger)
        against = [each.time for each in records if each.event in FAULTS and node in (ALL, each.node)]
        said = f"nothing is on record against {'any node' if options.all else node} on {cluster}"
        if against:
            # A node's clock may be ahead of this machine's.
            record = NodeRecord(max([now, *against]), node, NodeEvent.FORGIVEN)
            said = f"{'all nodes are' if options.all else f'{node} is'} forgiven on {cluster}"
    if record is not None:
        node_ledger.append_to_ledger(ledger, [record])
    emit({"cluster": cluster, "node": node, "said": said}, said, as_json=options.json)


def _time(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(seconds))
