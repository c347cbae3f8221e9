"""The timeline of a run: each attempt a row along the clock, what its time went into, and what happened in it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from slurmtrain.report.goodput.causes import Cause, Segment
from slurmtrain.report.page import figures, units
from slurmtrain.report.page.contents import Chart
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.sentences import CAUSES
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.system import records

MOST_ROWS = 60
PLACES = 100  # of a row, of which each has at most one mark of a kind: a run may have ten thousand checkpoints
MOST_BARS = 400  # of a row
WAITS = (Cause.QUEUE, Cause.STOPPED)
# What happened in an attempt: plotly's symbol, the same as a letter, and words.
SYMBOLS = {
    "checkpoint": ("triangle-up", "▲", "checkpoint committed"),
    "trouble": ("cross", "✚", "update skipped, spike or rollback"),
}
EVENTS = {
    Event.CHECKPOINT: ("checkpoint", "checkpoint of step {step}"),
    Event.UPDATE_SKIPPED: ("trouble", "the update of step {step} was skipped"),
    Event.LOSS_SPIKE: ("trouble", "the loss jumped in step {step}"),
    Event.ROLLED_BACK: ("trouble", "went back to step {step}"),
    Event.CHECKPOINT_FAILED: ("trouble", "a checkpoint failed"),
}


def timeline_of(facts: RunFacts) -> Chart | None:
    """Return the timeline of a run; None if it has neither attempts nor waits, or they are not known."""
    segments = facts.goodput.segments if facts.goodput is not None else ()
    if not segments:
        return None
    begin, end = segments[0].start, segments[-1].end
    length = max(end - begin, 1e-3)
    tries = {each.number: each for each in facts.attempts}
    by_row = _by_row(segments, list(tries))
    shown = sorted(by_row)[-MOST_ROWS:]
    rows = {number: f"{number}: {_end_of(tries[number])}" if number in tries else "next" for number in shown}
    data, legend = [], []
    for cause, words in CAUSES.items():
        found = [
            (name, each)
            for number, name in rows.items()
            for each in _visible(by_row[number], length)
            if each.cause is cause
        ]
        if found:
            data.append(
                figures.bars(
                    words,
                    f"--{cause}",
                    [name for name, _ in found],
                    [clock(each.start) for _, each in found],
                    [1000 * each.seconds for _, each in found],
                    [f"{words}, {units.duration(each.seconds)}, from {units.moment(each.start)}" for _, each in found],
                )
            )
            legend.append((f"--{cause}", words))
    marks: dict[str, dict[tuple[str, int], tuple[float, str]]] = {}  # by kind, row and place: moment and words
    for event in facts.events:
        number = event.get("attempt")
        if event["event"] in EVENTS and isinstance(number, int) and number in tries and number in rows:
            kind, words = EVENTS[Event(event["event"])]
            at, step = min(max(event["time"], begin), end), event.get("step")
            said = words.format(step=f"{step:,}" if isinstance(step, int) and records.is_count(step) else "?")
            place = rows[number], round(at / length * PLACES)
            marks.setdefault(kind, {}).setdefault(place, (at, f"{said}, {units.moment(event['time'])}"))
    for kind, (symbol, letter, words) in SYMBOLS.items():
        if kind in marks:
            data.append(_points([name for name, _ in marks[kind]], [*marks[kind].values()], symbol, words))
            legend.append(("", f"{letter} {words}"))
    yaxis = {"autorange": "reversed", "fixedrange": True, "categoryarray": list(rows.values())}
    height = 70 + 34 * len(shown)
    layout = figures.layout(height, xaxis={"type": "date"}, yaxis=yaxis, barmode="overlay", bargap=0.5)
    left = len(by_row) - len(shown)
    note = f"{units.plural(left, 'earlier attempt')} not drawn; the table shows all." if left else ""
    title = "Timeline of the attempts, and why each ended"
    summary = f"Attempts: {', '.join(list(rows.values())[-20:])}"
    return Chart("timeline", title, {"data": data, "layout": layout}, "", legend, note=note, summary=summary, wide=True)


def clock(moment: float) -> str:
    """Return a time in unix seconds as the local time that an axis shows."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _by_row(segments: Iterable[Segment], numbers: list[int]) -> dict[int, list[Segment]]:
    """Return the segments of each row: a wait stands in the row of the attempt that it led to, or in one of its own."""
    following = dict(zip([0, *numbers], [*numbers, 0], strict=True))
    rows: dict[int, list[Segment]] = {number: [] for number in numbers}
    for each in segments:
        waits = each.cause in WAITS or each.attempt == 0
        number = following.get(each.attempt, 0) if waits else each.attempt
        rows.setdefault(number or max(numbers, default=0) + 1, []).append(each)
    return rows


def _visible(segments: list[Segment], length: float) -> list[Segment]:
    """Return the segments of a row without those that are too thin to be seen, where there are many."""
    if len(segments) <= MOST_BARS:
        return segments
    return [each for each in segments if each.seconds > length / 2000][:MOST_BARS]


def _points(rows: list[str], found: list[tuple[float, str]], symbol: str, name: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [clock(at) for at, _ in found],
        "y": rows,
        "marker": {"color": "--text", "symbol": symbol, "size": 9, "line": {"color": "--text", "width": 2}},
        "hovertext": [figures.plain(words) for _, words in found],
        "hoverinfo": "text",
    }


def _end_of(attempt: Attempt) -> str:
    """Return why an attempt ended, as a word."""
    return "not ended" if attempt.ended is None else figures.plain(units.clean(attempt.reason or "not known", 24))
