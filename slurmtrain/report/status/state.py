"""The state of a run: one word, why, and what comes next, from its own files. Of a job in SLURM, `queued` says more."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slurmtrain.errors import ClusterError, UnreadableRecordError
from slurmtrain.report.progress import Progress, read_progress
from slurmtrain.report.status.record import Record, read_record
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.lookup import is_sweep
from slurmtrain.runs.reasons import PRUNED_BY_SEARCH, LastWord, Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import kubectl
from slurmtrain.system.records import read_text
from slurmtrain.system.texts import roughly

LOCAL_START_S = 60.0  # a local attempt whose rank 0 has not said anything for longer than this never will


class RunStatus(StrEnum):
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
AT_WORK = (RunStatus.STARTING, RunStatus.RUNNING, RunStatus.SUSPENDED, RunStatus.STOPPING)
ALIVE = frozenset({*WAITING, *AT_WORK, RunStatus.UNKNOWN})
ATTEMPT_HEADER = ("attempt", "job", "started", "took", "nodes", "steps", "reason", "then")


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Attributes:
        status: what a person reads of it first.
        explanation: why, and what comes next.
        own_job: it was submitted as this job; False if somebody started the run inside of an allocation.
        progress: its progress.
        packed: the job is that of other runs, too (sweep.pack).
        slurm_error: why SLURM could not be asked, if it should have been.
        following: jobs of its chain that wait for this one.
        queued_again: it has ended, and SLURM has queued its job once more; when that starts, it exits at once.
        reason: SLURM's word for why its job waits or is held.
        copied_from: path of the original, if it is a copy that nobody has resumed.
        expected_start: when SLURM expects to start it, in unix seconds; None while SLURM has not worked that out.
    """

    status: RunStatus
    explanation: str
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
    copied_from: str | None = None

    @property
    def step(self) -> int | None:
        """The number of steps done, as far as is known."""
        return self.progress.step

    @property
    def alive(self) -> bool:
        """Whether SLURM or a local launcher still has it, or may have it as far as can be known here."""
        return self.status in ALIVE

    @property
    def waits(self) -> bool:
        """Whether its job is pending."""
        return self.status in WAITING

    @property
    def readable(self) -> bool:
        """Whether its files can be used."""
        return self.status != RunStatus.UNREADABLE

    def facts(self) -> dict[str, Any]:
        """Return what a program gets to know of it, by the names of `Run.status()` and of `status --json`."""
        progress = ("step", "steps", "loss", "valid_loss", "logged", "tokens_per_s", "step_time_s", "eta_s")
        return {
            "state": self.status,
            "sentence": self.explanation,
            "job_id": self.job_id,
            **{name: getattr(self.progress, name) for name in progress},
            "reason": self.reason,
            "expected_start": self.expected_start,
        }

    def attempt_cells(self, attempt: Attempt, now: float) -> list[str]:
        """Return the cells below ATTEMPT_HEADER for one of its attempts, at this time in unix seconds."""
        current = attempt is self.attempts[-1] and self.alive and not self.waits and attempt.ended is None
        # Before it has begun, the run's step is that of an earlier one.
        last = self.step if current and attempt.started else attempt.last_step
        end = attempt.ended or (now if current else None)
        more = f" +{len(attempt.nodes) - 4}" if len(attempt.nodes) > 4 else ""
        return [
            str(attempt.number),
            attempt.job_id or "-",
            time.strftime("%m-%d %H:%M:%S", time.localtime(attempt.started)) if attempt.started else "-",
            roughly(end - attempt.started) if end and attempt.started else "-",
            ",".join(attempt.nodes[:4]) + more or "-",
            "-".join("?" if step is None else str(step) for step in (attempt.first_step, last)),
            attempt.reason or (self.status if current else "?"),
            attempt.sentence or "",
        ]


def unreadable(error: UnreadableRecordError) -> RunState:
    """Return the state of a run whose files cannot be used."""
    return RunState(RunStatus.UNREADABLE, error.message, [], None)


def states(run_dirs: Iterable[RunDir]) -> dict[RunDir, RunState]:
    """Return the state of every run, from its own files first: they are there when SLURM's answer is late.

    A run whose files cannot be used is "unreadable", and its sentence says why.
    """
    found: dict[RunDir, RunState] = {}
    in_slurm: list[Record] = []
    for run_dir in run_dirs:
        try:
            record = read_record(run_dir)
            if not (record.local or record.in_pods or record.job_id is None):
                in_slurm.append(record)
                continue
            of_kind = _copy if record.copied_from else _in_pods if record.in_pods else _without_slurm
            found[run_dir] = state_of(record, *of_kind(record), own_job=record.job_id in record.info["job_ids"])
        except UnreadableRecordError as error:
            found[run_dir] = unreadable(error)
    if in_slurm:
        from slurmtrain.report.status.queued import states_of_jobs

        found |= states_of_jobs(in_slurm)
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
    return read_record(run_dir).over


def state_of(record: Record, word: RunStatus, sentence: str, **more: Any) -> RunState:
    """Return the state of a run for which word and sentence are known, with its progress and other fields."""
    running_since = record.last.started if word == RunStatus.RUNNING and record.last is not None else None
    steps, own = record.info.get("steps"), record.info.get("own_checkpoints")
    progress = read_progress(record.run_dir, steps, own, running_since=running_since)
    more |= {"packed": record.packed, "following": record.following, "copied_from": record.copied_from}
    return RunState(word, sentence, record.attempts, record.job_id, progress, **more)


def _copy(record: Record) -> tuple[RunStatus, str]:
    """Return word and sentence of a copy of a run: whatever goes on belongs to the original."""
    if record.over:
        word, sentence = ended(record)
        return word, f"{sentence}; this is a copy of {record.copied_from}"
    goes_on = how_to_continue(record.run_dir, record.info)
    return RunStatus.STOPPED, f"this is a copy of {record.copied_from}, and has no job of its own. {goes_on}"


def _without_slurm(record: Record) -> tuple[RunStatus, str]:
    """Return word and sentence of a run outside of SLURM, of which only the processes can be looked at."""
    last = record.last
    if last is None:
        return RunStatus.PREPARED, _how_to_begin(record)
    if record.over:
        return ended(record)
    if last.started and last.verdict is None:
        lives = last.rank_0_lives
        if lives is None:
            words = f"attempt {last.number} began on {last.host}, and only there can be seen what became of it"
            return RunStatus.UNKNOWN, words
        return (RunStatus.RUNNING, f"attempt {last.number} on {last.host}") if lives else ended(record)
    since = last.ended or record.run_dir.attempt(last.number).path.stat().st_mtime
    if time.time() - since < LOCAL_START_S:
        number = last.number if record.setting_up else last.number + 1
        return RunStatus.STARTING, f"attempt {number} is setting up"
    return ended(record)


def _in_pods(record: Record) -> tuple[RunStatus, str]:
    """Return word and sentence of a run on Kubernetes: kubectl tells whether its pods run, and its files all else."""
    last, name = record.last, record.job_id or "its object"
    if record.over:
        return ended(record)
    number = (last.number if last is not None else 0) + 1
    at_work = last is not None and record.has_begun and last.verdict is None
    known = f"attempt {number - 1} has not ended as far as its files say" if at_work else f"attempt {number} is next"
    try:
        state, said = kubectl.state_of(record.run_dir.manifest)
    except ClusterError as error:
        return RunStatus.UNKNOWN, f"{error.message}; {known}"
    if state is None and last is None and record.job_id is None:
        return RunStatus.PREPARED, f"not submitted yet: kubectl create -f {record.run_dir.manifest}"
    if state is None and name == kubectl.WITHOUT_OBJECT:
        return RunStatus.UNKNOWN, f"{known}; ask what started it, such as `ray job list`"
    why = f": {said}" if said else ""
    if state not in ("suspended", "active"):
        word, sentence = ended(record)
        return word, f"{sentence} (its object on Kubernetes, {name}: {state or 'gone'}{why})"
    before = f"{last.sentence}; " if last is not None and record.has_begun and last.verdict is not None else ""
    if state == "suspended":
        word = RunStatus.REQUEUED if before else RunStatus.WAITING
        why_not = f"(`kubectl get workloads` says why not yet){why}"
        return word, f"{before}{name} is suspended until Kueue admits it {why_not}"
    if not at_work:
        begins = f"attempt {number} begins when Kubernetes has started the pods of {name}"
        shows = f"`kubectl get pods -l slurmtrain/run={record.run_dir.id}` shows what they wait for"
        return RunStatus.STARTING, f"{before}{begins}: {shows}"
    if record.setting_up:
        return RunStatus.STARTING, f"attempt {number - 1} waits until all pods of {name} run"
    return RunStatus.RUNNING, f"attempt {number - 1}, {name}"


def _how_to_begin(record: Record) -> str:
    if record.local:
        return f"not started yet: `resume {record.run_dir.id}` starts it"
    folder = record.run_dir.path.parent
    if is_sweep(folder):  # its script, if it has one yet, is that of a whole array
        return f"not submitted yet: the command that made the sweep, or `sweep retry {folder.name}`, does it"
    return f"not submitted yet: sbatch {record.run_dir.script}"


def ended(record: Record, queued: str = "") -> tuple[RunStatus, str]:
    """Return word and sentence for a run that nobody runs any more."""
    last = record.last
    if last is not None and record.over and last.verdict == Verdict.DONE:
        return RunStatus.FINISHED, last.sentence or "finished"
    if record.over and record.setup_failed is not None:
        return RunStatus.FAILED, read_text(record.setup_failed).strip()
    resume = how_to_continue(record.run_dir, record.info)
    ended_by = None if record.over else record.ended_by
    if ended_by == "prune":  # a RunAction
        return RunStatus.PRUNED, f"{PRUNED_BY_SEARCH} while it waited. {resume}"
    cancelled = queued == "CANCELLED" or ended_by is not None
    if last is None or not record.has_begun:
        what = f"job {record.job_id}" if record.job_id else "it"
        if cancelled:
            return RunStatus.STOPPED, f"cancelled while it waited. {resume}"
        if queued:
            logs = f"see {record.run_dir.path}/slurm-*.log"
            return RunStatus.FAILED, f"{what} ended as {queued} before its first attempt; {logs}. {resume}"
        return RunStatus.LOST, f"{what} is gone and left no attempt; {resume}"
    if last.verdict == Verdict.END and last.reason == Reason.PRUNED:
        return RunStatus.PRUNED, f"{last.sentence}. {resume}"
    if last.verdict == Verdict.END:
        resume = how_to_continue(record.run_dir, record.info, last.reason)
        stopped = (Reason.CANCELLED, Reason.ASKED, Reason.TIME_LIMIT, Reason.PREEMPTED, Reason.FINISHED)
        word = RunStatus.STOPPED if last.reason in stopped else RunStatus.FAILED
        return word, f"{last.sentence}. {resume}"
    if last.verdict is None and last.said == LastWord.FINISHED:
        unrecorded = "but its supervisor was killed before it recorded that"
        return RunStatus.FINISHED, f"attempt {last.number} finished, {unrecorded}"
    if cancelled:
        if last.verdict is not None:
            return RunStatus.STOPPED, f"cancelled while it waited to start again. {resume}"
        when = "while it was set up" if record.setting_up else "and left no word"
        return RunStatus.STOPPED, f"attempt {last.number} was cancelled {when}. {resume}"
    if last.verdict is None:
        saved = f"was saved at step {last.last_step}, but its supervisor was killed"
        how = saved if last.said == LastWord.STOPPED else "ended without a word"
        return RunStatus.LOST, f"attempt {last.number} {how}; {resume}"
    return RunStatus.LOST, f"{last.sentence}, but its job is gone; {resume}"


def how_to_continue(run_dir: RunDir, info: Mapping[str, Any], reason: str | None = None) -> str:
    """Return what a person does to continue a run that has ended; if its config was wrong, that includes correcting it.

    Args:
        info: the contents of its run.json.
        reason: why its last attempt ended.
    """
    if run_dir.evaluated_run is not None:  # which is no run that `resume` could find by its ID
        step = int(run_dir.path.name.removeprefix("step_").partition("-")[0])
        words = ["evaluate", run_dir.evaluated_run.id, "--step", str(step), *info.get("overrides", ())]
        repeat = f"`{shlex.join([*words, '--submit'] if info.get('job_ids') else words)}` repeats it"
        return f"When that is put right, {repeat}" if reason == Reason.CONFIG else repeat
    if reason == Reason.CONFIG and info.get("varied"):  # `resume` does not change what the sweep varies
        sweep = run_dir.path.parent.name
        return f"Other values need a sweep of their own; if its cause is not in the config, `sweep retry {sweep}`"
    if reason == Reason.CONFIG:
        return f"When that is put right: `resume {run_dir.id}` (KEY=VALUE after it changes its config), or submit again"
    if reason == Reason.DIVERGED:
        return (
            f"`resume {run_dir.id} optim.lr=...` goes on with other values, from the newest checkpoint if there is one"
        )
    if reason == Reason.CRASH:
        how = "KEY=VALUE after it changes its config, as job.command; --code: with the code as it is then"
        return f"When its cause is mended, `resume {run_dir.id}` continues it ({how})"
    return f"`resume {run_dir.id}` continues it"
