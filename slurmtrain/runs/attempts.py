"""The record of attempts: one folder and one attempt.json for every start of a job.

Rank 0 writes it while the job runs, the supervisor completes it after the last rank has exited, and the next attempt closes
one that nobody could complete, because its node was gone. It is read by `status`, and by the budgets that end a run which
crashes again and again: pure functions of the records, on which `decide.budget_spent` decides.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs.attempt_dir import STOP_NAME, AttemptDir
from slurmtrain.runs.reasons import QUICK_FAILURE_S, Event, Reason, Verdict, joined
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.records import Count, Number, read_json, typed, typed_or_none

if TYPE_CHECKING:
    from slurmtrain.runs.decide import AttemptOutcome
    from slurmtrain.slurm.job_facts import JobFacts
    from slurmtrain.system.process import ProcessMark

log = logging.getLogger(__name__)

STOP_FIELDS = (
    "cause",
    "cause_time",
    "seconds_left",
    "facts",
)  # of an attempt that are in stop.json: why it was to stop


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
        marked_before, marked: when the newest checkpoint of job.checkpoints, if it has no number, had last been changed, when
            it began and when it ended.
        seen_before, seen_step: step of the newest complete checkpoint of job.checkpoints when it began, and when it ended.
        saved: the newest checkpoint that a training library, or a Checkpointer in a folder of its own, has reported.
        stalled: it used up a budget: its end was its own fault, and it made no progress.
        unseen: that budget is the one of long attempts, of a program that reports no progress.
        lasted: it was such a long attempt: it may have made progress, and the count of short ones begins anew.
        failed_on: the node of the first rank that failed, or the node that failed itself; None if it is not known.
        failed_with: exit code and last line of a program that failed: "2: train.py: error: unrecognized arguments: --lr".
        last_sign: when it last wrote something; only of an attempt whose end nobody saw, so that `ended` is later.
        last_logged: when metrics.jsonl was last written while it ran; None if it was not.
        idle_since: when its first rank failed, or when a rank made progress for the last time before a hang; None: neither
            happened.
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

    number: Count
    job_id: str | None = None
    step_id: str | None = None
    restart_count: Count = 0
    nodes: list[str] = field(default_factory=list)
    world_size: Count = 0
    pid: Count | None = None
    born: str | None = None
    pid_namespace: str | None = None
    host: str = ""
    started: Number = 0.0
    stepping: Number | None = None
    start_up_s: dict[str, Number] = field(default_factory=dict)
    first_step: Count | None = None
    last_step: Count | None = None
    committed_before: Count | None = None
    committed_step: Count | None = None
    reported_before: Count | None = None
    reported_step: Count | None = None
    marked_before: Number | None = None
    marked: Number | None = None
    seen_before: Count | None = None
    seen_step: Count | None = None
    saved: str | None = None
    said: str | None = None
    program_code: Count | None = None
    cause: str | None = None
    cause_time: Number | None = None
    seconds_left: Number | None = None
    facts: dict[str, Any] | None = None
    ended: Number | None = None
    exit_code: Count | None = None
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
    last_sign: Number | None = None
    last_logged: Number | None = None
    idle_since: Number | None = None
    gpus: Number | None = None
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
        from slurmtrain.system.process import ProcessMark  # of most runs nobody asks this

        return None if self.pid is None else ProcessMark(self.host, self.pid, self.born, self.pid_namespace)

    @property
    def rank_0_lives(self) -> bool | None:
        """Whether its rank 0 is alive; None when that is on another host and cannot be seen from here."""
        from slurmtrain.system import process

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
        from slurmtrain.slurm.job_facts import JobFacts

        return typed_or_none(JobFacts, self.facts)

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
    values = read_json(folder.record_file) or {}
    attempt = typed(Attempt, {**values, "number": number}, folder.record_file)
    stop = read_json(folder.stop_file) if names is None or STOP_NAME in names else None
    if stop:
        told = {name: stop[name] for name in STOP_FIELDS if name in stop}
        found = typed(Attempt, {**told, "number": number}, folder.stop_file)
        for name in STOP_FIELDS:
            setattr(attempt, name, getattr(found, name))
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
        attempt.fault = asdict(outcome.fault)
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
    return [read_attempt_in(run_dir.attempt(number), number) for number in run_dir.attempt_numbers()]


def furthest_reported(run_dir: RunDir) -> int | None:
    """Return the furthest step in the last part of metrics.jsonl, or in the record of an attempt; None if there is none.

    A program that is started from scratch reports its first steps once more: they are no progress.
    """
    earlier = [each.reported_step for each in all_attempts(run_dir) if each.reported_step is not None]
    return max([*_logged_steps(run_dir), *earlier], default=None)


def last_logged_step(run_dir: RunDir) -> int | None:
    """Return the last step in metrics.jsonl: the progress of a crashed attempt, to within train.log_every."""
    return next(_logged_steps(run_dir), None)


def _logged_steps(run_dir: RunDir) -> Iterator[int]:
    """Yield the steps in the last part of metrics.jsonl, the newest first."""
    log = records.read_tail(run_dir.metrics_file, records.TAIL_BYTES)
    yield from (each["step"] for each in records.records_with("step", log) if records.is_count(each["step"]))


def record_stop(
    attempt_dir: AttemptDir, *, cause: str, cause_time: float, seconds_left: float | None, facts: JobFacts | None
) -> None:
    """Record why the ranks were told to stop, at once, in a thread of rank 0: the grace time may be too short for more."""
    values = (cause, cause_time, seconds_left, asdict(facts) if facts else None)
    attempt_dir.write_record(attempt_dir.stop_file, dict(zip(STOP_FIELDS, values, strict=True)))


# What the supervisor writes into an attempt's folder before its ranks start.


def failed_set_up(attempt_dir: AttemptDir) -> str | None:
    """Return the message about a set-up that failed before any rank was started; None if there is none."""
    try:
        return attempt_dir.setup_failure_file.read_text(errors="replace").strip()
    except OSError:
        return None


def read_claim(attempt_dir: AttemptDir) -> tuple[str | None, int, float | None]:
    """Return the job that has claimed an attempt, that job's restart count, and when; None: its folder does not say."""
    with contextlib.suppress(OSError, UnreadableRecordError, ValueError):
        job_id, restart_count, time, *_ = records.read_bytes(attempt_dir.claim_file).decode("ascii").split()
        return job_id, int(restart_count), at if records.is_time(at := float(time)) else None
    return None, 0, None


def claimed_at(run_dir: RunDir, number: int) -> float | None:
    """Return when an attempt was claimed by its supervisor, or opened by rank 0, in unix seconds; None if not known."""
    return read_claim(run_dir.attempt(number))[2] or read_attempt(run_dir, number).started or None


# What the attempts before one say about it: how many of them used up a budget, and which nodes were at fault.


def stalled_numbers(attempts: list[Attempt], number: int) -> list[int]:
    """Return the numbers of the attempts directly before `number` that used up the budget, the last one first.

    Progress starts the count anew, and so do a long attempt of a program that reports none, and a person who resumed a
    run that had ended. An attempt that ended for another reason does not count.
    """
    counted = []
    for attempt in reversed([attempt for attempt in attempts if attempt.number < number]):
        if attempt.progressed or attempt.lasted or attempt.verdict in (Verdict.DONE, Verdict.END):
            break
        if attempt.stalled and not attempt.unseen:
            counted.append(attempt.number)
    return counted


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


def failed_quickly(attempt: Attempt, how: str | None) -> bool:
    """Return whether the program of an attempt failed within seconds, and in this way (`failed_with`)."""
    if how is None or attempt.failed_with != how or attempt.ended is None:
        return False
    return attempt.ended - attempt.started < QUICK_FAILURE_S


def failed_alike(attempts: list[Attempt], attempt: Attempt) -> bool:
    """Return whether the program of the attempt directly before this one failed within seconds, and in the same way.

    An attempt that ended the run does not count: a person has resumed it since.
    """
    before = next((each for each in attempts if each.number == attempt.number - 1), None)
    if before is None or before.verdict == Verdict.END:
        return False
    return before.stalled and failed_quickly(before, attempt.failed_with)


def came_to_an_end(run_dir: RunDir, last: Attempt) -> bool:
    """Return whether the run ended for good with its last attempt.

    It did by its verdict, or in a set-up after which nobody could finish the record.
    """
    unfinished = last.verdict is None and failed_set_up(run_dir.attempt(last.number)) is not None
    return last.verdict == Verdict.END or unfinished
