"""What a run's own attempts, and this person's ledger of the cluster, say against nodes.

A run's directory is enough by itself: where the ledger cannot be read or written, as on compute nodes without the home
directory, the run still leaves out the nodes that its own attempts speak against.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmtrain.runs.reasons import FAILURES, Event, Reason
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.node_ledger import (
    Blamed,
    BlamePolicy,
    NodeEvent,
    NodeRecord,
    blamed_nodes,
    ledger_file,
    read_ledger,
)
from slurmtrain.system.records import typed_or_none

if TYPE_CHECKING:
    from slurmtrain.runs.attempts import Attempt

# An attempt that ended so says nothing for its nodes unless it made progress.
FAILED = (*FAILURES, Reason.CONFIG, Reason.DIVERGED)


def cluster_of_this_job() -> str | None:
    """Return SLURM's name of the cluster that this process runs on, as a job has it in its environment; None outside of one."""
    return os.environ.get("SLURM_CLUSTER_NAME") or None


def records_of(run: str, tries: Sequence[Attempt]) -> list[NodeRecord]:
    """Return what the attempts of a run say against nodes. It is proven once an attempt has trained on other nodes."""
    found, well = [], trained_on(tries)
    for attempt in tries:
        fault = typed_or_none(NodeRecord, attempt.fault)
        if fault is not None:
            found.append(replace(fault, proven=fault.proven or any(fault.node not in nodes for nodes in well)))
        ended = attempt.ended or attempt.started
        found += [
            NodeRecord(ended, node, NodeEvent.BAD_START, run, attempt.number, attempt.sentence or "", proven=True)
            for node in attempt.bad_nodes
            if fault is None or node != fault.node
        ]
    return found


def trained_on(tries: Sequence[Attempt]) -> list[list[str]]:
    """Return the nodes of each attempt that has trained, and did not fail."""
    return [attempt.nodes for attempt in tries if attempt.reason not in FAILED and attempt.has_trained]


def proven_by(attempt: Attempt, run: str, earlier: Sequence[Attempt]) -> list[NodeRecord]:
    """Return what earlier attempts said that counts for other runs, too, since this attempt has trained on other nodes."""
    return [
        replace(each, proven=True)
        for each in records_of(run, earlier)
        if not each.proven and any(each.node not in nodes for nodes in trained_on([attempt]))
    ]


def ledger_of(cluster: str | None, policy: BlamePolicy) -> list[NodeRecord]:
    """Return the records of this person's ledger of a cluster; none if it is not kept or cannot be read."""
    if cluster is None or policy.threshold == 0:
        return []
    try:
        return read_ledger(ledger_file(cluster))
    except OSError:
        return []


def blamed_for(runs: Sequence[RunDir], policy: BlamePolicy, cluster: str | None, now: float) -> list[Blamed]:
    """Return the nodes that the next start of these runs, which share a job, should leave out, by name.

    Args:
        cluster: SLURM's name of the cluster; None if it is not known: then only the runs' own attempts count.
        now: unix seconds.
    """
    ledger = ledger_of(cluster, policy)
    of_others = blamed_nodes(ledger, policy, now=now)
    found: dict[str, Blamed] = {}
    for run in runs:  # each of a pack has its own attempts, and may have met a bad node alone
        blamed = of_others
        if run.attempt_numbers():  # a run that is submitted for the first time has none
            from slurmtrain.runs.attempts import all_attempts

            own = records_of(run.id, all_attempts(run))
            blamed = blamed_nodes([*ledger, *own], policy, now=now, run=run.id)
        found |= {each.node: each for each in blamed}
    return [found[node] for node in sorted(found)]


def left_out_of(run: RunDir, job_id: str | None) -> list[Blamed]:
    """Return the blamed nodes that a job of a run leaves out, by the run's latest event about it."""
    events = [each for each in run.events() if each["event"] == Event.NODES_LEFT_OUT and each.get("job_id") == job_id]
    return typed_or_none(list[Blamed], events[-1].get("blamed")) or [] if events else []
