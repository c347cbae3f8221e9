"""The page of a sweep: its points as a table, the result over each key that varies, and all curves together."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.observe.metrics import is_detail
from slurmtrain.report.causes import goodput_of
from slurmtrain.report.collect import Goal, Point, Table, metrics_of, short
from slurmtrain.report.goodput import Goodput, over_all
from slurmtrain.report.page import charts, sentences, units
from slurmtrain.report.page.charts import COLORS, Curve
from slurmtrain.report.page.render import Chart, Grid, Page, Section
from slurmtrain.report.status.state import RunStatus
from slurmtrain.system.records import is_number

MOST_CURVES = 40  # of one chart; more are not told apart
MOST_KEYS = 8
MOST_POINTS = 2000  # rows of the table


@dataclass(frozen=True)
class SweepFacts:
    """The records of a sweep.

    Attributes:
        info: sweep.json.
        points: all points.
        table: their metrics, as `sweep collect` shows them.
        now: unix seconds at which all this was read.
    """

    name: str
    info: Mapping[str, Any]
    points: tuple[Point, ...]
    table: Table
    now: float

    @property
    def goal(self) -> Goal:
        """What the points are compared by; asked for only where there are results."""
        assert self.table.goal is not None
        return self.table.goal

    @cached_property
    def results(self) -> list[tuple[Point, float]]:
        """The points that have a result, with the best value of the goal that they reached, the best first."""
        if self.table.goal is None:
            return []
        cells = zip(self.points, self.table.column(self.goal.column), strict=True)
        found = [(point, value) for point, cell in cells for value in _drawable([cell]) or ()]
        return sorted(found, key=lambda pair: pair[1], reverse=self.goal.mode == "max")

    @property
    def counts(self) -> Counter[str]:
        """The number of points in each state."""
        return Counter(str(point.state.status) for point in self.points)

    @property
    def time(self) -> Goodput:
        """The sum over all runs, each once: points with the same config share one."""
        found = []
        for run_dir, state in {each.run_dir: each.state for each in self.points if each.run_dir is not None}.items():
            with contextlib.suppress(UnreadableRecordError):
                found.append(goodput_of(run_dir, alive=state.alive, now=self.now))
        return over_all(found)


def _drawable(values: Sequence[object]) -> list[float] | None:
    """Return the values as numbers; None if one of them is none, or too large to be drawn."""
    found = [float(value) for value in values if is_number(value) and abs(value) < charts.LARGEST]
    return found if len(found) == len(values) else None


def varied_words(point: Point) -> str:
    """Return what distinguishes a point: "optim.lr=0.001, train.seed=2"."""
    found = [f"{units.clean(key, 60)}={units.clean(value, 60)}" for key, value in point.varied.items()]
    return ", ".join(found[:6]) or "nothing varies"


def sweep_page(facts: SweepFacts) -> Page:
    """Return the page of a sweep."""
    counts = facts.counts
    state = next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {word}" for word, n in counts.most_common())
    alive = any(each.state.alive for each in facts.points)
    bad = counts.keys() & {RunStatus.FAILED, RunStatus.LOST}
    mood = "busy" if alive else "bad" if bad else "good" if set(counts) == {RunStatus.FINISHED} else "still"
    return Page(
        f"Sweep {units.clean(facts.name, 100)}",
        facts.name,
        state or "no points yet",
        mood,
        [*filter(None, (_what_it_is(facts), _how_far(facts), sentences.what_was_lost(facts.time)))],
        _advice(facts) or ["Nothing needs to be done."],
        [_table(facts), _dependence(facts), _curves(facts)],
        sentences.made(facts.now),
        alive,
    )


def _what_it_is(facts: SweepFacts) -> str:
    keys = units.listed(units.clean(key, 80) for key in facts.table.varied)
    submitted = f"was submitted on {units.moment(facts.info.get('created'))}"
    over = f" over {keys}" if keys else ""
    return f"Sweep {units.clean(facts.name, 100)} {submitted}: {units.plural(len(facts.points), 'point')}{over}."


def _how_far(facts: SweepFacts) -> str:
    states = units.listed(f"{count} {word}" for word, count in facts.counts.most_common())
    begin = f"State of its points: {states}." if states else "It has no points yet."
    if not facts.results:
        return f"{begin} No point has a result yet."
    (point, best), goal = facts.results[0], facts.goal
    where = "lowest" if goal.mode == "min" else "highest"
    value = units.number(best, units.unit_of(goal.metric))
    whose = f"point {point.number} ({varied_words(point)})"
    return f"{begin} The {where} {units.name_of(goal.metric)} is {value}, reached by {whose}."


def _advice(facts: SweepFacts) -> list[str]:
    found = []
    again = (RunStatus.FAILED, RunStatus.LOST, RunStatus.STOPPED)
    if failed := [point.number for point in facts.points if point.state.status in again]:
        numbers = f"Point{'' if len(failed) == 1 else 's'} {units.listed(map(str, failed), 12)}"
        retry = f"`sweep retry {units.clean(facts.name, 100)}` submits the failed points again."
        found.append(f"{numbers} did not finish: {retry}")
    doubts = dict.fromkeys(units.clean(error) for each in facts.points if (error := each.state.slurm_error))
    found += [f"SLURM could not be asked: {doubt}" for doubt in doubts]
    for key in facts.table.varied if facts.results else ():
        values = _drawable([point.varied.get(key) for point in facts.points]) or []
        mine = facts.results[0][0].varied.get(key)
        ordered = not key.endswith("seed")  # no seed is better than the next
        if ordered and len(set(values)) > 2 and mine in (min(values), max(values)):
            edge, further = ("smallest", "smaller") if mine == min(values) else ("largest", "larger")
            best = f"The best point has the {edge} {units.clean(key, 80)} that was tried ({units.number(mine)})"
            found.append(f"{best}: {further} values may be better still.")
    return found


def _table(facts: SweepFacts) -> Section:
    """Return the table of the points, with what there is to say of those that have not finished at once."""
    if not facts.points:
        return Section("points", "Points", ["The sweep has no points yet."])
    kept = [place for place, name in enumerate(facts.table.columns) if not is_detail(name)]
    rows = []
    for point, row in zip(facts.points[:MOST_POINTS], facts.table.rows, strict=False):
        tries = len(point.state.attempts)
        smooth = point.state.status == RunStatus.FINISHED and tries <= 1
        details = "" if smooth else units.clean(point.state.explanation)
        rows.append([*(units.clean(short(row[place]), 120) for place in kept), str(tries), details])
    said = ["The best point is marked."] if facts.results else []
    if len(facts.points) > MOST_POINTS:
        all_points = f"{MOST_POINTS:,} of {len(facts.points):,}"
        said.append(f"The first {all_points} points are shown; `sweep collect` lists all of them.")
    header = [*(units.clean(facts.table.columns[place], 80) for place in kept), "attempts", "details"]
    marked = facts.points.index(facts.results[0][0]) if facts.results else None
    return Section("points", "Points", said, grids=[Grid("All points", header, rows, sortable=True, marked=marked)])


def _dependence(facts: SweepFacts) -> Section:
    """Return the section with the result over each key that varies."""
    title, varied = "What the result depends on", facts.table.varied
    if not facts.results or not varied:
        why = "No point has a result yet." if varied else "No config field differs between the points."
        return Section("dependence", title, [why])
    said = [f"The first {MOST_KEYS} of {len(varied)} varied fields are drawn."] if len(varied) > MOST_KEYS else []
    drawn = [_over_key(facts, key, f"key-{place}") for place, key in enumerate(varied[:MOST_KEYS])]
    return Section("dependence", title, said, drawn)


def _over_key(facts: SweepFacts, key: str, name: str) -> Chart:
    values = [point.varied.get(key) for point, _ in facts.results]
    numbers = _drawable(values)
    decades = numbers is not None and min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
    axis = "category" if numbers is None else "log" if decades else "linear"
    places: Sequence[object] = numbers or [charts.plain(units.clean(value, 30)) for value in values]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": places,
        "y": [float(f"{value:.6g}") for _, value in facts.results],
        "marker": {"color": "--c0", "size": [14, *[8] * (len(values) - 1)]},  # the best is the largest
        "hovertext": [charts.plain(f"point {point.number}: {varied_words(point)}") for point, _ in facts.results],
        "hoverinfo": "text+y",
    }
    words = units.name_of(facts.goal.metric)
    layout = {"height": 280, "xaxis": {"type": axis}, "yaxis": {"title": {"text": charts.plain(words)}}}
    summary = f"The best point has {units.clean(values[0], 60)}."
    return Chart(name, units.clean(key, 60), {"data": [trace], "layout": layout}, summary=summary)


def _curves(facts: SweepFacts) -> Section:
    """Return the curves of the goal and of the loss, those of the best points, whose order is that of their results."""
    title = "Curves of all points"
    names = list(dict.fromkeys([*([facts.goal.metric] if facts.table.goal is not None else []), "loss"]))
    ranked = {each.number: each for each in (*(point for point, _ in facts.results), *facts.points)}
    chosen = [(point, point.run_dir) for point in ranked.values() if point.run_dir is not None]
    logs = []
    for point, run_dir in chosen[:MOST_CURVES]:
        with contextlib.suppress(UnreadableRecordError):  # its state says so
            kept = ({name: each[name] for name in ("step", *names) if name in each} for each in metrics_of(run_dir))
            logs.append((point, charts.series_of(kept)))
    span = charts.span_of(series for _, log in logs for series in log.values())
    drawn = []
    for number, name in enumerate(names):
        curves = [
            Curve(log[name], f"point {point.number}: {varied_words(point)}", min(place, COLORS - 1), place >= COLORS)
            for place, (point, log) in enumerate(logs)
            if name in log
        ]
        words = units.capital(units.name_of(name))
        drawn.append(charts.line_chart(f"sweep-{number}", words, curves, span, unit=units.unit_of(name)))
    found = [chart for chart in drawn if chart is not None]
    if not found:
        return Section("curves", title, ["No point has logged anything yet."])
    left = f" Only the {MOST_CURVES} best points are drawn." if len(chosen) > MOST_CURVES else ""
    return Section("curves", title, [f"The legend lists the best points first.{left}"], found)
