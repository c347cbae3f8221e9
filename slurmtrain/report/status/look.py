"""The state of a run and what it will do next, from its own files and one look at the queue.

The run's files come first: they are there without sacct, without history, and when SLURM's answer is late.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.errors import ClusterError, UnreadableRecordError
from slurmtrain.report.status.record import Owner, Record, read_record
from slurmtrain.report.status.state import RunState, state_of, unreadable
from slurmtrain.runs.events import Event
from slurmtrain.runs.jobs import is_anothers, names_of
from slurmtrain.runs.ownership import is_own
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.job_facts import GONE, QueuedJob
from slurmtrain.system.trust import name_of

CONFIRMATIONS = 3  # answers without a job after which it is taken for gone
CONFIRM_EVERY_S = 0.7  # seconds until SLURM is asked again: a controller that has just begun knows no jobs


@dataclass(frozen=True)
class Queue:
    """squeue's answer by job id for the runs of a user on a cluster, or why there is none."""

    jobs: dict[str, QueuedJob] = field(default_factory=dict)
    doubt: str | None = None

    def of(self, record: Record) -> dict[str, QueuedJob]:
        """Return the entries of the jobs of one run: the id of an old job may be that of another run's job by now."""
        jobs = {job_id: self.jobs[job_id] for job_id in record.possible_jobs if job_id in self.jobs}
        if not any(job.comment for job in jobs.values()):
            return jobs
        names = names_of(record.run_dir)
        return {job_id: job for job_id, job in jobs.items() if not is_anothers(job.comment, names)}

    def misses(self, record: Record) -> bool:
        """Return whether a job of the run is missing here unexpectedly.

        That is so if nothing says that the run has ended, and a missing job is not known to be right.
        """
        if record.over or self.of(record):
            return False
        try:
            events = record.run_dir.events()
        except UnreadableRecordError:  # it only spares the next look
            return True
        return record.possible_jobs not in [
            event.get("job_ids") for event in events if event["event"] == Event.GONE_FROM_QUEUE
        ]


def states(run_dirs: Iterable[RunDir]) -> dict[RunDir, RunState]:
    """Return the state of every run, with one squeue call for each cluster and each user they belong to.

    If a job is missing that should be there, SLURM is asked again: a controller that has just been restarted answers
    with nothing. A run whose files cannot be used is "unreadable", and its sentence says why.
    """
    found: dict[RunDir, RunState] = {}
    records, me = [], name_of(os.getuid())
    known: dict[str, str | None] = {}  # whom the folders belong to above many runs
    by_owner: dict[Owner, list[Record]] = {}
    for run_dir in run_dirs:
        try:
            records.append(record := read_record(run_dir, me, known))
        except UnreadableRecordError as error:
            found[run_dir] = unreadable(error)
            continue
        if not (record.local or record.in_pods) and record.job_id and record.distrust is None:
            by_owner.setdefault(record.owner, []).append(record)
    queues = {owner: _confirmed_queue(owner, theirs) for owner, theirs in by_owner.items()}
    for record in records:
        queue = queues.get(record.owner, Queue())
        doubt = queue.doubt if record.distrust is None else record.distrust
        try:
            jobs = queue.of(record) if record.distrust is None else {}
            its = _at_its_link(record, jobs, doubt)
            found[record.run_dir] = state_of(its, jobs.get(its.job_id or "", QueuedJob()), doubt)
        except UnreadableRecordError as error:
            found[record.run_dir] = unreadable(error)
    return found


def state(run_dir: RunDir) -> RunState:
    """Return the state of one run.

    Raises:
        UnreadableRecordError: its files cannot be used.
    """
    now = states([run_dir])[run_dir]
    if not now.readable:
        raise UnreadableRecordError(now.explanation)
    return now


def is_over(run_dir: RunDir) -> bool:
    """Return whether the run's own files say that it has ended. SLURM is not asked; `state` may know more."""
    return read_record(run_dir, name_of(os.getuid()), {}).over


def _confirmed_queue(owner: Owner, records: list[Record]) -> Queue:
    """Return squeue's answer for the jobs of these runs, asked for again while a job is missing that should be there."""
    try:
        if owner.slurm_conf is not None:
            os.stat(owner.slurm_conf)
    except OSError as error:
        # The jobs of a sandbox here that is down are gone with it. Those of any other cluster may run: nobody can say.
        if all(record.over or _was_in_a_sandbox_here(record) for record in records):
            return Queue()
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return Queue(doubt=f"the run's slurm.conf is missing: {owner.slurm_conf}")
        return Queue(doubt=f"the run's slurm.conf cannot be read: {owner.slurm_conf} ({error.strerror})")
    job_ids = [job_id for record in records for job_id in record.possible_jobs]
    queue = _asked(owner, job_ids)
    for _ in range(CONFIRMATIONS - 1):
        if queue.doubt is not None or not any(map(queue.misses, records)):
            return queue
        time.sleep(CONFIRM_EVERY_S)
        again = _asked(owner, job_ids)
        queue = Queue({**queue.jobs, **again.jobs}, again.doubt)
    for record in records:
        if queue.doubt is None and queue.misses(record) and is_own(record.run_dir):
            with contextlib.suppress(OSError):  # it is told only to spare the next look
                record.run_dir.event(Event.GONE_FROM_QUEUE, job_ids=record.possible_jobs)
    return queue


def _asked(owner: Owner, job_ids: list[str]) -> Queue:
    from slurmtrain.slurm.client import SlurmClient

    try:
        return Queue(SlurmClient(owner.slurm_conf).queue(job_ids, owner.user))
    except ClusterError as error:  # the run's own files are all there is
        return Queue(doubt=error.message)


def _was_in_a_sandbox_here(record: Record) -> bool:
    from slurmtrain.sandbox.directory import user_directory

    in_sandbox = Path(str(record.owner.slurm_conf)).parent.parent == user_directory()
    return in_sandbox and record.info["host"] == socket.gethostname()


def _at_its_link(record: Record, jobs: dict[str, QueuedJob], doubt: str | None) -> Record:
    """Return the record of a chain with the job whose turn it is: the first in the queue, else the last that has run."""
    if not record.chain:
        return record
    left = [link for link in record.chain if link in jobs and jobs[link].state not in ("", *GONE)]
    if doubt is not None or not left:
        ran = [attempt.job_id for attempt in record.attempts if attempt.job_id in record.chain]
        job_id = ran[-1] if ran else record.chain[0 if doubt is not None else -1]
        return dataclasses.replace(record, job_id=job_id)
    return dataclasses.replace(record, job_id=left[0], following=tuple(left[1:]))
