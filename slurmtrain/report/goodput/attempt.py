"""What the time of one attempt went into."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmtrain.choices import JobKind
from slurmtrain.report.goodput.causes import Cause
from slurmtrain.report.goodput.history import AttemptTimes
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.system import records

ROLLED_BACK = "rolled back"  # why steps are done again in the same attempt

Stretch = tuple[float, float, Cause, str]  # start, end, cause, because
Events = Mapping[str, Sequence[Mapping[str, Any]]]  # the events of an attempt, by name, oldest first


def inside_of(
    each: AttemptTimes,
    kind: str | None,
    events: Events,
    begin: float,
    end: float,
    furthest: int,
    *,
    over: bool,
) -> list[Stretch]:
    """Return what the time of an attempt went into, from `begin` to `end`.

    Args:
        furthest: steps that earlier attempts have done.
        over: the run has ended with it.
    """
    record = each.record
    if record.stepping is not None and record.stepping > 0:
        stepping = min(end, max(begin, record.stepping))
        found: list[Stretch] = [(begin, stepping, Cause.STARTUP, "")]
        found += _training(record, kind, events, stepping, end, furthest, over=over)
    elif kind is not None and kind != JobKind.COMMAND:
        found = [(begin, end, Cause.STARTUP, "")]
    else:
        found = _program(record, events, begin, end)
    for moment, cause in ((each.failed, Cause.IDLE_END), (each.hung_since, Cause.HUNG)):
        if moment is not None:
            found = overlay(found, [(min(end, max(begin, moment)), end, cause, "")])
    return found


def _program(record: Attempt, events: Events, begin: float, end: float) -> list[Stretch]:
    """Return the time of a program of the user's own, which never said that it trains.

    Only the time between its first and its last report of progress is known to be productive.
    """

    def within(moment: float) -> float:
        return min(end, max(started, moment))

    started = min(end, max(begin, record.started)) if record.started else end
    reports = events.get(Event.FIRST_REPORT, ())
    first = within(float(reports[0]["time"])) if reports else end
    marks = [moment for moment in (record.last_logged, record.marked) if moment is not None]
    last = max([first, *map(within, marks)]) if reports else end
    found: list[Stretch] = [
        (begin, started, Cause.STARTUP, ""),
        (started, first, Cause.UNKNOWN, ""),
        (first, last, Cause.PRODUCTIVE, ""),
        (last, end, Cause.UNKNOWN, ""),
    ]
    step = _step(reports[0]) if reports else None
    if step is not None and step < (record.reported_before or 0):
        again = _times(events, Event.CAUGHT_UP)
        found = overlay(found, [(first, within(again[-1]) if again else last, Cause.REDONE, "")], only=Cause.PRODUCTIVE)
    return [each for each in found if each[1] > each[0]]


def _training(
    record: Attempt, kind: str | None, events: Events, stepping: float, end: float, furthest: int, *, over: bool
) -> list[Stretch]:
    """Return the time of an attempt from when it began to train, or to evaluate."""

    def clamp(moment: float) -> float:
        return min(end, max(stepping, moment))

    endings = [*events.get(Event.TRAINING_STOPPED, ()), *events.get(Event.TRAINING_FINISHED, ())]
    leaving = endings[-1] if endings else None
    left = end if leaving is None else clamp(float(leaving["time"]))
    base = Cause.EVALUATION if kind == JobKind.EVALUATE else Cause.PRODUCTIVE
    found: list[Stretch] = [(stepping, left, base, ""), (left, end, Cause.IDLE_END, "")]
    first, last = record.first_step, record.last_step
    found = overlay(found, _first_step(events, stepping, left, first, last))
    found = overlay(found, _redone(events, stepping, left, first, last, furthest))
    if over and Event.TRAINING_STARTED in events:
        found = overlay(found, _lost(record, events, stepping, left), only=Cause.PRODUCTIVE)
    saves: list[Stretch] = []
    last_save = _step(leaving) if leaving is not None else None
    for event in events.get(Event.CHECKPOINT, ()):
        seconds, stall = records.finite(event.get("seconds")), records.finite(event.get("stall_s"))
        if last_save is not None and event.get("step") == last_save:
            stall = seconds  # nothing else is done meanwhile
        if seconds is not None and stall is not None and stall > 0:
            start = event["time"] - seconds
            saves.append((max(start, stepping), min(start + stall, end), Cause.CHECKPOINT, ""))
    evaluations: list[Stretch] = []
    for event in events.get(Event.EVALUATED, ()):
        seconds, at = records.finite(event.get("seconds")) or 0.0, float(event["time"])
        evaluations.append((clamp(at - seconds), clamp(at), Cause.EVALUATION, ""))
    return overlay(overlay(found, saves), evaluations)


def _step(event: Mapping[str, Any]) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and records.is_count(step) else None


def _times(events: Events, name: Event) -> list[float]:
    return [float(event["time"]) for event in events.get(name, ())]


def _pace(begin: float, end: float, first: int | None, last: int | None) -> float | None:
    """Return seconds per step, pauses included; None if it is not known how many steps were done."""
    return (end - begin) / (last - first) if first is not None and last is not None and last > first else None


def _first_step(events: Events, stepping: float, left: float, first: int | None, last: int | None) -> list[Stretch]:
    """Return what the first step took longer than the others: it compiles, and tunes kernels."""
    done = next(iter(_times(events, Event.FIRST_STEP)), None)
    if done is None:
        return []
    done = min(left, max(stepping, done))
    others = _pace(done, left, None if first is None else first + 1, last)
    excess = done - stepping - (others or 0.0)
    return [(stepping, stepping + excess, Cause.STARTUP, "")] if others is not None and excess > 0 else []


def _redone(
    events: Events,
    stepping: float,
    left: float,
    first: int | None,
    last: int | None,
    furthest: int,
) -> list[Stretch]:
    """Return where steps were done again: until the attempt was where an earlier one, or it itself, had been before.

    Where no event says when that was, as of a program, it is estimated by the seconds per step.
    """
    found: list[Stretch] = []
    caught_up, backs = _times(events, Event.CAUGHT_UP), _times(events, Event.ROLLED_BACK)
    if first is not None and first < furthest:
        at = next((moment for moment in caught_up if not backs or moment <= backs[0]), None)
        if at is None and not backs and last is not None and last > furthest:
            pace = _pace(stepping, left, first, last)
            at = stepping + (furthest - first) * pace if pace is not None else None
        if at is None:  # it did not get there
            at = backs[0] if backs else left
        found.append((stepping, min(left, max(stepping, at)), Cause.REDONE, ""))
    for index, back in enumerate(backs):
        until = backs[index + 1] if index + 1 < len(backs) else left
        at = next((moment for moment in caught_up if back <= moment <= until), until)
        found.append((min(left, max(stepping, back)), min(left, max(stepping, at)), Cause.REDONE, ROLLED_BACK))
    return found


def _lost(record: Attempt, events: Events, stepping: float, left: float) -> list[Stretch]:
    """Return the time of the steps after the last checkpoint of a run that has ended with this attempt."""
    committed = record.committed_step or 0
    if record.last_step is None or record.last_step <= max(committed, record.seen_step or 0):
        return []
    begun = [
        float(event["time"]) - (records.finite(event.get("seconds")) or 0.0)
        for event in events.get(Event.CHECKPOINT, ())
        if _step(event) == committed
    ]
    return [(min(left, max(stepping, begun[-1])) if begun else stepping, left, Cause.LOST, "")]


def overlay(base: list[Stretch], layer: Iterable[Stretch], *, only: Cause | None = None) -> list[Stretch]:
    """Return `base` with the stretches of `layer` painted over it, or only over one cause of it."""
    over: list[Stretch] = []
    reached = -math.inf
    for each in sorted(layer):
        start, end, cause, because = each
        if start < reached:
            start = reached
            each = (start, end, cause, because)
        if end > start:
            over.append(each)
            reached = end
    if not over:
        return base
    found: list[Stretch] = []
    place, count = 0, len(over)
    for start, end, cause, because in base:
        while place < count and over[place][1] <= start:
            place += 1
        at = start
        if only is None or cause is only:
            for index in range(place, count):  # of thousands: each step counts
                begin, until, painted, why = over[index]
                if begin >= end:
                    break
                begin, until = max(at, begin), min(end, until)
                if begin > at:
                    found.append((at, begin, cause, because))
                if until > begin:
                    found.append((begin, until, painted, why))
                    at = until
        if at < end:
            found.append((at, end, cause, because))
    return found
