"""The timeline of a run: each attempt a row along the clock, what its time went into, and what happened in it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmtrain.report.goodput.causes import Cause, Segment
from slurmtrain.report.page import figures, units
from slurmtrain.report.page.contents import Chart
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.sentences import CAUSES
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.system import records

MOST_ROWS = 60
PLACES = 100  # of a row, of which each has at most one mark of a kind: a run may have ten thousand checkpoints
MOST_BARS = 400  # of a row
WAITS = (Cause.QUEUE, Cause.STOPPED)
# What happened: plotly's symbol, the same as a letter, and words.
SYMBOLS = {
    "checkpoint": ("triangle-up", "▲", "checkpoint committed"),
    "told": ("line-ns", "|", "told to stop"),
    "preempted": ("diamond", "◆", "preempted"),
    "hang": ("circle", "●", "hang"),
    "failed": ("x", "✖", "crash or failure"),
    "in_place": ("triangle-down", "▼", "restart in place"),
    "finished": ("star", "★", "finished"),
    "stopped": ("square", "■", "other end"),
    "trouble": ("cross", "✚", "update skipped, spike or rollback"),
}
_ENDINGS = {
    Reason.FINISHED: "finished",
    Reason.PREEMPTED: "preempted",
    Reason.HANG: "hang",
    **dict.fromkeys((Reason.CRASH, Reason.NODE_FAILURE, Reason.BAD_NODE, Reason.CONFIG, Reason.DIVERGED), "failed"),
}
_EVENTS = {
    Event.CHECKPOINT: ("checkpoint", "checkpoint of step {step}"),
    Event.UPDATE_SKIPPED: ("trouble", "the update of step {step} was skipped"),
    Event.LOSS_SPIKE: ("trouble", "the loss jumped in step {step}"),
    Event.ROLLED_BACK: ("trouble", "went back to step {step}"),
    Event.CHECKPOINT_FAILED: ("trouble", "a checkpoint failed"),
}

Mark = tuple[str, float, str]  # a key of SYMBOLS, unix seconds, words


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
    rows = {number: f"Attempt {number}" if number in tries else "Next" for number in shown}

    of_cause: dict[Cause, list[tuple[str, Segment]]] = {}
    for number in shown:
        found = by_row[number]
        if len(found) > MOST_BARS:  # those that are too thin to be seen among so many
            found = [each for each in found if each.seconds > length / 2000][:MOST_BARS]
        for segment in found:
            of_cause.setdefault(segment.cause, []).append((rows[number], segment))
    of_kind: dict[str, list[tuple[str, float, str]]] = {}
    for number in shown:
        if number in tries:
            for kind, moment, words in _thinned(_marks(tries[number], facts.events), length):
                of_kind.setdefault(kind, []).append((rows[number], min(max(moment, begin), end), words))

    data, legend = [], []
    for cause, words in CAUSES.items():
        if cause in of_cause:
            data.append(_bars(words, cause, of_cause[cause]))
            legend.append((f"--{cause}", words))
    for kind, (symbol, letter, words) in SYMBOLS.items():
        if kind in of_kind:
            places, moments, said = zip(*of_kind[kind], strict=True)
            times = [clock(each) for each in moments]
            data.append(figures.points(times, places, said, color="--text", symbol=symbol, size=9, name=words))
            legend.append(("", f"{letter} {words}"))
    ends = {"autorange": "reversed", "fixedrange": True, "categoryarray": list(rows.values())}
    figure = {
        "data": data,
        "layout": figures.layout(
            70 + 34 * len(shown), xaxis={"type": "date"}, yaxis=ends, barmode="overlay", bargap=0.5
        ),
    }
    summary = ". ".join(f"{rows[number]}: {_end_words(tries[number])}" for number in shown[-20:] if number in tries)
    left = len(by_row) - len(shown)
    note = f"{units.plural(left, 'earlier attempt')} not drawn; the table shows all." if left else ""
    return Chart("timeline", "Timeline", figure, legend=tuple(legend), note=note, summary=summary, wide=True)


def clock(moment: float) -> str:
    """Return a time in unix seconds as the local time that an axis shows."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _by_row(segments: Iterable[Segment], numbers: Sequence[int]) -> dict[int, list[Segment]]:
    """Return the segments of each row: a wait stands in the row of the attempt that it led to, or in one of its own."""
    following = dict(zip([0, *numbers], [*numbers, 0], strict=True))
    rows: dict[int, list[Segment]] = {number: [] for number in numbers}
    for each in segments:
        waits = each.cause in WAITS or each.attempt == 0
        number = following.get(each.attempt, 0) if waits else each.attempt
        rows.setdefault(number or max(numbers, default=0) + 1, []).append(each)
    return rows


def _bars(name: str, cause: Cause, found: Sequence[tuple[str, Segment]]) -> dict[str, Any]:
    rows, segments = zip(*found, strict=True)
    return figures.bars(
        name,
        f"--{cause}",
        rows,
        [clock(each.start) for each in segments],
        [1000 * each.seconds for each in segments],
        [f"{name}, {units.duration(each.seconds)}, from {units.moment(each.start)}" for each in segments],
    )


def _thinned(marks: Iterable[Mark], length: float) -> list[Mark]:
    """Return one mark for all of a kind that are too close to be told apart."""
    kept: dict[tuple[str, int], Mark] = {}
    for mark in marks:
        kept.setdefault((mark[0], round(mark[1] / length * PLACES)), mark)
    return list(kept.values())


def _marks(attempt: Attempt, events: Iterable[Mapping[str, Any]]) -> Iterable[Mark]:
    for event in events:
        if event.get("attempt") == attempt.number and event["event"] in _EVENTS:
            kind, words = _EVENTS[Event(event["event"])]
            step = event.get("step")
            said = words.format(step=f"{step:,}" if isinstance(step, int) and records.is_count(step) else "?")
            yield kind, event["time"], f"{said}, {units.moment(event['time'])}"
    if attempt.cause_time and attempt.ended and attempt.cause_time < attempt.ended:
        yield "told", attempt.cause_time, f"told to stop, {units.moment(attempt.cause_time)}"
    if attempt.ended is None or attempt.reason is None:
        return
    kind = _ENDINGS.get(Reason(attempt.reason), "stopped") if attempt.reason in set(Reason) else "stopped"
    yield kind, attempt.ended, _end_words(attempt)
    if attempt.verdict == Verdict.IN_PLACE:
        yield "in_place", attempt.ended, f"its ranks started again in the same job, {units.moment(attempt.ended)}"


def _end_words(attempt: Attempt) -> str:
    if attempt.ended is None:
        return "has not ended, according to its record"
    return f"{units.clean(attempt.reason or 'ended for an unknown reason', 40)}, {units.moment(attempt.ended)}"
