"""The state of a run and what it will do next, from its own files and one look at the queue.

The run's files come first: they are there without sacct, without history, and when SLURM's answer is late.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.status.queue import Queue, at_its_link, confirmed_queue
from slurmtrain.report.status.record import Owner, Record, read_record
from slurmtrain.report.status.sentences import state_of
from slurmtrain.report.status.state import RunState, RunStatus, unreadable
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.trust import name_of


def states(run_dirs: Iterable[RunDir]) -> dict[str, RunState]:
    """Return the state of every run, by id, as `states_by_path`; of a run and copies of the same id that of the run."""
    runs = list(run_dirs)
    found = states_by_path(runs)
    originals = [run_dir for run_dir in runs if found[run_dir.path].copied_from is None]
    return {run_dir.id: found[run_dir.path] for run_dir in [*runs, *originals]}


def states_by_path(run_dirs: Iterable[RunDir]) -> dict[Path, RunState]:
    """Return the state of every run, with one squeue call for each cluster and each user they belong to.

    If a job is missing that should be there, SLURM is asked again: a controller that has just been restarted answers
    with nothing. A run whose files cannot be used is "unreadable", and its sentence says why.
    """
    found: dict[Path, RunState] = {}
    records, me = [], name_of(os.getuid())
    known: dict[str, str | None] = {}  # whom the folders belong to above many runs
    for run_dir in run_dirs:
        try:
            records.append(read_record(run_dir, me, known))
        except UnreadableRecordError as error:
            found[run_dir.path] = unreadable(error)
    by_owner: dict[Owner, list[Record]] = {}
    for record in records:
        if not (record.local or record.in_pods) and record.job_id and record.distrust is None:
            by_owner.setdefault(record.owner, []).append(record)
    queues = {owner: confirmed_queue(owner, theirs) for owner, theirs in by_owner.items()}
    for record in records:
        queue = Queue(doubt=record.distrust) if record.distrust is not None else queues.get(record.owner, Queue())
        path = record.run_dir.path
        try:
            own = queue.of(record)
            found[path] = state_of(at_its_link(record, own), own)
        except UnreadableRecordError as error:
            found[path] = unreadable(error)
    return found


def state(run_dir: RunDir) -> RunState:
    """Return the state of one run.

    Raises:
        UnreadableRecordError: its files cannot be used.
    """
    now = states([run_dir])[run_dir.id]
    if now.status == RunStatus.UNREADABLE:
        raise UnreadableRecordError(now.explanation)
    return now


def is_over(run_dir: RunDir) -> bool:
    """Return whether the run's own files say that it has ended. SLURM is not asked; `state` may know more."""
    return read_record(run_dir, name_of(os.getuid()), {}).over
