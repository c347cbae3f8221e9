"""The record of attempts: one folder and one attempt.json for every start of a job.

Rank 0 writes it while the job runs, the supervisor completes it after the last rank has exited, and the next attempt closes
one that nobody could complete, because its node was gone. It is read by `status`, and by the budget that ends a crash
loop (`attempt_history`).
"""

from __future__ import annotations

import functools
import logging
import operator
import socket
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from slurmtrain.runs.attempt_dir import STOP_NAME, AttemptDir
from slurmtrain.runs.events import Event
from slurmtrain.runs.outcome import AttemptOutcome
from slurmtrain.runs.reasons import Reason, Verdict, joined
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.system import process, records
from slurmtrain.system.files import read_json
from slurmtrain.system.process_mark import ProcessMark
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

log = logging.getLogger(__name__)

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
        pid, born, pid_namespace, host: its rank 0, see `rank_0`.
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
        failed_with: exit code and last line of a program that failed: "2: train.py: error: unrecognized arguments: --lr".
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
        next_step: the part of `sentence` that says what happens next; None if there is none.
    """

    number: int
    job_id: str | None = None
    step_id: str | None = None
    restart_count: int = 0
    nodes: list[str] = field(default_factory=list)
    world_size: int = 0
    pid: int | None = None
    born: str | None = None
    pid_namespace: str | None = None
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
    failed_with: str | None = None
    unseen: bool = False
    lasted: bool = False
    sentence: str | None = None
    next_step: str | None = None
    last_sign: float | None = None
    last_logged: float | None = None
    gpus: float | None = None
    kind: str | None = None

    @property
    def why(self) -> str | None:
        """Why it ended, without what happens next; None until it has ended."""
        if self.sentence is None or self.next_step is None:
            return self.sentence
        return self.sentence.removesuffix(f"; {self.next_step}")

    def say(self, why: str, next_step: str | None = None) -> None:
        """Set why it ended and what happens next; None: nothing does."""
        self.sentence, self.next_step = joined(why, next_step), next_step

    @property
    def rank_0(self) -> ProcessMark | None:
        """The process of its rank 0; None if it had none yet."""
        return None if self.pid is None else ProcessMark(self.host, self.pid, self.born, self.pid_namespace)

    @property
    def rank_0_lives(self) -> bool | None:
        """Whether its rank 0 is alive; None when that is on another host and cannot be seen from here."""
        mark = self.rank_0
        if mark is None:
            return False
        lives = mark.lives()
        if lives is not None or mark.host != socket.gethostname():
            return lives
        # In another container of this host: its pid is all that can be asked for. "Not known" would hold for ever of a run
        # that has ended with its container.
        return process.lives(mark.pid)

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
    folder = run_dir.attempt(attempt.number)
    folder.write_record(folder.record_file, asdict(attempt))


def record_outcome(run_dir: RunDir, attempt: Attempt, outcome: AttemptOutcome) -> None:
    """Complete the record of an attempt with its outcome, and add the event to those of the run."""
    attempt.ended, attempt.lasted = time.time(), outcome.lasted
    attempt.stalled, attempt.unseen = outcome.stalled or outcome.unseen, outcome.unseen
    attempt.reason, attempt.verdict = outcome.reason, outcome.verdict
    attempt.say(outcome.why, outcome.next_step)
    if outcome.bad_nodes:
        attempt.bad_nodes = list(outcome.bad_nodes)
    if outcome.fault is not None:
        attempt.fault = outcome.fault.values()
    write_attempt(run_dir, attempt)
    run_dir.event(
        Event.ATTEMPT_ENDED,
        attempt=attempt.number,
        reason=outcome.reason,
        verdict=outcome.verdict,
        sentence=outcome.sentence,
    )


def change_outcome(run_dir: RunDir, attempt: Attempt, verdict: Verdict, why: str, next_step: str | None = None) -> None:
    """Record that something else happens than was decided after an attempt. If the disk is full, it happens all the same."""
    attempt.verdict = verdict
    attempt.say(why, next_step)
    try:
        write_attempt(run_dir, attempt)
        if verdict is Verdict.END:
            run_dir.event(Event.NOT_STARTED_AGAIN, attempt=attempt.number, sentence=attempt.sentence)
    except OSError as error:
        log.warning("cannot record what becomes of run %s (%s): %s", run_dir.id, attempt.sentence, error)


def reopen(run_dir: RunDir, attempt: Attempt, steps: int) -> None:
    """Record that the attempt with which a run had finished is not its end any more: it is to do more steps."""
    attempt.verdict, attempt.reason = Verdict.END, Reason.FINISHED  # nobody has interrupted it
    attempt.say(f"finished after {attempt.last_step} steps, and was then given {steps}")
    write_attempt(run_dir, attempt)
    run_dir.event(Event.LENGTHENED, attempt=attempt.number, steps=steps)


def all_attempts(run_dir: RunDir) -> list[Attempt]:
    """Return the records of all attempts, in order."""
    return [read_attempt(run_dir, number) for number in run_dir.attempt_numbers()]


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
    attempt_dir.write_record(attempt_dir.stop_file, record)
