"""The record of attempts: one folder and one attempt.json for every start of a job.

Rank 0 writes it while the job runs, `finish-attempt` completes it after the last rank has exited, and the next attempt closes
one that nobody could complete, because its node was gone. It is read by `status`, and by the budget that ends a crash
loop.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import operator
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.directory import newest_committed_step
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs.attempt_dir import STOP_NAME, AttemptDir
from slurmtrain.runs.events import Event
from slurmtrain.runs.outcome import ENDS_RUN, Reason, RunAction, Verdict, joined, why_of
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.system import records
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.records import (
    COUNT,
    FLAG,
    LATEST,
    NOTHING,
    NUMBER,
    NUMBERS,
    OBJECT,
    TEXT,
    TEXTS,
    TIME,
    Kind,
    is_number,
)
from slurmtrain.system.user import own_user

TAIL_BYTES = 65536  # read from the end of a run's metrics

# The kinds of values of the fields of attempt.json, by their annotation; and those of stop.json.
_KINDS = {
    "str": TEXT,
    "int": COUNT,
    "bool": FLAG,
    "float": Kind("a number", lambda value: is_number(value) and abs(value) < LATEST),  # many are times
    "list[str]": TEXTS,
    "dict[str, float]": NUMBERS,
    "dict[str, Any]": OBJECT,
    "None": NOTHING,
}
_STOP = {"cause": TEXT, "time": TIME, "seconds_left": NUMBER | NOTHING, "facts": OBJECT | NOTHING}


@dataclass
class Attempt:
    """The contents of attempt.json. Times are unix seconds.

    Attributes:
        step_id: the srun step of its ranks, with the job's own id, as in "17.0"; None outside of SLURM.
        first_step: steps done when it began; None until it has restored.
        last_step: steps done when it ended, as far as is known.
        committed_before, committed_step: step of the newest checkpoint when it began, and when it ended.
        reported_before, reported_step: the furthest step that a program of the user's own had reported when it began,
            and when it ended; None if it reports none.
        marked_before, marked: when the newest file of job.progress_file had last been changed, when it began and when
            it ended.
        seen_before, seen_step: step of the newest complete checkpoint of job.checkpoints when it began, and when it ended.
        stalled: it used up a budget: its end was its own fault, and it made no progress.
        unseen: that budget is the one of long attempts, of a program that reports no progress.
        lasted: it was such a long attempt: it may have made progress, and the count of short ones begins anew.
        failed_on: the node of the first rank that failed, or the node that failed itself; None if it is not known.
        last_sign: when it last wrote something; only of an attempt whose end nobody saw, so that `ended` is later.
        last_logged: when metrics.jsonl was last written while it ran; None if it was not.
        gpus: GPUs that it held, on all nodes of its job; its share of them if several runs shared the job.
        kind: job.kind.
        bad_nodes: nodes that it could not even start on; the next start excludes them.
        fault: what it says against a node: the values of a `NodeRecord`; None if it says nothing.
        said: rank 0's last word, a `LastWord`.
        program_code: exit code of a program of the user's own on rank 0; minus the signal's number when one killed it.
        stepping: when it began to train; None until then.
        start_up_s: seconds of each stage from the start of rank 0's process until then.
        cause, cause_time: what told the ranks to stop, a `StopCause`, and when.
        sentence: why it ended, and what happens next; None until it has ended. `say` sets it.
        next_step: the part of `sentence` that says what happens next; None if there is none, or in a record of an
            earlier version.
        started_again: how often SLURM has started its job again although the run had ended with it; each exited at
            once.
    """

    number: int
    job_id: str | None = None
    step_id: str | None = None
    restart_count: int = 0
    nodes: list[str] = field(default_factory=list)
    world_size: int = 0
    pid: int | None = None
    host: str = ""
    started: float = 0.0
    stepping: float | None = None
    start_up_s: dict[str, float] = field(default_factory=dict)
    first_step: int | None = None
    last_step: int | None = None
    committed_before: int | None = None
    committed_step: int | None = None
    reported_before: int | None = None
    reported_step: int | None = None
    marked_before: float | None = None
    marked: float | None = None
    seen_before: int | None = None
    seen_step: int | None = None
    said: str | None = None
    program_code: int | None = None
    cause: str | None = None
    cause_time: float | None = None
    seconds_left: float | None = None
    facts: dict[str, Any] | None = None
    ended: float | None = None
    exit_code: int | None = None
    reason: str | None = None
    verdict: str | None = None
    stalled: bool = False
    bad_nodes: list[str] = field(default_factory=list)
    fault: dict[str, Any] | None = None
    failed_on: str | None = None
    unseen: bool = False
    lasted: bool = False
    sentence: str | None = None
    next_step: str | None = None
    started_again: int = 0
    last_sign: float | None = None
    last_logged: float | None = None
    gpus: float | None = None
    kind: str | None = None

    @property
    def why(self) -> str | None:
        """Why it ended, without what happens next; None until it has ended."""
        return None if self.sentence is None else why_of(self.sentence, self.next_step)

    def say(self, why: str, next_step: str | None = None) -> None:
        """Set why it ended and what happens next; None: nothing does."""
        self.sentence, self.next_step = joined(why, next_step), next_step

    @property
    def facts_when_told(self) -> JobFacts | None:
        """Facts that SLURM gave of its job when it was told to stop; None if it gave none."""
        return None if self.facts is None else JobFacts.from_json(self.facts)

    @property
    def progressed(self) -> bool:
        """Whether it committed a checkpoint newer than the one it started from, or showed other progress.

        A program of the user's own may show progress by other means.
        """
        reported = self.reported_step is not None and self.reported_step > (self.reported_before or 0)
        marked = self.marked is not None and self.marked > (self.marked_before or 0.0)
        seen = self.seen_step is not None and self.seen_step > (-1 if self.seen_before is None else self.seen_before)
        return (self.committed_step or 0) > (self.committed_before or 0) or reported or marked or seen

    @property
    def has_trained(self) -> bool:
        """Whether it got past its start, so that its config and its environment were sound."""
        return self.stepping is not None or self.said is not None or self.progressed


def _kind(annotation: str) -> Kind:
    """Return the kind of values that an annotation allows.

    Raises:
        KeyError: no kind is known for it.
    """
    first, *others = (_KINDS[part] for part in annotation.split(" | "))
    return functools.reduce(operator.or_, others, first)


_FIELDS = {name: _kind(str(each.type)) for name, each in Attempt.__dataclass_fields__.items()}


def read_attempt(run_dir: RunDir, number: int) -> Attempt:
    """Return the record of an attempt; an empty one when it died before it could write any.

    Raises:
        UnreadableRecordError: its files cannot be used.
    """
    return read_attempt_in(run_dir.attempt(number), number)


def read_attempt_in(folder: AttemptDir, number: int, names: Collection[str] | None = None) -> Attempt:
    """Return the record of the attempt with this folder, as `read_attempt`.

    Args:
        names: those of all files in the folder, from a caller that has listed it: what is not among them is not opened.

    Raises:
        UnreadableRecordError: its files cannot be used.
    """
    path = folder.record_file
    values = read_json(path) or {}
    records.check_fields(values, _FIELDS, path)
    if not values.keys() <= _FIELDS.keys():
        values = {name: value for name, value in values.items() if name in _FIELDS}
    attempt = Attempt(number)
    vars(attempt).update(values, number=number)  # in a third of the time of forty arguments: `usage` reads thousands
    stop = read_json(folder.stop_file) if names is None or STOP_NAME in names else None
    if stop:
        stop = {**dict.fromkeys(_STOP), **stop}
        records.check_fields(stop, _STOP, folder.stop_file)
        attempt.cause, attempt.cause_time = stop["cause"], stop["time"]
        attempt.seconds_left, attempt.facts = stop["seconds_left"], stop["facts"]
    return attempt


def write_attempt(run_dir: RunDir, attempt: Attempt) -> None:
    """Write the record of an attempt."""
    write_json(run_dir.attempt(attempt.number).record_file, asdict(attempt))


def reopen(run_dir: RunDir, attempt: Attempt, steps: int) -> None:
    """Record that the attempt with which a run had finished is not its end any more: it is to do more steps."""
    attempt.verdict, attempt.reason = Verdict.END, Reason.ASKED
    attempt.say(f"finished after {attempt.last_step} steps, and was then given {steps}")
    write_attempt(run_dir, attempt)
    run_dir.event(Event.LENGTHENED, attempt=attempt.number, steps=steps)


def all_attempts(run_dir: RunDir) -> list[Attempt]:
    """Return the records of all attempts, in order."""
    return [read_attempt(run_dir, number) for number in run_dir.attempt_numbers()]


def stalled_numbers(attempts: list[Attempt], number: int) -> list[int]:
    """Return the numbers of the attempts directly before `number` that used up the budget, the last one first.

    Progress starts the count anew, and so do a long attempt of a program that reports none, and a person who resumed a
    run that had ended. An attempt that ended for another reason does not count.
    """
    counted, moved_on = [], _moved_on(attempts, number)
    for attempt in reversed([attempt for attempt in attempts if attempt.number < number]):
        if (
            attempt.progressed
            or attempt.number in moved_on
            or attempt.lasted
            or attempt.verdict in (Verdict.DONE, Verdict.END)
        ):
            break
        if attempt.stalled and not attempt.unseen:
            counted.append(attempt.number)
    return counted


def _moved_on(attempts: list[Attempt], number: int) -> set[int]:
    """Return the attempts before `number` after which the next one began further on than any before it.

    That is progress, too, of which the run directory has no checkpoint: it was in a copy on the nodes.
    """
    found: set[int] = set()
    furthest, before = 0, None
    for attempt in [attempt for attempt in attempts if attempt.number <= number]:
        if (attempt.first_step or 0) > furthest:
            furthest = attempt.first_step or 0
            if before is not None:
                found.add(before.number)
        before = attempt
    return found


def unseen_before(attempts: list[Attempt], number: int) -> int:
    """Return how many long attempts before `number` used up the budget of those that show no progress."""
    count = 0
    for attempt in reversed([attempt for attempt in attempts if attempt.number < number]):
        if attempt.progressed or attempt.verdict in (Verdict.DONE, Verdict.END):
            break
        count += attempt.unseen
    return count


def failed_before(attempts: list[Attempt], attempt: Attempt) -> tuple[str, ...]:
    """Return the nodes at fault for attempts before this one in the same start of its job, the newest first."""
    found: dict[str, None] = {}
    for each in reversed([each for each in attempts if each.number < attempt.number]):
        if (each.job_id, each.restart_count) != (attempt.job_id, attempt.restart_count):
            break
        if each.failed_on is not None:
            found[each.failed_on] = None
    return tuple(found)


def furthest_reported(run_dir: RunDir) -> int | None:
    """Return the furthest step in the last part of metrics.jsonl, or in the record of an attempt; None if there is none.

    A program that is started from scratch reports its first steps once more: they are no progress.
    """
    steps = [record["step"] for record in records_with("step", tail(run_dir.metrics_file))]
    earlier = [attempt.reported_step for attempt in all_attempts(run_dir)]
    return max((step for step in [*steps, *earlier] if isinstance(step, int)), default=None)


def newest_change(run_dir: RunDir, pattern: str | None) -> float | None:
    """Return when the newest of the files that `pattern` (job.progress_file) names was changed, in unix seconds."""
    times = []
    for folder in run_dir.program_folders if pattern else ():
        for name in glob.glob(str(folder / str(pattern)), recursive=True):
            with contextlib.suppress(OSError):  # it is being replaced
                times.append(os.stat(name).st_mtime)
    return max(times, default=None)


def newest_checkpoint_step(run_dir: RunDir) -> int | None:
    """Return the step of the run's newest committed checkpoint; None if there is none."""
    return newest_committed_step(run_dir.checkpoints)


def last_logged_step(run_dir: RunDir) -> int | None:
    """Return the last step in metrics.jsonl: the progress of a crashed attempt, to within train.log_every."""
    for record in records_with("step", tail(run_dir.metrics_file)):
        if records.is_count(record["step"]):
            return int(record["step"])
    return None


def tail(path: Path) -> bytes:
    """Return the last part of a file that may be long. Its first line may be cut.

    Raises:
        UnreadableRecordError: it is not a regular file, or cannot be read.
    """
    return records.read_tail(path, TAIL_BYTES)


def records_with(name: str, log: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records that have a value of this name, newest first.

    Other lines are not parsed, nor are records not asked for.
    """
    found = len(log)
    while (found := log.rfind(f'"{name}":'.encode(), 0, found)) >= 0:
        begin, end = log.rfind(b"\n", 0, found) + 1, log.find(b"\n", found)
        # The first line may be cut, and the last not written to its end: both are left out.
        record = records.parse(log[begin : end if end >= 0 else None])
        if isinstance(record, dict) and name in record:
            yield record


def record_stop(
    attempt_dir: AttemptDir, *, cause: str, cause_time: float, seconds_left: float | None, facts: JobFacts | None
) -> None:
    """Record why the ranks were told to stop, at once, in a thread of rank 0: the grace time may be too short for more."""
    record = {
        "cause": cause,
        "time": cause_time,
        "seconds_left": seconds_left,
        "facts": asdict(facts) if facts else None,
    }
    write_json(attempt_dir.stop_file, record)


def failed_set_up(attempt_dir: AttemptDir) -> str | None:
    """Return the batch script's message about a set-up that failed before any rank was started; None if there is none."""
    try:
        return attempt_dir.setup_failure_file.read_text(errors="replace").strip()
    except OSError:
        return None


def claimed_by(attempt_dir: AttemptDir) -> tuple[str | None, int]:
    """Return job and restart count of the batch script that has claimed an attempt; the job is None if none has."""
    try:
        job_id, restart_count, *_ = attempt_dir.claim_file.read_text().split()
        return job_id, int(restart_count)
    except (OSError, ValueError):
        return None, 0


def claimed_at(run_dir: RunDir, number: int) -> float | None:
    """Return when an attempt was claimed by its batch script, or opened by rank 0, in unix seconds; None if not known."""
    with contextlib.suppress(OSError, UnreadableRecordError, ValueError, IndexError):
        claimed = float(records.read_bytes(run_dir.attempt(number).claim_file).split()[2])
        if records.is_time(claimed):
            return claimed
    return read_attempt(run_dir, number).started or None


def came_to_an_end(run_dir: RunDir, last: Attempt) -> bool:
    """Return whether the run ended for good with its last attempt.

    It did by its verdict, or in a set-up after which nobody could finish the record.
    """
    unfinished = last.verdict is None and failed_set_up(run_dir.attempt(last.number)) is not None
    return last.verdict == Verdict.END or unfinished


@dataclass(frozen=True)
class Request:
    """A person's request to a run.

    Attributes:
        time: its time in unix seconds.
        attempt: the number of the last attempt that was seen then; 0 before the first one.
    """

    action: RunAction
    time: float
    attempt: int = 0

    def is_for_later(self, run_dir: RunDir, number: int) -> bool:
        """Return whether it came when an attempt after `number` had been claimed already."""
        if self.attempt > number:
            return True
        later = next((each for each in run_dir.attempt_numbers() if each > number), None)
        claimed = None if later is None else claimed_at(run_dir, later)
        return claimed is not None and self.time >= claimed

    def is_for(self, run_dir: RunDir, attempt: Attempt) -> bool:
        """Return whether it was asked of this attempt, not of an earlier or a later one.

        The clocks of two hosts may differ, and a shared file system may show an attempt late: number or time is enough.
        """
        if self.is_for_later(run_dir, attempt.number):
            return False
        return self.attempt == attempt.number or self.time >= (claimed_at(run_dir, attempt.number) or 0.0)


def read_request(path: Path) -> Request | None:
    """Return a request; None when there is none, or the file is no request."""
    values = read_json(path) or {}
    action, time, attempt = values.get("action"), values.get("time", 0.0), values.get("attempt", 0)
    if action not in tuple(RunAction) or not records.is_time(time):
        return None
    return Request(RunAction(action), float(time), int(attempt) if records.is_count(attempt) else 0)


def take_request(run_dir: RunDir, attempt: Attempt) -> RunAction | None:
    """Take the request to this attempt, but not to an earlier one.

    The file is moved into the attempt's folder atomically, so that a request that is found in the run's folder
    afterwards has come too late for this attempt, and was not seen when the outcome was decided.
    """
    taken = run_dir.attempt(attempt.number).request_file
    found = read_request(run_dir.request_file)
    if found is not None and found.is_for_later(run_dir, attempt.number):  # it stays, for that one
        found = read_request(taken)
        return found.action if found is not None and found.is_for(run_dir, attempt) else None
    try:
        run_dir.request_file.rename(taken)
    except FileNotFoundError:
        pass
    except OSError:  # it is read where it is, and may be found once more
        taken = run_dir.request_file
    request = read_request(taken)
    return request.action if request is not None and request.is_for(run_dir, attempt) else None


def cancelled_after(run_dir: RunDir, last: Attempt | None) -> bool:
    """Return whether `cancel RUN`, the file `stop` or a pruning came after the outcome of the last attempt was decided.

    For an attempt without an outcome, return whether it came after that attempt was claimed.
    """
    return ended_after(run_dir, last) is not None


def ended_after(run_dir: RunDir, last: Attempt | None) -> RunAction | None:
    """Return by which action the run was ended after its last attempt, as in `cancelled_after`; None if it was not."""
    request = read_request(run_dir.request_file)  # requests that an outcome has used have been moved away
    if request is None or request.action not in ENDS_RUN:
        return None
    is_later = last is None or request.is_for_later(run_dir, last.number) or request.is_for(run_dir, last)
    return request.action if is_later else None


def write_request(run_dir: RunDir, action: RunAction) -> None:
    """Write a person's request to the run, with the number of its last attempt."""
    asked = {"action": action, "time": time.time(), "attempt": (run_dir.attempt_numbers() or [0])[-1]}
    write_json(run_dir.request_file, {**asked, "by": own_user()})
