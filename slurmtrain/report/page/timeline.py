"""The timeline of a run: each attempt a row along the clock, what its time went into, and what happened in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmtrain.report.goodput.causes import Cause, Segment
from slurmtrain.report.page import units
from slurmtrain.report.page.charts import Bar, Mark, Row, Timeline, clock_marks
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.sentences import CAUSES
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.system import records

MOST_ROWS = 60
MARKS_OF_A_ROW = 100  # of one shape: more of them are not told apart, and a run may have ten thousand checkpoints
MOST_BARS = 400  # of a row
WAITS = (Cause.QUEUE, Cause.STOPPED)
# The symbols, with their words; the template draws them.
SHAPES = {
    "checkpoint": "checkpoint committed",
    "told": "told to stop",
    "preempted": "preempted",
    "hang": "hang",
    "failed": "crash or failure",
    "in_place": "restart in place",
    "finished": "finished",
    "stopped": "other end",
    "trouble": "update skipped, spike or rollback",
}
_ENDINGS = {
    Reason.FINISHED: "finished",
    Reason.PREEMPTED: "preempted",
    Reason.HANG: "hang",
    **dict.fromkeys((Reason.CRASH, Reason.NODE_FAILURE, Reason.BAD_NODE, Reason.CONFIG, Reason.DIVERGED), "failed"),
}
_TROUBLES = {
    Event.UPDATE_SKIPPED: "the update of step {step} was skipped",
    Event.LOSS_SPIKE: "the loss jumped in step {step}",
    Event.ROLLED_BACK: "went back to step {step}",
    Event.CHECKPOINT_FAILED: "a checkpoint failed",
}


def timeline_of(facts: RunFacts) -> Timeline | None:
    """Return the timeline of a run; None if it has neither attempts nor waits."""
    segments = facts.goodput.segments if facts.goodput is not None else ()
    segments = segments or plain_segments(facts.attempts, facts.info.get("created"), facts.now)
    if not segments:
        return None
    begin, end = min(each.start for each in segments), max(each.end for each in segments)
    length = max(end - begin, 1e-3)
    by_row = by_attempt(segments, [each.number for each in facts.attempts])
    tries = {each.number: each for each in facts.attempts}
    events: dict[int, list[Mapping[str, Any]]] = {}
    for event in facts.events:
        number = event.get("attempt")
        if isinstance(number, int):
            events.setdefault(number, []).append(event)
    numbers = sorted(by_row)
    shown = numbers[-MOST_ROWS:]

    def place(moment: float) -> float:
        return round(100 * min(1.0, max(0.0, (moment - begin) / length)), 3)

    rows, links = [], []
    for index, number in enumerate(shown):
        attempt = tries.get(number)
        marks = [*_marks(events.get(number, ()), place), *(_ending(attempt, place) if attempt is not None else ())]
        rows.append(
            Row(_row_name(number, attempt), _bars(by_row[number], place), tuple(marks), _end_words(attempt), number)
        )
        if attempt is not None and attempt.verdict == Verdict.IN_PLACE and attempt.ended and index + 1 < len(shown):
            links.append((index, place(attempt.ended)))
    shapes = {mark.shape for row in rows for mark in row.marks}
    colors = {bar.color for row in rows for bar in row.bars}
    return Timeline(
        tuple(rows),
        clock_marks(length),
        tuple(links),
        tuple((shape, words) for shape, words in SHAPES.items() if shape in shapes),
        tuple((cause.value, words) for cause, words in CAUSES.items() if cause.value in colors),
        len(numbers) - len(shown),
        units.moment(begin),
        units.moment(end),
        ". ".join(f"{row.name}: {row.ending}" for row in rows[-20:] if row.ending),
    )


def plain_segments(tries: Sequence[Attempt], created: float | None, now: float) -> tuple[Segment, ...]:
    """Return waits and attempts as far as the records of the attempts tell, where nothing more is known."""
    found, since, before = [], created, 0
    for attempt in tries:
        if not attempt.started:
            continue
        if since is not None and attempt.started > since:
            found.append(Segment(before, since, attempt.started, Cause.QUEUE))
        end = max(attempt.ended or now, attempt.started)
        stepping = attempt.stepping if attempt.stepping and attempt.started <= attempt.stepping <= end else None
        if stepping is not None:
            found.append(Segment(attempt.number, attempt.started, stepping, Cause.STARTUP))
        found.append(Segment(attempt.number, stepping or attempt.started, end, Cause.UNKNOWN))
        since, before = end, attempt.number
    return tuple(found)


def by_attempt(segments: Iterable[Segment], numbers: Sequence[int]) -> dict[int, list[Segment]]:
    """Return the segments of each row: a wait stands in the row of the attempt that it led to, 0 if there is none yet."""
    following = dict(zip([0, *numbers], [*numbers, 0], strict=True))
    rows: dict[int, list[Segment]] = {number: [] for number in numbers}
    for each in segments:
        waits = each.cause in WAITS or each.attempt == 0
        number = following.get(each.attempt, 0) if waits else each.attempt
        if number == 0:
            number = max(numbers, default=0) + 1
        rows.setdefault(number, []).append(each)
    return rows


def _bars(segments: Sequence[Segment], place: Any) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    for each in segments:
        left, right = place(each.start), place(each.end)
        if bars and len(segments) > MOST_BARS and right - left < 0.05:  # too thin to be seen among so many
            continue
        words = f"{CAUSES[each.cause]}, {units.duration(each.seconds)}, from {units.moment(each.start)}"
        bars.append(Bar(CAUSES[each.cause], each.cause.value, left, round(right - left, 3), words))
    return tuple(bars[:MOST_BARS])


def _marks(events: Iterable[Mapping[str, Any]], place: Any) -> list[Mark]:
    found: dict[str, dict[float, Mark]] = {}
    for event in events:
        name, step = event["event"], event.get("step")
        words = f"{step:,}" if isinstance(step, int) and records.is_count(step) else "?"
        if name == Event.CHECKPOINT:
            shape, title = "checkpoint", f"checkpoint of step {words}"
        elif name in _TROUBLES:
            shape, title = "trouble", _TROUBLES[Event(name)].format(step=words)
        else:
            continue
        at = place(event["time"])
        # One mark stands for all that are too close to be told apart.
        found.setdefault(shape, {}).setdefault(
            round(at * MARKS_OF_A_ROW / 100), Mark(shape, at, f"{title}, {units.moment(event['time'])}")
        )
    return [mark for by_place in found.values() for mark in by_place.values()]


def _ending(attempt: Attempt, place: Any) -> Iterable[Mark]:
    if attempt.cause_time and attempt.ended and attempt.cause_time < attempt.ended:
        yield Mark("told", place(attempt.cause_time), f"told to stop, {units.moment(attempt.cause_time)}")
    if attempt.ended is None or attempt.reason is None:
        return
    at, words = place(attempt.ended), _end_words(attempt)
    yield Mark(
        _ENDINGS.get(Reason(attempt.reason), "stopped") if attempt.reason in set(Reason) else "stopped", at, words
    )
    if attempt.verdict == Verdict.IN_PLACE:
        yield Mark("in_place", at, f"its ranks started again in the same job, {units.moment(attempt.ended)}")


def _end_words(attempt: Attempt | None) -> str:
    if attempt is None:
        return "waits"
    if attempt.ended is None:
        return "has not ended, according to its record"
    reason = units.clean(attempt.reason or "ended for an unknown reason", 40)
    return f"{reason}, {units.moment(attempt.ended)}"


def _row_name(number: int, attempt: Attempt | None) -> str:
    return f"Attempt {number}" if attempt is not None else "Next"
