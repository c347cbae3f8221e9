"""requeue.mode=chain: jobs submitted at once, each of which waits for all before it and continues where they stopped.

run.json names them: `chain`, their ids in order, and `chain_after`, the number of the last attempt before them. A job
of the chain is called a link.
"""

from __future__ import annotations

import logging
from typing import Any

from slurmtrain.errors import ClusterError
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_states import GONE

log = logging.getLogger(__name__)


def links(info: dict[str, Any]) -> list[str]:
    """Return the chain's jobs; none for a run that has no chain."""
    return [str(job_id) for job_id in info.get("chain") or []]


def links_after(info: dict[str, Any], job_id: str | None) -> list[str]:
    """Return the jobs of the chain that wait for this one."""
    chain = links(info)
    return chain[chain.index(job_id) + 1 :] if job_id in chain else []


def waiting_after(run_dir: RunDir, job_id: str | None, client: SlurmClient) -> list[str]:
    """Return the jobs after this one that are still in the queue; all of them if SLURM cannot be asked."""
    later = links_after(run_dir.info(), job_id)
    try:
        found = client.queue(later)
    except ClusterError:
        return later
    return [link for link in later if link in found and found[link].state not in GONE]


def cancel_rest(run_dir: RunDir, job_id: str | None, client: SlurmClient) -> None:
    """Take the jobs after this one out of the queue, since the run has ended.

    If SLURM refuses, each of them finds out when it starts.
    """
    rest = waiting_after(run_dir, job_id, client)
    if not rest:
        return
    try:
        client.cancel(*reversed(rest))
    except ClusterError as error:
        log.warning("cannot cancel the rest of the chain: %s", error.message)
        return
    run_dir.event(Event.CHAIN_CANCELLED, job_ids=rest)
