"""The state of runs that are jobs of SLURM, from their own files and one look at the queue."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slurmtrain.errors import ClusterError, UnreadableRecordError
from slurmtrain.report.progress import at_about
from slurmtrain.report.status.record import Record
from slurmtrain.report.status.state import ALIVE, WAITING, RunState, RunStatus, ended, state_of, unreadable
from slurmtrain.runs.jobs import is_anothers, names_of
from slurmtrain.runs.ownership import is_own
from slurmtrain.runs.reasons import Event, Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.command_environment import trusted_slurm_conf
from slurmtrain.slurm.job_facts import GONE, JobState, QueuedJob
from slurmtrain.slurm.parse_values import parse_time
from slurmtrain.slurm.pending_reasons import in_words, is_held
from slurmtrain.system.files import name_of

CONFIRMATIONS = 3  # answers without a job after which it is taken for gone
CONFIRM_EVERY_S = 0.7  # seconds until SLURM is asked again: a controller that has just begun knows no jobs
USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")


class Owner(NamedTuple):
    """The cluster and the user to ask SLURM about.

    Attributes:
        slurm_conf: path of the cluster's slurm.conf; None: the machine's own.
        user: the user who submitted, if that is somebody else.
        distrust: why that slurm.conf is not used; None if it is.
    """

    slurm_conf: str | None
    user: str | None
    distrust: str | None = None


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


def states_of_jobs(records: list[Record]) -> dict[RunDir, RunState]:
    """Return the state of every run, with one squeue call for each cluster and each user they belong to.

    If a job is missing that should be there, SLURM is asked again: a controller that has just been restarted answers
    with nothing.
    """
    me, known = name_of(os.getuid()), dict[str, str | None]()  # known: whom the folders belong to above many runs
    by_owner: dict[Owner, list[Record]] = {}
    for record in records:
        by_owner.setdefault(_owner_of(record, me, known), []).append(record)
    found: dict[RunDir, RunState] = {}
    for owner, theirs in by_owner.items():
        queue = Queue(doubt=owner.distrust) if owner.distrust is not None else _confirmed_queue(owner, theirs)
        for record in theirs:
            try:
                found[record.run_dir] = _state_in(queue, record)
            except UnreadableRecordError as error:
                found[record.run_dir] = unreadable(error)
    return found


def _owner_of(record: Record, me: str | None, known: dict[str, str | None]) -> Owner:
    """Return whom and what to ask about a run.

    Args:
        me: the name of this user, if there is one.
        known: as for `files.why_distrusted`.
    """
    user = record.info["user"]
    foreign = user if me not in (None, user) and USER_NAME.fullmatch(user) else None
    try:
        named_by = record.run_dir.info_file
        return Owner(trusted_slurm_conf(record.info["slurm_conf"], named_by=named_by, known=known), foreign)
    except ClusterError as error:
        return Owner(None, foreign, error.message)


def _state_in(queue: Queue, record: Record) -> RunState:
    jobs = queue.of(record)
    record = _at_its_link(record, jobs, queue.doubt)
    job = jobs.get(record.job_id or "", QueuedJob())
    word, sentence = _asked(record, job) if queue.doubt is None else _unasked(record)
    waits, is_gone = word in WAITING, word not in ALIVE and not (record.chain or record.packed)
    return state_of(
        record,
        word,
        sentence,
        own_job=is_own_job(record),
        slurm_error=queue.doubt,
        queued_again=is_gone and job.state == JobState.PENDING,
        reason=job.reason if waits else None,
        expected_start=_expected_start(job) if waits else None,
    )


def is_own_job(record: Record) -> bool:
    """Return whether it was submitted as this job, or its script was passed to sbatch: only that makes such a log."""
    return record.job_id in record.info["job_ids"] or record.run_dir.job_log(record.job_id or "") is not None


def _expected_start(job: QueuedJob) -> float | None:
    """Return when SLURM expects to start the job; a time in the past is an outdated estimate, and gives None."""
    start = parse_time(job.start)
    return start if start is not None and start > time.time() else None


def _unasked(record: Record) -> tuple[RunStatus, str]:
    """Return word and sentence of a run when SLURM does not answer: a run without a recorded end may be alive."""
    last = record.last
    if record.over or ((record.waits or record.setting_up) and record.ended_by is not None):
        return ended(record)
    if last is None or not record.has_begun:
        known = f"job {record.job_id} was submitted and has left no attempt yet"
    elif record.setting_up:
        known = f"attempt {last.number} was setting up"
    elif last.verdict is not None:
        known = str(last.sentence)
    else:
        known = f"attempt {last.number} has not ended as far as its files say"
    return RunStatus.UNKNOWN, f"SLURM cannot be asked; {known}"


def _asked(record: Record, job: QueuedJob) -> tuple[RunStatus, str]:
    """Return word and sentence of a run from squeue's entry of its job, which is empty when SLURM has forgotten it."""
    last, job_id, queued = record.last, record.job_id, job.state
    waits = record.waits or queued == JobState.PENDING
    if record.packed and (record.over or (waits and record.ended_by is not None)):
        return ended(record)  # whatever the job does for the others
    if queued == JobState.PENDING and record.over and not record.chain:
        word, sentence = ended(record)
        return word, f"{sentence}; {_queued_again(record)}"
    if queued == JobState.PENDING and not record.over:
        return _pending(record, job)
    if not queued or queued in GONE or record.over:  # a job may outlive the run: an allocation does
        return ended(record, queued if queued in GONE else "")
    if queued == JobState.SUSPENDED:
        goes_on = "lets it go on when those that took its place are done"
        return RunStatus.SUSPENDED, f"SLURM has suspended job {job_id}, and {goes_on}"
    if queued == JobState.COMPLETING:
        return RunStatus.STOPPING, f"job {job_id}: the last ranks are leaving"
    if last is not None and last.verdict in (Verdict.RESUBMIT, Verdict.NEXT) and last.job_id == job_id:
        return RunStatus.STOPPING, f"{last.sentence}; job {job_id} is about to leave"
    if record.packed and last is not None and last.verdict == Verdict.REQUEUE and last.job_id == job_id:
        return RunStatus.STOPPING, f"{last.sentence} when the others of its pack have left job {job_id}"
    if last is not None and record.setting_up:
        return RunStatus.STARTING, f"attempt {last.number} is setting up, job {job_id}"
    if last is None or not record.has_begun or last.verdict is not None:
        number = (last.number if last is not None else 0) + 1
        before = f"{last.sentence}; " if last is not None and record.has_begun else ""
        return RunStatus.STARTING, f"{before}attempt {number} is about to begin, job {job_id}"
    if not is_own_job(record) and last.rank_0_lives is False:
        return ended(record)
    return RunStatus.RUNNING, f"attempt {last.number}, job {job_id}"


def _queued_again(record: Record) -> str:
    return (
        f"SLURM has put job {record.job_id} into the queue once more{_why_again(record)}: it will leave as soon as it "
        f"starts, and `cancel {record.run_dir.id}` takes it out"
    )


def _why_again(record: Record) -> str:
    preempted = any(each.reason == Reason.PREEMPTED for each in record.attempts if each.job_id == record.job_id)
    return ", as SLURM does from 24.05 on with a job that was preempted before" if preempted else ""


def _pending(record: Record, queued: QueuedJob) -> tuple[RunStatus, str]:
    why = in_words(queued.reason, record.run_dir.id)
    if is_held(queued.reason):
        return RunStatus.HELD, f"SLURM holds it: {why}"
    last = record.last
    job = f"job {record.job_id}"
    if record.chain:
        job += f", {record.chain.index(record.job_id or '') + 1} of {len(record.chain)} of its chain,"
    start = _expected_start(queued)
    if start is not None:
        why += f"; SLURM expects to start it {at_about(start, time.time())}"
    if last is None or not record.has_begun:
        return RunStatus.WAITING, f"{job} is pending: {why}"
    before = last.sentence or (
        f"attempt {last.number} ended while it was set up" if record.setting_up else "was requeued"
    )
    as_job = f" as {job.rstrip(',')}" if record.job_id != last.job_id and last.job_id is not None else ""
    return RunStatus.REQUEUED, f"{before}; waiting to start again{as_job}: {why}"


def _confirmed_queue(owner: Owner, records: list[Record]) -> Queue:
    """Return squeue's answer for the jobs of these runs, asked for again while a job is missing that should be there."""
    try:
        if owner.slurm_conf is not None:
            os.stat(owner.slurm_conf)
    except OSError as error:
        # The jobs of a sandbox here that is down are gone with it. Those of any other cluster may run: nobody can say.
        if all(record.over or _was_in_a_sandbox_here(owner, record) for record in records):
            return Queue()
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return Queue(doubt=f"the run's slurm.conf is missing: {owner.slurm_conf}")
        return Queue(doubt=f"the run's slurm.conf cannot be read: {owner.slurm_conf} ({error.strerror})")
    job_ids = [job_id for record in records for job_id in record.possible_jobs]
    queue = _ask(owner, job_ids)
    for _ in range(CONFIRMATIONS - 1):
        if queue.doubt is not None or not any(map(queue.misses, records)):
            return queue
        time.sleep(CONFIRM_EVERY_S)
        again = _ask(owner, job_ids)
        queue = Queue({**queue.jobs, **again.jobs}, again.doubt)
    for record in records:
        if queue.doubt is None and queue.misses(record) and is_own(record.run_dir):
            with contextlib.suppress(OSError):  # it is told only to spare the next look
                record.run_dir.event(Event.GONE_FROM_QUEUE, job_ids=record.possible_jobs)
    return queue


def _ask(owner: Owner, job_ids: list[str]) -> Queue:
    from slurmtrain.slurm.client import SlurmClient

    try:
        return Queue(SlurmClient(owner.slurm_conf).queue(job_ids, owner.user))
    except ClusterError as error:  # the run's own files are all there is
        return Queue(doubt=error.message)


def _was_in_a_sandbox_here(owner: Owner, record: Record) -> bool:
    from slurmtrain.sandbox.directory import user_directory

    in_sandbox = Path(str(owner.slurm_conf)).parent.parent == user_directory()
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
