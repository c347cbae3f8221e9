"""What the end of an attempt says against a node, and which nodes the next start therefore does without: pure functions.

What is on record of earlier attempts is read by `node_blame`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from slurmtrain.runs.evidence import Evidence, Policy
from slurmtrain.runs.reasons import FAILURES, Reason
from slurmtrain.slurm.node_ledger import (
    BUS_ERROR,
    FAST_S,
    HARDWARE,
    NODE_NAME,
    NOT_THE_NODE,
    BlamePolicy,
    NodeEvent,
    NodeRecord,
    blamed_nodes,
    short,
)


def fault_of_node(evidence: Evidence, reason: Reason) -> NodeRecord | None:
    """Return what an attempt that ended for this reason says against a node; None if it says nothing.

    A crash speaks against a node when it comes within seconds, or with words about broken hardware. It does not when ranks
    failed by themselves on several nodes, or were killed, as for want of memory, or when the disk of the run was full.
    """
    node = evidence.failed_on
    said = evidence.failure[1] if evidence.failure is not None else evidence.set_up or evidence.killed or ""
    if reason is Reason.NODE_FAILURE or (evidence.lost_nodes and reason in FAILURES):
        node, event = evidence.lost_node or next(iter(evidence.dead_nodes), None), NodeEvent.LOST
        said = "SLURM says that the node failed"  # what its victims said tells nothing of it
    elif reason is Reason.BAD_NODE:
        event = NodeEvent.BAD_START
    elif reason is Reason.HANG:
        said, event = evidence.hang or "", NodeEvent.HANG
    elif reason is Reason.CRASH and HARDWARE.search(said):
        event = NodeEvent.HARDWARE
    elif reason is Reason.CRASH and evidence.disk_full:
        return None
    elif reason is Reason.CRASH and not NOT_THE_NODE.search(said) and len(evidence.failed_nodes) < 2:
        event = NodeEvent.CRASH
        if not BUS_ERROR.search(said) and (evidence.progressed or evidence.lasted_s >= FAST_S):
            return None
    else:
        return None
    if node is None or NODE_NAME.fullmatch(node) is None or not evidence.run:
        return None
    return NodeRecord(
        time=evidence.now,
        node=node,
        event=event,
        run=evidence.run,
        attempt=evidence.number,
        said=short(said or f"exit code {evidence.exit_code}"),
        lasted_s=round(evidence.lasted_s, 1),
        proven=event in (NodeEvent.HARDWARE, NodeEvent.BAD_START)
        or (event is NodeEvent.HANG and evidence.trained)
        or _has_trained_elsewhere(evidence, node),
    )


def _has_trained_elsewhere(evidence: Evidence, node: str) -> bool:
    trained = [each for each in evidence.node_records if each.event is NodeEvent.TRAINED and each.run == evidence.run]
    return any(node not in each.nodes for each in trained)


def nodes_to_leave_out(fault: NodeRecord | None, evidence: Evidence, policy: BlamePolicy) -> tuple[str, ...]:
    """Return the nodes that the next start should leave out, after this attempt has said this of a node."""
    found = [*evidence.node_records, *([fault] if fault is not None else [])]
    return tuple(each.node for each in blamed_nodes(found, policy, now=evidence.now, run=evidence.run))


def spared_attempts(fault: NodeRecord | None, evidence: Evidence, policy: Policy) -> int:
    """Return how many of the attempts without progress do not count, since a blamed node ended them within seconds.

    If the run came back to a node that was blamed already, that node cannot be left out, and its attempts count. At most
    as many are spared as may count, so that a run that is itself broken ends.
    """
    found = [*evidence.node_records, *([fault] if fault is not None else [])]
    own = [each for each in found if each.run == evidence.run and each.node and each.fast]
    spared: set[int] = set()
    for node in {each.node for each in own}:
        numbers = {each.attempt for each in own if each.node == node}
        before_the_last = [each for each in found if (each.run, each.attempt) != (evidence.run, max(numbers))]
        if _is_blamed(node, found, evidence, policy) and not _is_blamed(node, before_the_last, evidence, policy):
            spared |= numbers
    spared &= {*evidence.stalled_numbers, evidence.number}
    return min(len(spared), policy.max_attempts_without_progress)


def _is_blamed(node: str, found: Sequence[NodeRecord], evidence: Evidence, policy: Policy) -> bool:
    ever = replace(policy.blame, expiry_s=math.inf)  # what was spared stays so
    blamed = blamed_nodes(found, ever, now=evidence.now, run=evidence.run)
    return node in [each.node for each in blamed]


def nodes_of_next_start(
    allocated: Sequence[str], counts: Sequence[int], *, refused: Collection[str] = (), avoided: Sequence[str] = ()
) -> tuple[str, ...] | None:
    """Choose the nodes on which the ranks start again in the same job, in SLURM's order.

    Args:
        allocated: the nodes of the job that can be used, in SLURM's order.
        counts: the numbers of nodes that the ranks can run on, the best first.
        refused: nodes that must not be used.
        avoided: nodes that are left out where spare nodes can replace them; those that matter most come first.

    Returns:
        None if too few nodes are left.
    """
    left = [node for node in allocated if node not in refused]
    count = next((count for count in counts if count <= len(left)), None)
    if count is None:
        return None
    last = [node for node in dict.fromkeys(avoided) if node in left]
    order = [node for node in left if node not in last] + last[::-1]
    chosen = order[:count]
    return tuple(node for node in left if node in chosen)
