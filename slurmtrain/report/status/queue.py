"""squeue's answer for the runs of a user on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.errors import ClusterError, UnreadableRecordError
from slurmtrain.report.status.record import Owner, Record
from slurmtrain.runs.events import Event
from slurmtrain.runs.jobs import is_anothers, names_of
from slurmtrain.runs.ownership import is_own
from slurmtrain.slurm.job_facts import QueuedJob
from slurmtrain.slurm.job_states import GONE
from slurmtrain.slurm.parse_values import parse_time

CONFIRMATIONS = 3  # answers without a job after which it is taken for gone
CONFIRM_EVERY_S = 0.7


@dataclass(frozen=True)
class Queue:
    """squeue's answer by job id, or why there is none."""

    jobs: dict[str, QueuedJob] = field(default_factory=dict)
    doubt: str | None = None

    def job(self, job_id: str | None) -> QueuedJob:
        """Return the entry of a job; an empty one if it is not in the queue."""
        return self.jobs.get(job_id or "", QueuedJob())

    def of(self, record: Record) -> Queue:
        """Return the entries of the jobs of one run: the id of an old job may be that of another run's job by now."""
        jobs = {job_id: self.jobs[job_id] for job_id in record.possible_jobs if job_id in self.jobs}
        if any(job.comment for job in jobs.values()):
            names = names_of(record.run_dir)
            jobs = {job_id: job for job_id, job in jobs.items() if not is_anothers(job.comment, names)}
        return Queue(jobs, self.doubt)

    def misses(self, record: Record) -> bool:
        """Return whether a job of the run is missing here unexpectedly.

        That is so if nothing says that the run has ended, and a missing job is not known to be right.
        """
        if record.over or self.of(record).jobs:
            return False
        try:
            events = record.run_dir.events()
        except UnreadableRecordError:  # it only spares the next look
            return True
        return record.possible_jobs not in [
            event.get("job_ids") for event in events if event["event"] == Event.GONE_FROM_QUEUE
        ]


def wait_to_ask_again() -> None:
    """Wait before SLURM is asked again: a controller that has just begun knows no jobs."""
    time.sleep(CONFIRM_EVERY_S)


def confirmed_queue(owner: Owner, records: list[Record]) -> Queue:
    """Return squeue's answer for the jobs of these runs, asked for again while a job is missing that should be there."""
    why_not = _why_conf_is_unusable(owner.slurm_conf)
    if why_not is not None:
        # The jobs of a sandbox here that is down are gone with it. Those of any other cluster may run: nobody can say.
        known = all(record.over or _was_in_a_sandbox_here(record) for record in records)
        return Queue() if known else Queue(doubt=why_not)
    job_ids = [job_id for record in records for job_id in record.possible_jobs]
    queue = _queue(owner, job_ids)
    for _ in range(CONFIRMATIONS - 1):
        missing = [record for record in records if queue.misses(record)]
        if queue.doubt is not None or not missing:
            return queue
        wait_to_ask_again()
        again = _queue(owner, job_ids)
        queue = Queue({**queue.jobs, **again.jobs}, again.doubt)
    for record in records:
        if queue.doubt is None and queue.misses(record) and is_own(record.run_dir):
            with contextlib.suppress(OSError):  # it is told only to spare the next look
                record.run_dir.event(Event.GONE_FROM_QUEUE, job_ids=record.possible_jobs)
    return queue


def at_its_link(record: Record, queue: Queue) -> Record:
    """Return the record of a chain with the job whose turn it is: the first in the queue, else the last that has run."""
    if not record.chain:
        return record
    left = [link for link in record.chain if queue.job(link).state not in ("", *GONE)]
    if queue.doubt is not None or not left:
        ran = [attempt.job_id for attempt in record.attempts if attempt.job_id in record.chain]
        job_id = ran[-1] if ran else record.chain[0 if queue.doubt is not None else -1]
        return dataclasses.replace(record, job_id=job_id)
    return dataclasses.replace(record, job_id=left[0], following=tuple(left[1:]))


def _why_conf_is_unusable(conf: str | None) -> str | None:
    if conf is None:
        return None
    try:
        os.stat(conf)
    except (FileNotFoundError, NotADirectoryError):
        return f"the run's slurm.conf is missing: {conf}"
    except OSError as error:
        return f"the run's slurm.conf cannot be read: {conf} ({error.strerror})"
    return None


def _was_in_a_sandbox_here(record: Record) -> bool:
    from slurmtrain.sandbox.directory import user_directory

    in_sandbox = Path(str(record.owner.slurm_conf)).parent.parent == user_directory()
    return in_sandbox and record.info["host"] == socket.gethostname()


def _queue(owner: Owner, job_ids: list[str]) -> Queue:
    from slurmtrain.slurm.client import SlurmClient

    try:
        return Queue(SlurmClient(owner.slurm_conf).queue(job_ids, owner.user))
    except ClusterError as error:  # the run's own files are all there is
        return Queue(doubt=error.message)


def expected_start(job: QueuedJob) -> float | None:
    """Return when SLURM expects to start the job; a time in the past is an outdated estimate, and gives None."""
    start = parse_time(job.start)
    return start if start is not None and start > time.time() else None
