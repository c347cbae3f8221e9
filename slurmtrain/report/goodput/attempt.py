"""What the time of one attempt went into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmtrain.choices import JobKind
from slurmtrain.report.goodput.causes import Cause
from slurmtrain.report.goodput.history import AttemptTimes
from slurmtrain.report.goodput.stretches import Events, Stretch, overlay, times_of
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.system import records

ROLLED_BACK = "rolled back"  # why steps are done again in the same attempt
_LEAVING = (Event.TRAINING_FINISHED, Event.TRAINING_STOPPED)


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

    def within(moment: float | None, default: float) -> float:
        return default if moment is None else min(end, max(begin, moment))

    stepping = record.stepping if record.stepping is not None and record.stepping > 0 else None
    if stepping is None:
        found = _inside_of_program(record, kind, events, begin, end, within)
    else:
        found = _inside_of_training(each, kind, events, within(stepping, end), begin, end, furthest, over=over)
    standing: list[Stretch] = []
    if each.failed is not None:
        standing.append((within(each.failed, end), end, Cause.IDLE_END, ""))
    found = overlay(found, standing)
    if each.hung_since is not None:
        found = overlay(found, [(within(each.hung_since, end), end, Cause.HUNG, "")])
    return found


def _inside_of_program(
    record: Attempt,
    kind: str | None,
    events: Events,
    begin: float,
    end: float,
    within: Any,
) -> list[Stretch]:
    """Return the time of an attempt that never said that it trains: it was starting, or is a program of the user's own.

    Of such a program only the time between its first and its last report of progress is known to be productive.
    """
    if kind is not None and kind != JobKind.COMMAND:
        return [(begin, end, Cause.STARTUP, "")]
    started = within(record.started or None, end)
    reports = times_of(events, Event.FIRST_REPORT)
    marks = [moment for moment in (record.last_logged, record.marked) if moment is not None]
    first = within(reports[0], end) if reports else end
    last = max([first, *(within(mark, end) for mark in marks)]) if reports else end
    found: list[Stretch] = [
        (begin, started, Cause.STARTUP, ""),
        (started, max(started, first), Cause.UNKNOWN, ""),
        (max(started, first), max(started, last), Cause.PRODUCTIVE, ""),
        (max(started, last), end, Cause.UNKNOWN, ""),
    ]
    again = times_of(events, Event.CAUGHT_UP)
    step = next((_step(event) for event in events.get(Event.FIRST_REPORT, ())), None)
    if step is not None and step < (record.reported_before or 0):
        until = within(again[-1], end) if again else last
        found = overlay(found, [(first, until, Cause.REDONE, "")], only=Cause.PRODUCTIVE)
    return [each for each in found if each[1] > each[0]]


def _inside_of_training(
    each: AttemptTimes,
    kind: str | None,
    events: Events,
    stepping: float,
    begin: float,
    end: float,
    furthest: int,
    *,
    over: bool,
) -> list[Stretch]:
    """Return the time of an attempt that has begun to train, or to evaluate, at `stepping`."""
    record = each.record

    def clamp(moment: float) -> float:
        return min(end, max(stepping, moment))

    leaving = next((event for name in _LEAVING for event in events.get(name, ())[-1:]), None)
    left = end if leaving is None else clamp(float(leaving["time"]))
    base = Cause.EVALUATION if kind == JobKind.EVALUATE else Cause.PRODUCTIVE
    found: list[Stretch] = [
        (begin, stepping, Cause.STARTUP, ""),
        (stepping, left, base, ""),
        (left, end, Cause.IDLE_END, ""),
    ]
    first, last = record.first_step, record.last_step
    found = overlay(found, _first_step(events, stepping, left, first, last))
    found = overlay(found, _redone(events, stepping, left, first, last, furthest))
    if over and Event.TRAINING_STARTED in events:
        found = overlay(found, _lost(record, events, stepping, left), only=Cause.PRODUCTIVE)
    last_save = _step(leaving) if leaving is not None else None
    saves: list[Stretch] = []
    finite = records.finite
    for event in events.get(Event.CHECKPOINT, ()):
        seconds, stall = finite(event.get("seconds")), finite(event.get("stall_s"))
        if last_save is not None and event.get("step") == last_save:
            stall = seconds  # nothing else is done meanwhile
        if seconds is not None and stall is not None and stall > 0:
            start = event["time"] - seconds
            until = start + stall
            start, until = max(start, stepping), min(until, end)  # as `clamp`, for thousands of them
            if start < until:
                saves.append((start, until, Cause.CHECKPOINT, ""))
    evaluations: list[Stretch] = []
    for event in events.get(Event.EVALUATED, ()):
        seconds, at = records.finite(event.get("seconds")) or 0.0, float(event["time"])
        evaluations.append((clamp(at - seconds), clamp(at), Cause.EVALUATION, ""))
    return overlay(overlay(found, saves), evaluations)


def _step(event: Mapping[str, Any]) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and records.is_count(step) else None


def _pace(begin: float, end: float, first: int | None, last: int | None) -> float | None:
    """Return seconds per step, pauses included; None if it is not known how many steps were done."""
    return (end - begin) / (last - first) if first is not None and last is not None and last > first else None


def _first_step(events: Events, stepping: float, left: float, first: int | None, last: int | None) -> list[Stretch]:
    """Return what the first step took longer than the others: it compiles, and tunes kernels."""
    done = next(iter(times_of(events, Event.FIRST_STEP)), None)
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
    caught_up, backs = times_of(events, Event.CAUGHT_UP), times_of(events, Event.ROLLED_BACK)
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
