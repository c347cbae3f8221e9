"""Stretches of time that lie one after the other, and the events that they are read from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmtrain.report.goodput.causes import Cause
from slurmtrain.runs.events import Event

Stretch = tuple[float, float, Cause, str]  # start, end, cause, because
Events = Mapping[str, Sequence[Mapping[str, Any]]]  # the events of an attempt, by name, oldest first


def by_attempt(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, list[Mapping[str, Any]]]]:
    """Return the events of each attempt, by its number."""
    found: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
    for event in events:
        number, name = event.get("attempt"), event["event"]
        if isinstance(number, int):
            try:
                found[number][name].append(event)
            except KeyError:
                found.setdefault(number, {})[name] = [event]
    return found


def times_of(events: Events, name: Event) -> list[float]:
    """Return when the events of this name happened, in unix seconds."""
    return [float(event["time"]) for event in events.get(name, ())]


def lengths(inside: Iterable[Stretch]) -> dict[tuple[Cause, str], float]:
    """Return the seconds of each cause, and why they were lost."""
    found: dict[tuple[Cause, str], float] = {}
    for start, end, cause, because in inside:
        key = cause, because
        found[key] = found.get(key, 0.0) + (end - start)
    return found


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
