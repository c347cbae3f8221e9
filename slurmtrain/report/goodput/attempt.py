"""What the time of one attempt went into."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from slurmtrain.choices import JobKind
from slurmtrain.report.goodput.causes import Cause
from slurmtrain.report.goodput.history import AttemptTimes
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.system import records

ROLLED_BACK = "rolled back"  # why steps are done again in the same attempt

Stretch = tuple[float, float, Cause, str]  # start, end, cause, because
Layer = tuple[Sequence[Stretch], Cause | None]  # painted over those before it; with a cause, only over that one
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
        layers = _training(record, kind, events, begin, stepping, end, furthest, over=over)
    elif kind is not None and kind != JobKind.COMMAND:
        layers = [([(begin, end, Cause.STARTUP, "")], None)]
    else:
        layers = _program(record, events, begin, end)
    for moment, cause in ((each.failed, Cause.IDLE_END), (each.hung_since, Cause.HUNG)):
        if moment is not None:
            layers.append(([(moment, end, cause, "")], None))
    return painted(layers, begin, end)


def painted(layers: Iterable[Layer], begin: float, end: float) -> list[Stretch]:
    """Return what is seen from above of layers that lie upon each other, between `begin` and `end`.

    Where stretches of a layer overlap, the one that begins first is seen.
    """
    cut = [
        ([(min(end, max(begin, each[0])), min(end, max(begin, each[1])), *each[2:]) for each in stretches], only)
        for stretches, only in layers
    ]
    bounds = sorted({moment for stretches, _ in cut for each in stretches for moment in each[:2]})
    seen: list[tuple[Cause, str] | None] = [None] * max(0, len(bounds) - 1)
    for stretches, only in cut:
        reached = begin
        for start, stop, cause, because in sorted(stretches):
            for place in range(bisect_left(bounds, max(start, reached)), bisect_left(bounds, stop)):
                below = seen[place]
                if only is None or (below is not None and below[0] is only):
                    seen[place] = cause, because
            reached = max(reached, stop)
    return [
        (start, stop, *each) for (start, stop), each in zip(pairwise(bounds), seen, strict=True) if each is not None
    ]


def _program(record: Attempt, events: Events, begin: float, end: float) -> list[Layer]:
    """Return the time of a program of the user's own, which never said that it trains.

    Only the time between its first and its last report of progress is known to be productive.
    """
    started = min(end, max(begin, record.started)) if record.started else end
    reports = events.get(Event.FIRST_REPORT, ())
    if not reports:
        return [([(begin, started, Cause.STARTUP, ""), (started, end, Cause.UNKNOWN, "")], None)]
    first = min(end, max(started, float(reports[0]["time"])))
    last = min(end, max([first, *(moment for moment in (record.last_logged, record.marked) if moment is not None)]))
    layers: list[Layer] = [
        (
            [
                (begin, started, Cause.STARTUP, ""),
                (started, first, Cause.UNKNOWN, ""),
                (first, last, Cause.PRODUCTIVE, ""),
                (last, end, Cause.UNKNOWN, ""),
            ],
            None,
        )
    ]
    step = _step(reports[0])
    if step is not None and step < (record.reported_before or 0):
        again = _times(events, Event.CAUGHT_UP)
        layers.append(([(first, again[-1] if again else last, Cause.REDONE, "")], Cause.PRODUCTIVE))
    return layers


def _training(
    record: Attempt,
    kind: str | None,
    events: Events,
    begin: float,
    stepping: float,
    end: float,
    furthest: int,
    *,
    over: bool,
) -> list[Layer]:
    """Return the time of an attempt that began to train, or to evaluate, at `stepping`."""
    endings = [*events.get(Event.TRAINING_STOPPED, ()), *events.get(Event.TRAINING_FINISHED, ())]
    leaving = endings[-1] if endings else None
    left = end if leaving is None else min(end, max(stepping, float(leaving["time"])))
    base = Cause.EVALUATION if kind == JobKind.EVALUATE else Cause.PRODUCTIVE
    whole: list[Stretch] = [
        (begin, stepping, Cause.STARTUP, ""),
        (stepping, left, base, ""),
        (left, end, Cause.IDLE_END, ""),
    ]
    first, last = record.first_step, record.last_step
    layers: list[Layer] = [
        (whole, None),
        (_first_step(events, stepping, left, first, last), None),
        (_redone(events, stepping, left, first, last, furthest), None),
    ]
    if over and Event.TRAINING_STARTED in events:
        layers.append((_lost(record, events, stepping, left), Cause.PRODUCTIVE))
    saves: list[Stretch] = []
    last_save = _step(leaving) if leaving is not None else None
    for event in events.get(Event.CHECKPOINT, ()):
        seconds, stall = records.finite(event.get("seconds")), records.finite(event.get("stall_s"))
        if last_save is not None and event.get("step") == last_save:
            stall = seconds  # nothing else is done meanwhile
        if seconds is not None and stall is not None and stall > 0:
            start = event["time"] - seconds
            saves.append((max(start, stepping), start + stall, Cause.CHECKPOINT, ""))
    evaluations: list[Stretch] = []
    for event in events.get(Event.EVALUATED, ()):
        at = float(event["time"])
        start = max(stepping, at - (records.finite(event.get("seconds")) or 0.0))
        evaluations.append((start, max(stepping, at), Cause.EVALUATION, ""))
    return [*layers, (saves, None), (evaluations, None)]


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
