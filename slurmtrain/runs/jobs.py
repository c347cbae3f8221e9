"""The jobs of a run in SLURM's queue: whose a job is, by the token in its comment; the jobs of a chain.

SLURM uses the same id twice: its ids begin anew on a cluster that is set up again, as a sandbox is, and after MaxJobId.
A job id that a run noted long ago may be another run's job by now.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import ClusterError, UnreadableRecordError
from slurmtrain.runs.lookup import is_sweep
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.job_facts import GONE
from slurmtrain.system.records import read_json

if TYPE_CHECKING:  # `status` of runs outside of SLURM needs none
    from slurmtrain.slurm.client import SlurmClient

log = logging.getLogger(__name__)

TOKEN_PREFIX = "slurmtrain:"


def named_in(comment: Sequence[str]) -> list[str]:
    """Return the submitters that the words of a comment name: the id of a run, or "sweep-" and the token of a sweep."""
    tokens = [word.removeprefix(TOKEN_PREFIX) for word in comment if word.startswith(TOKEN_PREFIX)]
    return [name for name, colon, _ in (token.rpartition(":") for token in tokens) if colon]


def submitter(run_dir: RunDir) -> str:
    """Return the name by which the jobs of a run are found: its id, with a mark if it began as a copy of another run."""
    mark = (read_json(run_dir.info_file) or {}).get("copy")
    return f"{run_dir.id}~{mark}" if mark else run_dir.id


def names_of(run_dir: RunDir) -> list[str]:
    """Return the names under which jobs of a run are submitted: its own, and that of its sweep."""
    folder = run_dir.path.parent
    if not is_sweep(folder):
        return [submitter(run_dir)]
    try:
        info = read_json(folder / "sweep.json") or {}
    except UnreadableRecordError:
        info = {}
    return [submitter(run_dir), f"sweep-{info.get('token')}"]


def is_anothers(comment: Sequence[str], names: Collection[str]) -> bool:
    """Return whether a comment names another run or sweep as the submitter; False for a comment without a token."""
    named = named_in(comment)
    return bool(named) and not any(name in names for name in named)


# requeue.mode=chain: jobs submitted at once, each of which waits for all before it and continues where they stopped. run.json
# names them: `chain`, their ids in order, and `chain_after`, the number of the last attempt before them. A job of the chain is
# called a link.


def links_after(info: dict[str, Any], job_id: str | None) -> list[str]:
    """Return the jobs of the chain that wait for this one."""
    chain: list[str] = info.get("chain") or []
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
