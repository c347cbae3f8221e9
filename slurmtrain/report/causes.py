"""Which cause each second, and so each GPU hour, of a run has: productive, start-up, checkpoints, steps done again, queue.

Everything is read from the run directory: the records of the attempts, the events, and when the log of metrics was last
written. SLURM is not asked, and metrics.jsonl is not read, however long it is.

Each second of a run has one cause, so the seconds add up to the time from its submission to its end. Clocks of several
hosts have written the records, and some may be set back meanwhile: a time that would go backwards counts as the one before
it, one in the future as now.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from slurmtrain.choices import Backend, JobKind
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.goodput import Cause, Goodput, Segment, sums_of
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.ownership import check_parts
from slurmtrain.runs.reasons import Event, Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records

ROLLED_BACK = "rolled back"  # why steps are done again in the same attempt
NOT_RECORDED = "not recorded"  # why an attempt ended that nobody could judge
_REASONS = frozenset(str(reason) for reason in Reason)
# What the other ranks did from the first failure, or the last progress, on.
_IDLE: dict[str, Cause] = {
    Reason.HANG: Cause.HUNG,
    **dict.fromkeys((Reason.CRASH, Reason.DIVERGED, Reason.BAD_NODE), Cause.IDLE_END),
}
_RESUMED = frozenset({Event.RESUME_ASKED, Event.SUBMITTING, Event.SUBMITTED})
_TURNS = _RESUMED | {Event.CANCEL_ASKED}  # from when on a run waits, or waits no more

Turn = tuple[float, str]  # when, and the name of the event
Events = Mapping[str, Sequence[Mapping[str, Any]]]  # the events of an attempt, by name, oldest first


class Stretch(NamedTuple):
    """A part of the time of an attempt."""

    start: float
    end: float
    cause: Cause
    because: str = ""


Layer = tuple[Sequence[Stretch], Cause | None]  # painted over those before it; with a cause, only over that one


def goodput_of(run_dir: RunDir, *, alive: bool | None = None, now: float | None = None) -> Goodput:
    """Return the time of a run by cause, over all its attempts.

    Args:
        alive: whether the run's job is in the queue or runs, if somebody has asked SLURM. None: an attempt without a
            recorded end counts as running, and a run that is to start again as waiting.
        now: unix seconds; None: those of this machine's clock.

    Raises:
        UnreadableRecordError: the run's files cannot be used.
    """
    check_parts(run_dir)
    return of_history(read_history(run_dir), alive=alive, now=time.time() if now is None else now)


def of_history(history: History, *, alive: bool | None, now: float) -> Goodput:
    """Return the time by cause of a run with this history: a pure function."""
    spans = _spans(history, alive, now)
    first = [moment for moment in (history.submitted, *(span[0] for span in spans[:1])) if moment is not None]
    if not first:
        return Goodput()
    cursor = begin = min(min(first), now)
    events_of: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
    for event in history.events:
        if isinstance(number := event.get("attempt"), int):
            events_of.setdefault(number, {}).setdefault(event["event"], []).append(event)
    turns = [(event["time"], event["event"]) for event in history.events if event["event"] in _TURNS]
    segments, interruptions = list[Segment](), dict[str, int]()
    furthest, before, why = 0, None, ""  # `why` the attempt before ended early
    for each, (start, end) in zip(history.tries, spans, strict=True):
        record, number = each.record, each.record.number
        is_last = each is history.tries[-1]
        start, end = max(start, begin), max(end, begin)
        waits = _waits(history, turns, before, each, cursor, start, why)
        over = is_last and alive is not True and record.verdict == Verdict.END
        inside = _inside(each, history.kind, events_of.get(number, {}), start, end, furthest, over=over)
        # What a person's command launches here does not wait: this is start-up of the attempt.
        launched = waits.pop().start if waits and waits[-1].cause is Cause.STARTUP else start
        if launched < start:
            inside = [Stretch(launched, start, Cause.STARTUP), *inside]
        own = _why_ended(record, gone=not is_last or alive is False)
        if own:
            interruptions[own] = interruptions.get(own, 0) + 1
        # Why seconds were lost: because of the end of the attempt before, or of this one.
        blame = dict.fromkeys((Cause.STARTUP, Cause.REDONE), why)
        blame |= dict.fromkeys((Cause.HUNG, Cause.IDLE_END, Cause.LOST), own)
        segments += waits
        segments += [
            Segment(number, part.start, part.end, part.cause, each.gpus, part.because or blame.get(part.cause, ""))
            for part in inside
        ]
        furthest = max(furthest, record.last_step or 0, record.first_step or 0)
        before, why, cursor = each, own, end
    is_waiting = _waits_at_the_end(history, before, alive)
    if is_waiting and cursor < now:
        segments += _waits(history, turns, before, None, cursor, now, why)
    last = before.record if before is not None else None
    runs = last is not None and last.ended is None and last.verdict is None and alive is not False
    kept = _joined(segments)
    return Goodput(
        **sums_of(kept),
        segments=kept,
        gpu_count=before.gpus if before is not None else 0.0,
        interruptions=interruptions,
        running=is_waiting or runs,
    )


def _joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return the segments without empty ones, and neighbours that differ in nothing as one."""
    found: list[Segment] = []
    for each in segments:
        if each.end <= each.start:
            continue
        if found and found[-1].attempt == each.attempt and found[-1][3:] == each[3:]:
            found[-1] = found[-1]._replace(end=each.end)
        else:
            found.append(each)
    return tuple(found)


def _spans(history: History, alive: bool | None, now: float) -> list[tuple[float, float]]:
    """Return begin and end of each attempt: in order, without overlaps, not after `now`.

    An attempt that was still at work when the next one began, which can happen after a node was lost, ends there.
    """
    begins: list[float] = []
    for each in history.tries:
        begins.append(min(now, max(each.begun, begins[-1] if begins else 0.0)))
    ends = []
    for each, begin, latest in zip(history.tries, begins, [*begins[1:], now], strict=False):
        end = each.record.ended
        if each.last_sign is not None and end is not None:  # nobody saw its end, and its record was closed later
            end = min(end, each.last_sign)
        elif end is None:
            end = latest if each is history.tries[-1] and alive is not False else each.last_sign
        ends.append(min(latest, max(begin, latest if end is None else end)))
    return list(zip(begins, ends, strict=True))


def _why_ended(record: Attempt, *, gone: bool) -> str:
    """Return why an attempt ended before the run had finished; "" if it has finished, or has not ended.

    Args:
        gone: it is over, whether or not somebody has recorded its end.
    """
    if record.verdict == Verdict.DONE or record.reason == Reason.FINISHED:
        return ""
    if record.verdict is None and record.ended is None and not gone:
        return ""
    return record.reason if record.reason in _REASONS else NOT_RECORDED


def _waits(
    history: History,
    turns: Iterable[Turn],
    before: AttemptTimes | None,
    after: AttemptTimes | None,
    start: float,
    end: float,
    why: str,
) -> list[Segment]:
    """Return the wait between two attempts, before the first or after the last one: for SLURM, a person, or both in turn."""
    if end <= start:
        return []
    inside = sorted(turn for turn in turns if start <= turn[0] <= end)
    # Resuming is refused while the run has a job: what it had before is gone then.
    resumed = max((moment for moment, name in inside if name == Event.RESUME_ASKED), default=start)
    again = Cause.STARTUP if history.local else Cause.QUEUE
    # Of an attempt whose end nobody saw, nothing may have been left that would have started the next one.
    lost = resumed > start and before is not None and (history.local or before.last_sign is not None)
    if before is None:
        found = [Segment(0, start, end, again)]
    elif lost or before.record.verdict in (Verdict.END, Verdict.DONE):
        found = [Segment(before.record.number, start, end, Cause.STOPPED)]
    elif after is not None and (history.local or (before.job[0] is not None and before.job == after.job)):
        found = [Segment(before.record.number, start, end, Cause.BETWEEN, after.gpus, why)]
    else:
        found = [Segment(before.record.number, start, end, Cause.QUEUE, 0.0, why)]
    for moment, name in inside:
        last = found[-1]
        if last.cause is Cause.STOPPED and name in _RESUMED:
            cause = again
        elif last.cause is not Cause.STOPPED and name == Event.CANCEL_ASKED and moment < resumed:
            cause = Cause.STOPPED
        else:
            continue
        found[-1:] = [last._replace(end=moment), Segment(last.attempt, moment, end, cause)]
    return found


def _waits_at_the_end(history: History, before: AttemptTimes | None, alive: bool | None) -> bool:
    """Return whether the run waits to be started, for the first time or once more."""
    if alive is False:
        return False
    if before is None:
        return alive is True or history.submitted is not None
    record = before.record
    if record.ended is None and record.verdict is None:
        return False
    return record.verdict not in (Verdict.DONE, Verdict.END) or bool(alive)


# Inside of an attempt.


def _inside(
    each: AttemptTimes, kind: str | None, events: Events, begin: float, end: float, furthest: int, *, over: bool
) -> list[Stretch]:
    """Return what the time of an attempt went into, from `begin` to `end`.

    Args:
        furthest: steps that earlier attempts have done.
        over: the run has ended with it.
    """
    record = each.record
    if record.stepping is not None and record.stepping > 0:
        layers = _training(record, kind, events, begin, end, furthest, over=over)
    elif kind is not None and kind != JobKind.COMMAND:
        layers = [([Stretch(begin, end, Cause.STARTUP)], None)]
    else:
        layers = _program(record, events, begin, end)
    if record.idle_since is not None and (idle := _IDLE.get(record.reason or "")) is not None:
        layers.append(([Stretch(record.idle_since, end, idle)], None))
    return _painted(layers, begin, end)


def _painted(layers: Sequence[Layer], begin: float, end: float) -> list[Stretch]:
    """Return what is seen from above of layers that lie upon each other, between `begin` and `end`.

    Where stretches of a layer overlap, the one that begins first is seen.
    """
    inside = (moment for stretches, _ in layers for each in stretches for moment in each[:2] if begin < moment < end)
    bounds = sorted({begin, end, *inside})
    seen: list[tuple[Cause, str] | None] = [None] * (len(bounds) - 1)
    for stretches, only in layers:
        reached = begin
        for start, stop, cause, because in sorted(stretches):
            for place in range(bisect_left(bounds, max(start, reached)), bisect_left(bounds, min(stop, end))):
                below = seen[place]
                if only is None or (below is not None and below[0] is only):
                    seen[place] = cause, because
            reached = max(reached, stop)
    return [
        Stretch(start, stop, *each)
        for (start, stop), each in zip(pairwise(bounds), seen, strict=True)
        if each is not None
    ]


def _program(record: Attempt, events: Events, begin: float, end: float) -> list[Layer]:
    """Return the time of a program of the user's own, which never said that it trains.

    Only the time between its first and its last report of progress is known to be productive.
    """
    started = min(end, max(begin, record.started)) if record.started else end
    layers: list[Layer] = [([Stretch(begin, started, Cause.STARTUP), Stretch(started, end, Cause.UNKNOWN)], None)]
    if reports := events.get(Event.FIRST_REPORT, ()):
        first = max(started, float(reports[0]["time"]))
        last = max([first, *(moment for moment in (record.last_logged, record.marked) if moment is not None)])
        layers.append(([Stretch(first, last, Cause.PRODUCTIVE)], None))
        if (step := _step(reports[0])) is not None and step < (record.reported_before or 0):
            again = _times(events, Event.CAUGHT_UP)
            layers.append(([Stretch(first, again[-1] if again else last, Cause.REDONE)], Cause.PRODUCTIVE))
    return layers


def _training(
    record: Attempt, kind: str | None, events: Events, begin: float, end: float, furthest: int, *, over: bool
) -> list[Layer]:
    """Return the time of an attempt that began to train, or to evaluate."""
    stepping = min(end, max(begin, record.stepping or begin))
    endings = [*events.get(Event.TRAINING_STOPPED, ()), *events.get(Event.TRAINING_FINISHED, ())]
    left = min(end, max(stepping, float(endings[-1]["time"]))) if endings else end
    base = Cause.EVALUATION if kind == JobKind.EVALUATE else Cause.PRODUCTIVE
    layers: list[Layer] = [
        ([Stretch(stepping, left, base)], None),
        (_first_step(record, events, stepping, left), None),
        (_redone(record, events, stepping, left, furthest), None),
    ]
    if over and Event.TRAINING_STARTED in events:
        layers.append((_lost(record, events, stepping, left), Cause.PRODUCTIVE))
    pauses: list[Stretch] = []
    last_save = _step(endings[-1]) if endings else None
    for event in events.get(Event.CHECKPOINT, ()):
        seconds, stall = records.finite(event.get("seconds")), records.finite(event.get("stall_s"))
        if last_save is not None and event.get("step") == last_save:
            stall = seconds  # nothing else is done meanwhile
        if seconds is not None and stall is not None and stall > 0:
            start = event["time"] - seconds
            pauses.append(Stretch(start, start + stall, Cause.CHECKPOINT))
    evaluations = [Stretch(_began(event), event["time"], Cause.EVALUATION) for event in events.get(Event.EVALUATED, ())]
    return [
        *layers,
        ([Stretch(left, end, Cause.IDLE_END)], None),
        (pauses, None),
        (evaluations, None),
        ([Stretch(begin, stepping, Cause.STARTUP)], None),
    ]


def _step(event: Mapping[str, Any]) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and records.is_count(step) else None


def _times(events: Events, name: Event) -> list[float]:
    return [float(event["time"]) for event in events.get(name, ())]


def _began(event: Mapping[str, Any]) -> float:
    """Return when that began which an event says the end of."""
    return float(event["time"]) - (records.finite(event.get("seconds")) or 0.0)


def _pace(begin: float, end: float, first: int | None, last: int | None) -> float | None:
    """Return seconds per step, pauses included; None if it is not known how many steps were done."""
    return (end - begin) / (last - first) if first is not None and last is not None and last > first else None


def _first_step(record: Attempt, events: Events, stepping: float, left: float) -> list[Stretch]:
    """Return what the first step took longer than the others: it compiles, and tunes kernels."""
    if not (done := _times(events, Event.FIRST_STEP)):
        return []
    at = min(left, max(stepping, done[0]))
    others = _pace(at, left, None if record.first_step is None else record.first_step + 1, record.last_step)
    return [] if others is None else [Stretch(stepping, max(stepping, at - others), Cause.STARTUP)]


def _redone(record: Attempt, events: Events, stepping: float, left: float, furthest: int) -> list[Stretch]:
    """Return where steps were done again: until the attempt was where an earlier one, or it itself, had been before.

    Where no event says when that was, as of a program, it is estimated by the seconds per step.
    """
    found, first, last = list[Stretch](), record.first_step, record.last_step
    caught_up, backs = _times(events, Event.CAUGHT_UP), _times(events, Event.ROLLED_BACK)
    if first is not None and first < furthest:
        at = next((moment for moment in caught_up if not backs or moment <= backs[0]), None)
        if at is None and not backs and last is not None and last > furthest:
            pace = _pace(stepping, left, first, last)
            at = stepping + (furthest - first) * pace if pace is not None else None
        if at is None:  # it did not get there
            at = backs[0] if backs else left
        found.append(Stretch(stepping, at, Cause.REDONE))
    for back, until in pairwise([*backs, left]):
        at = next((moment for moment in caught_up if back <= moment <= until), until)
        found.append(Stretch(back, at, Cause.REDONE, ROLLED_BACK))
    return found


def _lost(record: Attempt, events: Events, stepping: float, left: float) -> list[Stretch]:
    """Return the time of the steps after the last checkpoint of a run that has ended with this attempt."""
    committed = record.committed_step or 0
    if record.last_step is None or record.last_step <= max(committed, record.seen_step or 0):
        return []
    begun = [_began(event) for event in events.get(Event.CHECKPOINT, ()) if _step(event) == committed]
    return [Stretch(begun[-1] if begun else stepping, left, Cause.LOST)]


# What the files of a run say of its time.


class AttemptTimes(NamedTuple):
    """What the files say of one attempt. Times are unix seconds, None where nobody has recorded them.

    Attributes:
        begun: when its supervisor claimed it.
        record: attempt.json.
        job: the start of a job that it belongs to.
        last_sign: when it last wrote something; asked for only where `ended` does not say it.
        gpus: GPUs that it held.
    """

    begun: float
    record: Attempt
    job: tuple[str | None, int]
    last_sign: float | None = None
    gpus: float = 0.0


@dataclass(frozen=True)
class History:
    """What the files of a run say of its time.

    Attributes:
        submitted: when it was submitted first; None if it never was.
        kind: job.kind; None if it is not known.
        local: it was started here, without SLURM.
        tries: its attempts, in order.
        events: its events, oldest first.
    """

    submitted: float | None
    kind: str | None
    local: bool
    tries: Sequence[AttemptTimes]
    events: Sequence[Mapping[str, Any]]

    @property
    def is_open(self) -> bool:
        """Whether only SLURM, or the host of a local run, can say if it still runs or waits."""
        last = self.tries[-1].record if self.tries else None
        return last is None or last.verdict not in (Verdict.DONE, Verdict.END)


def read_history(run_dir: RunDir) -> History:
    """Read what the files of a run say of its time.

    Raises:
        UnreadableRecordError: they cannot be used.
    """
    info, events = run_dir.info(), run_dir.events()
    numbers = run_dir.attempt_numbers()
    read = (_read_times(run_dir, number, is_last=number == numbers[-1]) for number in numbers)
    found = [each for each in read if each is not None]
    # An attempt that ended before it could say its GPUs had those of the others.
    gpus = max((each.gpus for each in found), default=0.0)
    found = [each if each.record.gpus is not None else each._replace(gpus=gpus) for each in found]
    for index, (each, after) in enumerate(pairwise(found)):
        # Closed by the next attempt, since nobody saw its end: it was over when it last wrote something.
        if each.last_sign is None and each.record.ended is not None and each.record.ended >= after.begun:
            found[index] = each._replace(last_sign=_last_sign(run_dir, each.record.number, with_log=False))
    kind = next((each.record.kind for each in reversed(found) if each.record.kind), None)
    first = next((event for event in events if event["event"] == Event.SUBMITTED), None)
    asked, created = (first or {}).get("submitted"), info.get("created")
    submitted = asked if records.is_time(asked) and asked > 0 else first["time"] if first is not None else None
    if first is None and records.is_time(created) and info.get("job_ids"):
        submitted = created
    return History(submitted, kind, info.get("backend") == Backend.LOCAL, found, events)


def _read_times(run_dir: RunDir, number: int, *, is_last: bool) -> AttemptTimes | None:
    folder = run_dir.attempt(number)
    names = folder.names()
    record = attempts.read_attempt_in(folder, number, names)
    job, begun = (record.job_id, record.restart_count), record.started
    job_id, restart_count, claimed = attempts.read_claim(folder)
    begun = begun if claimed is None else claimed
    if record.job_id is None and job_id is not None and records.is_job_id(job_id):
        job = job_id, restart_count
    if begun <= 0:  # neither its supervisor nor rank 0 has left a word
        return None
    sign = record.last_sign
    if sign is None and record.ended is None:
        sign = _last_sign(run_dir, number, with_log=is_last)
    if record.ended is None and is_last:
        record = _with_present_steps(run_dir, record)
    return AttemptTimes(begun, record, job, sign, max(0.0, record.gpus or 0.0))


def _with_present_steps(run_dir: RunDir, record: Attempt) -> Attempt:
    """Return the record of an attempt that has not ended with what the log of metrics says of its steps until now."""
    last_step, last_logged = record.last_step, record.last_logged
    with contextlib.suppress(OSError, UnreadableRecordError):
        logged = os.lstat(run_dir.metrics_file).st_mtime
        if record.started and logged >= record.started:
            last_logged = logged if last_logged is None else last_logged
            last_step = attempts.last_logged_step(run_dir) if last_step is None else last_step
    return replace(record, last_step=last_step, last_logged=last_logged)


def _last_sign(run_dir: RunDir, number: int, *, with_log: bool) -> float | None:
    """Return when an attempt last wrote something: to the log of rank 0 or, the last one, to the metrics of the run."""
    paths = [run_dir.attempt(number).rank_log(0), run_dir.attempt(number).record_file]
    times = []
    for path in [*paths, run_dir.metrics_file] if with_log else paths:
        with contextlib.suppress(OSError):
            times.append(os.lstat(path).st_mtime)
    return max(times, default=None)
