"""The state of a run and what it will do next, from its own files and one look at the queue.

The run's files come first: they are there without sacct, without history, and when SLURM's answer is late.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slurmtrain.choices import Backend
from slurmtrain.choices import Choice as NamedValue
from slurmtrain.errors import ClusterError, UnavailableRecordError, UnreadableRecordError
from slurmtrain.report.progress import Progress, at_about, read_progress
from slurmtrain.runs import attempts, choices, requests, stage_record
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.chain import links
from slurmtrain.runs.choices import Choice
from slurmtrain.runs.events import Event
from slurmtrain.runs.job_tokens import TOKEN_PREFIX, is_anothers, names_of
from slurmtrain.runs.lookup import is_sweep
from slurmtrain.runs.outcome import PRUNED_BY_SEARCH, Reason, RunAction, Verdict
from slurmtrain.runs.ownership import check_parts, is_own
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_facts import QueuedJob
from slurmtrain.slurm.job_states import GONE, JobState
from slurmtrain.slurm.parse_values import parse_time
from slurmtrain.slurm.pending_reasons import in_words, is_held
from slurmtrain.slurm.trusted_conf import trusted_slurm_conf
from slurmtrain.system.records import is_job_id, read_text
from slurmtrain.system.user import name_of

CONFIRMATIONS = 3  # answers without a job after which it is taken for gone
CONFIRM_EVERY_S = 0.7
USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")


class RunStatus(NamedValue):
    """The status of a run."""

    PREPARED = "prepared"  # nothing has been submitted or started yet
    WAITING = "waiting"  # for its first start, in the queue
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    STOPPING = "stopping"  # its ranks are leaving
    REQUEUED = "requeued"  # it waits to start again
    HELD = "held"
    UNKNOWN = "unknown"  # SLURM, or the host of a local run, cannot be asked
    FINISHED = "finished"
    STOPPED = "stopped"  # somebody or something ended it before it had finished; it can be resumed
    PRUNED = "pruned"  # its search has ended it early, by the values that it had logged
    FAILED = "failed"
    LOST = "lost"  # its job is gone, and the run has not ended
    UNREADABLE = "unreadable"  # its files cannot be used
    REMOVED = "removed"  # only a sweep's point: its run directory is gone


WAITING = (RunStatus.WAITING, RunStatus.REQUEUED, RunStatus.HELD)  # words for a run whose job is pending
LOCAL_START_S = 60.0  # a local attempt whose rank 0 has not said anything for longer than this never will


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Attributes:
        status: what a person reads of it first.
        explanation: why, and what comes next.
        alive: SLURM or a local launcher still has it, or may have it as far as can be known here.
        own_job: it was submitted as this job; False if somebody started the run inside of an allocation.
        progress: its progress.
        packed: the job is that of other runs, too (sweep.pack).
        slurm_error: why SLURM could not be asked, if it should have been.
        following: jobs of its chain that wait for this one.
        queued_again: it has ended, and SLURM has queued its job once more; when that starts, it exits at once.
        reason: SLURM's word for why its job waits or is held.
        expected_start: when SLURM expects to start it, in unix seconds; None while SLURM has not worked that out.
    """

    status: RunStatus
    explanation: str
    alive: bool
    attempts: list[Attempt]
    job_id: str | None
    progress: Progress = field(default_factory=Progress)
    own_job: bool = True
    packed: bool = False
    slurm_error: str | None = None
    following: tuple[str, ...] = ()
    queued_again: bool = False
    reason: str | None = None
    expected_start: float | None = None

    @property
    def step(self) -> int | None:
        """The number of steps done, as far as is known."""
        return self.progress.step


def states(run_dirs: Iterable[RunDir]) -> dict[str, RunState]:
    """Return the state of every run, by id, with one squeue call for each cluster and each user they belong to.

    If a job is missing that should be there, SLURM is asked again: a controller that has just been restarted answers
    with nothing. A run whose files cannot be used is "unreadable", and its sentence says why.
    """
    found: dict[str, RunState] = {}
    records, me = [], name_of(os.getuid())
    known: dict[str, str | None] = {}  # whom the folders belong to above many runs
    for run_dir in run_dirs:
        try:
            records.append(_read(run_dir, me, known))
        except UnreadableRecordError as error:
            found[run_dir.id] = _unreadable(error)
    by_owner: dict[_Owner, list[_Record]] = {}
    for record in records:
        if not record.local and record.job_id and record.distrust is None:
            by_owner.setdefault(record.owner, []).append(record)
    queues = {owner: _confirmed_queue(owner, theirs) for owner, theirs in by_owner.items()}
    open_runs = {record.id: _open_states(record) for record in records if record.is_open}
    for record in records:
        if record.id in open_runs:
            found[record.id] = open_runs[record.id]
            continue
        queue = _Queue(doubt=record.distrust) if record.distrust is not None else queues.get(record.owner, _Queue())
        try:
            own = queue.of(record)
            found[record.id] = _state(_at_its_link(record, own), own)
        except UnreadableRecordError as error:
            found[record.id] = _unreadable(error)
    return found


def _unreadable(error: UnreadableRecordError) -> RunState:
    return RunState(RunStatus.UNREADABLE, error.message, False, [], None)


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
    return _read(run_dir, name_of(os.getuid()), {}).over


class _Owner(NamedTuple):
    """The cluster and the user to ask SLURM about.

    Attributes:
        slurm_conf: path of the cluster's slurm.conf; None: the machine's own.
        user: the user who submitted, if that is somebody else.
    """

    slurm_conf: str | None
    user: str | None


@dataclass(frozen=True)
class _Record:
    """The facts in a run's own files, read once.

    Attributes:
        job_id: its latest job, as far as is known; None before it was submitted, and outside of SLURM. In a chain, the
            job whose turn it is.
        chain: the jobs of the chain, if the latest job belongs to one.
        following: jobs of the chain that wait for the latest job.
        owner: the user and cluster to ask SLURM about it.
        distrust: why that cluster's slurm.conf is not used; None if it is.
    """

    run_dir: RunDir
    info: dict[str, Any]
    attempts: list[Attempt]
    job_id: str | None
    chain: list[str]
    owner: _Owner
    following: tuple[str, ...] = ()
    distrust: str | None = None

    @property
    def id(self) -> str:
        return self.run_dir.id

    @property
    def is_open(self) -> bool:
        """Whether it was submitted to several choices, and no job has taken it yet."""
        return self.job_id is None and not self.attempts and not self.local and choices.is_open(self.run_dir)

    @property
    def local(self) -> bool:
        return bool(self.info["backend"] == Backend.LOCAL)

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def possible_jobs(self) -> list[str]:
        """The jobs of which one should be in the queue, if the run has not ended."""
        return self.chain or ([self.job_id] if self.job_id is not None else [])

    def is_missing_from(self, queue: _Queue) -> bool:
        """Return whether the queue unexpectedly has no job of the run.

        That is so if nothing says that the run has ended, and a missing job is not known to be right.
        """
        if self.over or queue.of(self).jobs:
            return False
        try:
            events = self.run_dir.events()
        except UnreadableRecordError:  # it only spares the next look
            return True
        return self.possible_jobs not in [
            event.get("job_ids") for event in events if event["event"] == Event.GONE_FROM_QUEUE
        ]

    @property
    def own_job(self) -> bool:
        """Whether it was submitted as this job, or its script was passed to sbatch: only that makes such a log."""
        return self.job_id in self.info["job_ids"] or self._has_log(self.job_id)

    @property
    def packed(self) -> bool:
        return bool(self.info.get("packed"))

    @property
    def has_begun(self) -> bool:
        """Whether the last attempt belongs to the latest job, or to one that it continues, rather than to an earlier one."""
        if self.last is None or self.job_id is None:
            return self.last is not None
        if self.chain:
            return self.last.number > int(self.info.get("chain_after") or 0)
        if self.last.verdict == Verdict.RESUBMIT:
            return True
        if self.last.job_id is not None:
            return self.last.job_id == self.job_id
        # Rank 0 never recorded the job, so the evidence is whether the job's script has run at all.
        return self.info["job_ids"] in ([], [self.job_id]) or self._has_log(self.job_id)

    @property
    def setup_failed(self) -> Path | None:
        """The file with the message of a set-up that failed, if nobody could finish the record of the attempt; else None."""
        if self.last is None or self.last.verdict is not None:
            return None
        path = self.run_dir.attempt(self.last.number).setup_failure_file
        return path if os.path.lexists(path) else None

    @property
    def setting_up(self) -> bool:
        """Whether the last attempt has its folder, but neither has rank 0 opened its record nor has anybody closed it."""
        last = self.last
        return last is not None and not last.started and last.verdict is None and self.setup_failed is None

    @property
    def waits(self) -> bool:
        """Whether no attempt is under way, as far as the run's files say."""
        return self.last is None or not self.has_begun or self.last.verdict is not None

    @property
    def over(self) -> bool:
        """Whether the last attempt is the last there will be."""
        if self.last is None or not self.has_begun:
            return False
        return self.last.verdict in (Verdict.DONE, Verdict.END) or self.setup_failed is not None

    def cancelled(self, queued: str) -> bool:
        """Return whether the job was cancelled, by scancel or by `cancel RUN` after the last attempt could notice."""
        return queued == JobState.CANCELLED or requests.cancelled_after(self.run_dir, self.last)

    @property
    def pruned(self) -> bool:
        """Whether its search has pruned it after the last attempt could notice."""
        return requests.ended_after(self.run_dir, self.last) == RunAction.PRUNE

    def _has_log(self, job_id: str | None) -> bool:
        return self.run_dir.job_log(job_id or "") is not None


def _read(run_dir: RunDir, me: str | None, known: dict[str, str | None]) -> _Record:
    """Read the record of a run.

    Args:
        me: the name of this user, if there is one.
        known: as for `records.why_distrusted`.
    """
    check_parts(run_dir)
    info, tries = run_dir.info(whole=True), attempts.all_attempts(run_dir)
    job_id = _latest_job_id(run_dir, info["job_ids"], tries)
    chain = links(info)
    conf = distrust = None
    if info["slurm_conf"] is not None:
        try:
            conf = trusted_slurm_conf(info["slurm_conf"], named_by=run_dir.info_file, known=known)
        except ClusterError as error:
            distrust = error.message
    chain = chain if job_id in chain else []
    foreign = me not in (None, info["user"]) and USER_NAME.fullmatch(info["user"])
    owner = _Owner(conf, info["user"] if foreign else None)
    return _Record(run_dir, info, tries, job_id, chain, owner, distrust=distrust)


def _at_its_link(record: _Record, queue: _Queue) -> _Record:
    """Return the record of a chain with the job whose turn it is: the first in the queue, else the last that has run."""
    if not record.chain:
        return record
    left = [link for link in record.chain if queue.job(link).state not in ("", *GONE)]
    if queue.doubt is not None or not left:
        ran = [attempt.job_id for attempt in record.attempts if attempt.job_id in record.chain]
        job_id = ran[-1] if ran else record.chain[0 if queue.doubt is not None else -1]
        return dataclasses.replace(record, job_id=job_id)
    return dataclasses.replace(record, job_id=left[0], following=tuple(left[1:]))


def _latest_job_id(run_dir: RunDir, submitted: list[str], tries: list[Attempt]) -> str | None:
    """Return the last job: one that was submitted, one that an attempt names, or one that somebody passed to sbatch."""
    ran = [attempt.job_id for attempt in tries if attempt.job_id]
    opened = tries[-1].started if tries else 0.0
    if submitted and submitted[-1] not in ran:
        at = [float(event["time"]) for event in run_dir.events() if event["event"] == Event.SUBMITTED] if opened else []
        if not at or at[-1] > opened:  # otherwise somebody started the run by hand since
            return submitted[-1]
    logs = []
    try:
        names = os.listdir(run_dir.path)
    except OSError as error:
        raise UnavailableRecordError(f"{run_dir.path} cannot be read: {error.strerror}", error) from None
    for name in names:
        logged = name.removeprefix("slurm-").removesuffix(".log")
        if len(logged) + len("slurm-.log") == len(name) and is_job_id(logged):
            with contextlib.suppress(OSError):
                logs.append((os.lstat(os.path.join(run_dir.path, name)).st_mtime, logged))
    if logs and max(logs)[0] > opened and max(logs)[1] not in ran:
        return max(logs)[1]
    return ran[-1] if ran else None


@dataclass(frozen=True)
class _Queue:
    """squeue's answer by job id, or why there is none."""

    jobs: dict[str, QueuedJob] = field(default_factory=dict)
    doubt: str | None = None

    def job(self, job_id: str | None) -> QueuedJob:
        """Return the entry of a job; an empty one if it is not in the queue."""
        return self.jobs.get(job_id or "", QueuedJob())

    def of(self, record: _Record) -> _Queue:
        """Return the entries of the jobs of one run: the id of an old job may be that of another run's job by now."""
        jobs = {job_id: self.jobs[job_id] for job_id in record.possible_jobs if job_id in self.jobs}
        if any(job.comment for job in jobs.values()):
            names = names_of(record.run_dir)
            jobs = {job_id: job for job_id, job in jobs.items() if not is_anothers(job.comment, names)}
        return _Queue(jobs, self.doubt)


def _confirmed_queue(owner: _Owner, records: list[_Record]) -> _Queue:
    why_not = _why_conf_is_unusable(owner.slurm_conf)
    if why_not is not None:
        # The jobs of a sandbox here that is down are gone with it. Those of any other cluster may run: nobody can say.
        known = all(record.over or _was_in_a_sandbox_here(record) for record in records)
        return _Queue() if known else _Queue(doubt=why_not)
    job_ids = [job_id for record in records for job_id in record.possible_jobs]
    queue = _queue(owner, job_ids)
    for _ in range(CONFIRMATIONS - 1):
        missing = [record for record in records if record.is_missing_from(queue)]
        if queue.doubt is not None or not missing:
            return queue
        time.sleep(CONFIRM_EVERY_S)
        again = _queue(owner, job_ids)
        queue = _Queue({**queue.jobs, **again.jobs}, again.doubt)
    for record in records:
        if queue.doubt is None and record.is_missing_from(queue) and is_own(record.run_dir):
            with contextlib.suppress(OSError):  # it is told only to spare the next look
                record.run_dir.event(Event.GONE_FROM_QUEUE, job_ids=record.possible_jobs)
    return queue


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


def _was_in_a_sandbox_here(record: _Record) -> bool:
    from slurmtrain.sandbox.directory import user_directory

    in_sandbox = Path(str(record.owner.slurm_conf)).parent.parent == user_directory()
    return in_sandbox and record.info["host"] == socket.gethostname()


def _queue(owner: _Owner, job_ids: list[str]) -> _Queue:
    try:
        return _Queue(SlurmClient(owner.slurm_conf).queue(job_ids, owner.user))
    except ClusterError as error:  # the run's own files are all there is
        return _Queue(doubt=error.message)


def _open_states(record: _Record) -> RunState:
    """Return the state of a run that is in several queues, and that the first job that starts takes."""
    for _ in range(CONFIRMATIONS):
        try:
            places = [_place(choice, record.owner.user) for choice in choices.choices_of(record.run_dir)]
        except UnreadableRecordError as error:
            return _unreadable(error)
        if any(place.alive for place in places):
            break
        time.sleep(CONFIRM_EVERY_S)  # a controller that has just begun knows no jobs
    if not choices.is_open(record.run_dir):  # one has taken it since
        return state(record.run_dir)
    word, sentence, alive = _of_places(record, places)
    waits = [place for place in places if place.word == RunStatus.WAITING]
    doubt = next((place.doubt for place in places if place.doubt is not None), None)
    starts = [start for place in waits if (start := _expected_start(place.job)) is not None]
    return RunState(
        word,
        sentence,
        alive,
        [],
        None,
        slurm_error=doubt,
        reason=waits[0].job.reason if waits else None,
        expected_start=min(starts, default=None),
    )


class _Place(NamedTuple):
    """A choice of a run, and what SLURM says of its job there: `word` is None for a job that is gone or was never submitted."""

    choice: Choice
    job: QueuedJob
    word: RunStatus | None
    doubt: str | None = None

    @property
    def alive(self) -> bool:
        return self.word is not None


def _place(choice: Choice, user: str | None) -> _Place:
    if not choice.token or _was_in_a_lost_sandbox(choice.named_conf):
        return _Place(choice, QueuedJob(), None)
    try:
        client = SlurmClient(choice.slurm_conf())
        job_id = choice.job_id or next(iter(client.find_by_comment(TOKEN_PREFIX + choice.token)), None)
        job = client.queue([job_id], user).get(job_id, QueuedJob()) if job_id is not None else QueuedJob()
    except ClusterError as error:
        return _Place(choice, QueuedJob(), RunStatus.UNKNOWN, error.message)
    if TOKEN_PREFIX + choice.token not in job.comment:  # another run's job has its id by now
        return _Place(choice, QueuedJob(), None)
    if job.state in GONE:
        return _Place(choice, job, None)
    return _Place(dataclasses.replace(choice, job_id=job_id), job, _word_of(job))


def _was_in_a_lost_sandbox(conf: str | None) -> bool:
    """Return whether a slurm.conf is that of a sandbox of this user that is down: its jobs are gone with it."""
    from slurmtrain.sandbox.directory import user_directory

    return conf is not None and Path(conf).parent.parent == user_directory() and not os.path.lexists(conf)


def _word_of(job: QueuedJob) -> RunStatus:
    if job.state != JobState.PENDING:
        return RunStatus.STARTING
    return RunStatus.HELD if is_held(job.reason) else RunStatus.WAITING


def _of_places(record: _Record, places: list[_Place]) -> tuple[RunStatus, str, bool]:
    """Return word, sentence and `alive` of a run that no job has taken yet."""
    said = []
    for place in places:
        job = f"{place.choice.name}: job {place.choice.job_id}"
        start = _expected_start(place.job)
        when = f", expected to start {at_about(start, time.time())}" if start is not None else ""
        if place.word in (RunStatus.WAITING, RunStatus.HELD):
            said.append(f"{job} is pending: {in_words(place.job.reason, record.id)}{when}")
        elif place.word == RunStatus.STARTING:
            said.append(f"{job} is about to begin")
        elif place.word == RunStatus.UNKNOWN:
            said.append(f"{place.choice.name}: SLURM cannot be asked")
    alive = [place.word for place in places if place.word is not None]
    resume = f"`resume {record.id}` submits it to each of them again"
    if requests.cancelled_after(record.run_dir, None):
        if any(word != RunStatus.UNKNOWN for word in alive):
            return RunStatus.STOPPING, f"it is cancelled; {'; '.join(said)}", True
        return RunStatus.STOPPED, f"cancelled while it waited. {resume}", False
    if not alive:
        if not any(place.choice.token for place in places):
            return RunStatus.PREPARED, f"not submitted yet. {resume}", False
        if any(place.job.state == JobState.CANCELLED for place in places):
            return RunStatus.STOPPED, f"cancelled while it waited. {resume}", False
        return RunStatus.LOST, f"its jobs are gone and left no attempt. {resume}", False
    first = "it waits in several queues, and the first job that starts takes it"
    for word in (RunStatus.STARTING, RunStatus.WAITING, RunStatus.HELD):
        if word in alive:
            return word, f"{first if len(alive) > 1 else 'it waits'}: {'; '.join(said)}", True
    return RunStatus.UNKNOWN, "; ".join(said), True


def _state(record: _Record, queue: _Queue) -> RunState:
    without_slurm = record.local or record.job_id is None
    job = queue.job(None if without_slurm else record.job_id)
    if without_slurm:
        word, sentence, alive = _without_slurm(record)
    elif queue.doubt is not None:
        word, sentence, alive = _unasked(record)
    else:
        word, sentence, alive = _asked(record, job)
    waits = word in WAITING
    running_since = record.last.started if word == RunStatus.RUNNING and record.last is not None else None
    return RunState(
        word,
        sentence,
        alive,
        record.attempts,
        record.job_id,
        progress=read_progress(
            record.run_dir,
            record.info.get("steps"),
            record.info.get("own_checkpoints"),
            running_since=running_since,
        ),
        own_job=record.own_job,
        packed=record.packed,
        slurm_error=None if without_slurm else queue.doubt,
        following=record.following,
        queued_again=not alive and job.state == JobState.PENDING and not (record.chain or record.packed),
        reason=job.reason if waits else None,
        expected_start=_expected_start(job) if waits else None,
    )


def _expected_start(job: QueuedJob) -> float | None:
    """Return when SLURM expects to start the job; a time in the past is an outdated estimate, and gives None."""
    start = parse_time(job.start)
    return start if start is not None and start > time.time() else None


def _without_slurm(record: _Record) -> tuple[RunStatus, str, bool]:
    """Return word, sentence and `alive` of a run outside of SLURM, of which only the processes can be looked at."""
    last = record.last
    if last is None:
        return RunStatus.PREPARED, _how_to_begin(record), False
    if record.over:
        return *_ended(record), False
    if last.started and last.verdict is None:
        lives = last.rank_0_lives
        if lives is None:
            return (
                RunStatus.UNKNOWN,
                f"attempt {last.number} began on {last.host}, and only there can be seen what became of it",
                True,
            )
        return (RunStatus.RUNNING, f"attempt {last.number} on {last.host}", True) if lives else (*_ended(record), False)
    since = last.ended or record.run_dir.attempt(last.number).path.stat().st_mtime
    if time.time() - since < LOCAL_START_S:
        number = last.number if record.setting_up else last.number + 1
        return RunStatus.STARTING, f"attempt {number} is setting up", True
    return *_ended(record), False


def _how_to_begin(record: _Record) -> str:
    if record.local:
        return f"not started yet: `resume {record.id}` starts it"
    folder = record.run_dir.path.parent
    if is_sweep(folder):  # its script, if it has one yet, is that of a whole array
        return f"not submitted yet: the command that made the sweep, or `sweep retry {folder.name}`, does it"
    return f"not submitted yet: sbatch {record.run_dir.script}"


def _unasked(record: _Record) -> tuple[RunStatus, str, bool]:
    """Return word, sentence and `alive` of a run when SLURM does not answer: a run without a recorded end may be alive."""
    last = record.last
    if record.over or ((record.waits or record.setting_up) and record.cancelled("")):
        return *_ended(record), False
    if last is None or not record.has_begun:
        known = f"job {record.job_id} was submitted and has left no attempt yet"
    elif record.setting_up:
        known = f"attempt {last.number} was setting up"
    elif last.verdict is not None:
        known = str(last.sentence)
    else:
        known = f"attempt {last.number} has not ended as far as its files say"
    return RunStatus.UNKNOWN, f"SLURM cannot be asked; {known}", True


def _asked(record: _Record, job: QueuedJob) -> tuple[RunStatus, str, bool]:
    """Return word, sentence and `alive` of a run from squeue's entry of its job, which is empty when SLURM has forgotten it."""
    last, job_id, queued = record.last, record.job_id, job.state
    waits = record.waits or queued == JobState.PENDING
    if record.packed and (record.over or (waits and record.cancelled(""))):
        return *_ended(record), False  # whatever the job does for the others
    if queued == JobState.PENDING and record.over and not record.chain:
        word, sentence = _ended(record)
        return word, f"{sentence}; {_queued_again(record)}", False
    if queued == JobState.PENDING and not record.over:
        return *_pending(record, job), True
    if not queued or queued in GONE or record.over:  # a job may outlive the run: an allocation does
        return *_ended(record, queued if queued in GONE else ""), False
    if queued == JobState.SUSPENDED:
        return (
            RunStatus.SUSPENDED,
            f"SLURM has suspended job {job_id}, and lets it go on when those that took its place are done",
            True,
        )
    if queued == JobState.COMPLETING:
        return RunStatus.STOPPING, f"job {job_id}: the last ranks are leaving", True
    if last is not None and last.verdict in (Verdict.RESUBMIT, Verdict.NEXT) and last.job_id == job_id:
        return RunStatus.STOPPING, f"{last.sentence}; job {job_id} is about to leave", True
    if record.packed and last is not None and last.verdict == Verdict.REQUEUE and last.job_id == job_id:
        return RunStatus.STOPPING, f"{last.sentence} when the others of its pack have left job {job_id}", True
    if last is not None and record.setting_up:
        copying = stage_record.progress(record.run_dir.attempt(last.number))
        return RunStatus.STARTING, f"attempt {last.number} {copying or 'is setting up'}, job {job_id}", True
    if last is None or not record.has_begun or last.verdict is not None:
        number = (last.number if last is not None else 0) + 1
        before = f"{last.sentence}; " if last is not None and record.has_begun else ""
        return RunStatus.STARTING, f"{before}attempt {number} is about to begin, job {job_id}", True
    if not record.own_job and last.rank_0_lives is False:
        return *_ended(record), False
    return RunStatus.RUNNING, f"attempt {last.number}, job {job_id}", True


def _queued_again(record: _Record) -> str:
    return (
        f"SLURM has put job {record.job_id} into the queue once more{_why_again(record)}: it will leave as soon as it "
        f"starts, and `cancel {record.id}` takes it out"
    )


def _started_again(record: _Record, last: Attempt) -> str:
    """Return what to add if SLURM has started the job again after the run had ended; nothing if it has not."""
    if not last.started_again or record.chain or record.packed:
        return ""
    times = "once more" if last.started_again == 1 else f"{last.started_again} times more"
    return f"; SLURM then queued job {last.job_id} {times}{_why_again(record)}: it left as soon as it had started"


def _why_again(record: _Record) -> str:
    preempted = any(each.reason == Reason.PREEMPTED for each in record.attempts if each.job_id == record.job_id)
    return ", as SLURM does from 24.05 on with a job that was preempted before" if preempted else ""


def _pending(record: _Record, queued: QueuedJob) -> tuple[RunStatus, str]:
    why = in_words(queued.reason, record.id)
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


def _ended(record: _Record, queued: str = "") -> tuple[RunStatus, str]:
    """Return word and sentence for a run that nobody runs any more."""
    last = record.last
    resume = f"`resume {record.id}` continues it"
    if not record.over and record.pruned:
        return RunStatus.PRUNED, f"{PRUNED_BY_SEARCH} while it waited. {resume}"
    if last is None or not record.has_begun:
        what = f"job {record.job_id}" if record.job_id else "it"
        if record.cancelled(queued):
            return RunStatus.STOPPED, f"cancelled while it waited. {resume}"
        if queued:
            return (
                RunStatus.FAILED,
                f"{what} ended as {queued} before its first attempt; see {record.run_dir.path}/slurm-*.log",
            )
        return RunStatus.LOST, f"{what} is gone and left no attempt; `resume {record.id}` starts it again"
    if record.setup_failed is not None:
        return RunStatus.FAILED, read_text(record.setup_failed).strip()
    if last.verdict == Verdict.DONE:
        return RunStatus.FINISHED, f"{last.sentence or 'finished'}{_started_again(record, last)}"
    if last.verdict == Verdict.END and last.reason == Reason.PRUNED:
        return RunStatus.PRUNED, f"{last.sentence}{_started_again(record, last)}. {resume}"
    if last.verdict == Verdict.END:
        if last.reason == Reason.CONFIG:
            resume = (
                f"When that is put right: `resume {record.id}` (KEY=VALUE after it changes its config), or submit again"
            )
        elif last.reason == Reason.DIVERGED:
            resume = f"`resume {record.id} optim.lr=...` goes on from the newest checkpoint with other values"
        interrupted = last.reason in (Reason.CANCELLED, Reason.ASKED, Reason.TIME_LIMIT, Reason.PREEMPTED)
        word = RunStatus.STOPPED if interrupted else RunStatus.FAILED
        return word, f"{last.sentence}{_started_again(record, last)}. {resume}"
    if record.cancelled(queued):
        if last.verdict is not None:
            return RunStatus.STOPPED, f"cancelled while it waited to start again. {resume}"
        when = "while it was set up" if record.setting_up else "and left no word"
        return RunStatus.STOPPED, f"attempt {last.number} was cancelled {when}. {resume}"
    if last.verdict is None:
        return RunStatus.LOST, f"attempt {last.number} ended without a word; {resume}"
    return RunStatus.LOST, f"{last.sentence}, but its job is gone; {resume}"
