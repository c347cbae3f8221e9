"""The page of a sweep: its points as a table, parallel coordinates, and all curves together."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.observe.metrics import is_detail
from slurmtrain.report.collect import Goal, Point, Table, metrics_of
from slurmtrain.report.goodput.causes import Goodput, over_all
from slurmtrain.report.goodput.run import goodput_of
from slurmtrain.report.page import figures, sentences, units
from slurmtrain.report.page.contents import Chart, Grid, Page, Section
from slurmtrain.report.page.figures import Curve, Steps, color_of
from slurmtrain.report.page.series import LARGEST, Series, series_of
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.report.table_files import short
from slurmtrain.runs.run_dir import RunDir

MOST_CURVES = 40  # of one chart; more are not told apart
MOST_THREADS = 400  # lines of parallel coordinates
MOST_AXES = 8
MOST_MARKS = 8  # of an axis of parallel coordinates
MOST_POINTS = 2000  # rows of the table


@dataclass(frozen=True)
class Result:
    """A point and the best value of the goal that it reached."""

    point: Point
    value: float


@dataclass(frozen=True)
class SweepFacts:
    """The records of a sweep.

    Attributes:
        info: sweep.json.
        points: all points.
        states: state of each point, by its number.
        table: their metrics, as `sweep collect` shows them.
        now: unix seconds at which all this was read.
    """

    name: str
    info: Mapping[str, Any]
    points: tuple[Point, ...]
    states: Mapping[int, RunState]
    table: Table
    now: float

    @property
    def goal(self) -> Goal:
        """What the points are compared by; asked for only where there are results."""
        assert self.table.goal is not None
        return self.table.goal

    @functools.cached_property
    def results(self) -> list[Result]:
        """The points that have a result, the best first."""
        if self.table.goal is None:
            return []
        cells = zip(self.points, self.table.column(self.goal.column), strict=True)
        found = [Result(point, value) for point, cell in cells if (value := _number(cell)) is not None]
        return sorted(found, key=lambda each: each.value, reverse=self.goal.mode == "max")

    @functools.cached_property
    def counts(self) -> Counter[str]:
        """The number of points in each state."""
        return Counter(units.clean(state.status, 30) for state in self.states.values())

    @functools.cached_property
    def time(self) -> Goodput:
        """The sum over all runs, each once: points with the same config share one."""
        runs: dict[str, tuple[RunDir, bool | None]] = {}
        for point in self.points:
            if point.run_dir is not None:
                state = self.states.get(point.number)
                runs[point.run_dir.id] = point.run_dir, state.alive if state is not None else None
        found = []
        for run_dir, alive in runs.values():
            with contextlib.suppress(UnreadableRecordError):
                found.append(goodput_of(run_dir, alive=alive, now=self.now))
        return over_all(found)

    def color(self, number: int) -> int:
        """Return the colour of a point: the best ones have their own, all others the last."""
        place = next((place for place, each in enumerate(self.results) if each.point.number == number), figures.COLORS)
        return min(place, figures.COLORS - 1)


def varied_words(point: Point) -> str:
    """Return what distinguishes a point: "optim.lr=0.001, train.seed=2"."""
    found = [f"{units.clean(key, 60)}={units.clean(value, 60)}" for key, value in point.varied.items()]
    return ", ".join(found[:6]) or "nothing varies"


def sweep_page(facts: SweepFacts) -> Page:
    """Return the page of a sweep."""
    counts = facts.counts
    state = next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {word}" for word, n in counts.most_common())
    alive = any(each.alive for each in facts.states.values())
    bad = any(each.status in (RunStatus.FAILED, RunStatus.LOST) for each in facts.states.values())
    mood = "busy" if alive else "bad" if bad else "good" if set(counts) == {RunStatus.FINISHED} else "still"
    return Page(
        f"Sweep {units.clean(facts.name, 100)}",
        facts.name,
        units.clean(state or "no points yet", 80),
        mood,
        [*filter(None, (_what_it_is(facts), _how_far(facts), _what_it_took(facts.time)))],
        _advice(facts),
        [_table(facts), _coordinates(facts), _curves(facts)],
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
    best, goal = facts.results[0], facts.goal
    where = "lowest" if goal.mode == "min" else "highest"
    value = units.number(best.value, units.unit_of(goal.metric))
    whose = f"point {best.point.number} ({varied_words(best.point)})"
    return f"{begin} The {where} {units.name_of(goal.metric)} is {value}, reached by {whose}."


def _what_it_took(time: Goodput) -> str:
    if not time.held_s > 0:
        return ""
    gpus = f" ({units.hours(3600 * time.gpu_hours)} GPU hours)" if time.gpu_hours > 0 else ""
    share = f", of which {units.percent(time.share)} were productive" if time.share is not None else ""
    count = sum(time.interruptions.values())
    ends = f" {units.plural(count, 'attempt')} {'was' if count == 1 else 'were'} interrupted." if count else ""
    return f"Its points held nodes for {units.duration(time.held_s)} in all{gpus}{share}.{ends}"


def _advice(facts: SweepFacts) -> list[str]:
    found = []
    again = (RunStatus.FAILED, RunStatus.LOST, RunStatus.STOPPED)
    failed = [number for number, state in facts.states.items() if state.status in again]
    if failed:
        numbers = units.listed(map(str, failed), 12)
        found.append(
            f"Point{'' if len(failed) == 1 else 's'} {numbers} did not finish: `sweep retry {units.clean(facts.name, 100)}` "
            "submits the failed points again."
        )
    doubts = dict.fromkeys(units.clean(state.slurm_error) for state in facts.states.values() if state.slurm_error)
    found += [f"SLURM could not be asked: {doubt}" for doubt in doubts]
    if facts.results:
        found += [_at_the_edge(facts, key) for key in facts.table.varied]
    return [each for each in found if each] or ["Nothing needs to be done."]


def _at_the_edge(facts: SweepFacts, key: str) -> str:
    """Say that the best value of a key of numbers is the least or the greatest that was tried."""
    values = [number for point in facts.points if (number := _number(point.varied.get(key))) is not None]
    mine = _number(facts.results[0].point.varied.get(key))
    if mine is None or len(values) != len(facts.points) or len(set(values)) < 3 or min(values) < mine < max(values):
        return ""
    edge, further = ("smallest", "smaller") if mine == min(values) else ("largest", "larger")
    return (
        f"The best point has the {edge} {units.clean(key, 80)} that was tried ({units.number(mine)}): "
        f"{further} values may be better still."
    )


def _number(value: object) -> float | None:
    """Return the number that a value is, also as text; None if it is none, or too large to be drawn."""
    if isinstance(value, bool):
        return None
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if abs(found) < LARGEST else None


def _table(facts: SweepFacts) -> Section:
    """Return the table of the points, with what there is to say of those that have not finished at once."""
    if not facts.points:
        return Section("points", "Points", missing="The sweep has no points yet.")
    kept = [place for place, name in enumerate(facts.table.columns) if not is_detail(name)]
    rows = []
    for point, row in zip(facts.points[:MOST_POINTS], facts.table.rows, strict=False):
        state = facts.states.get(point.number)
        tries = len(state.attempts) if state is not None else 0
        smooth = state is None or (state.status == RunStatus.FINISHED and tries <= 1)
        details = "" if state is None or smooth else units.clean(state.explanation)
        rows.append([*(units.clean(short(row[place]), 120) for place in kept), str(tries), details])
    best = facts.results[0].point if facts.results else None
    about = "The best point is marked." if best is not None else ""
    if len(facts.points) > MOST_POINTS:
        all_points = f"{MOST_POINTS:,} of {len(facts.points):,}"
        about += f" The first {all_points} points are shown; `sweep collect` lists all of them."
    header = [*(units.clean(facts.table.columns[place], 80) for place in kept), "attempts", "details"]
    marked = facts.points.index(best) if best is not None else None
    return Section(
        "points", "Points", about.strip(), grids=[Grid("All points", header, rows, sortable=True, marked=marked)]
    )


def _coordinates(facts: SweepFacts) -> Section:
    title, varied = "What the result depends on", facts.table.varied
    good = facts.results[:MOST_THREADS]
    if not good:
        return Section("coordinates", title, missing="No point has a result yet.")
    if not varied:
        return Section("coordinates", title, missing="No config field differs between the points.")
    about = f"The first {MOST_AXES} of {len(varied)} varied fields are drawn." if len(varied) > MOST_AXES else ""
    return Section("coordinates", title, about, [_parallel(facts, good, varied[:MOST_AXES])])


def _places(values: Sequence[Any]) -> dict[str, tuple[float, str]]:
    """Return, by value as text, its place 0 to 1 along an axis, from the bottom up, and what the axis calls it.

    Numbers lie where they are, on a logarithmic axis where they span decades; others evenly apart.
    """
    numbers = {str(value): number for value in values if (number := _number(value)) is not None}
    names = list(dict.fromkeys(map(str, values)))
    if len(numbers) < len(names):
        return {name: (place / max(1, len(names) - 1), units.clean(name, 16)) for place, name in enumerate(names)}
    low, high = min(numbers.values()), max(numbers.values())
    scale = math.log if low > 0 and high / low >= 10 else float
    room = scale(high) - scale(low)
    return {
        name: ((scale(each) - scale(low)) / room if room else 0.5, units.brief(each)) for name, each in numbers.items()
    }


def _parallel(facts: SweepFacts, good: Sequence[Result], keys: Sequence[str]) -> Chart:
    """Return parallel coordinates: each point is a line over the varied keys to its result, the best at the top."""
    goal, data = facts.goal, list[dict[str, Any]]()
    columns = [[str(result.point.varied.get(key, "-")) for result in good] for key in keys]
    columns.append([str(result.value) for result in good])
    axes = [_places(column) for column in columns]
    if goal.mode == "min":
        axes[-1] = {value: (1 - place, text) for value, (place, text) in axes[-1].items()}
    for place, result in reversed(list(enumerate(good))):  # the best is drawn last, on top of the others
        color, best = color_of(facts.color(result.point.number)), place == 0
        reached = f"{units.name_of(goal.metric)} {units.number(result.value)}"
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": figures.plain(f"point {result.point.number}: {varied_words(result.point)}; {reached}"),
                "x": [*range(len(axes))],
                "y": [round(axis[column[place]][0], 4) for axis, column in zip(axes, columns, strict=True)],
                "line": {"color": color, "width": 4 if best else 1.5},
                "marker": {"color": color, "size": 7},
                "opacity": 1 if best else 0.6,
                "hoverinfo": "name",
            }
        )
    marks = [(number, *mark) for number, axis in enumerate(axes) for mark in _marks(axis.values())]
    data.append(
        {
            "type": "scatter",
            "mode": "text",
            "x": [number for number, _, _ in marks],
            "y": [place for _, place, _ in marks],
            "text": [f"\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}{figures.plain(text)}" for _, _, text in marks],
            "hoverinfo": "skip",
            "textposition": "top right",
            "textfont": {"color": "--text"},
            "cliponaxis": False,
        }
    )
    names = [figures.plain(name) for name in (*(units.clean(key, 40) for key in keys), units.name_of(goal.metric))]
    xaxis = {"tickvals": [*range(len(axes))], "ticktext": names, "range": [-0.15, len(keys) + 0.3]}
    yaxis = {"visible": False, "range": [-0.06, 1.06]}
    figure = {"data": data, "layout": figures.layout(340, xaxis=xaxis, yaxis=yaxis, hovermode="closest")}
    left = len(facts.points) - len(good)
    note = (
        f"{units.plural(left, 'point')} not drawn: without a result, or beyond the {MOST_THREADS} best." if left else ""
    )
    title = "Parallel coordinates: each line is a point, the best at the top"
    return Chart("parallel", title, figure, note=note, wide=True)


def _marks(places: Iterable[tuple[float, str]]) -> Iterable[tuple[float, str]]:
    """Yield at most `MOST_MARKS` marks of an axis, from the top down, that have room beside each other."""
    last = math.inf
    for place, text in sorted(places, reverse=True):
        if last - place >= 1 / MOST_MARKS:
            last = place
            yield place, text


def _curves(facts: SweepFacts) -> Section:
    """Return the curves of the goal and of the loss, those of the best points, whose order is that of their results."""
    title = "Curves of all points"
    names = list(dict.fromkeys([*([facts.goal.metric] if facts.table.goal is not None else []), "loss"]))
    ranked = {each.number: each for each in (*(result.point for result in facts.results), *facts.points)}
    chosen = [point for point in ranked.values() if point.run_dir is not None]
    logs = [(point, _log(point, names)) for point in chosen[:MOST_CURVES]]
    steps = Steps.of([series for _, log in logs for series in log.values()])
    drawn = []
    for number, name in enumerate(names):
        curves = [
            Curve(
                log[name],
                f"point {point.number}: {varied_words(point)}",
                facts.color(point.number),
                thin=place >= figures.COLORS,
            )
            for place, (point, log) in enumerate(logs)
            if name in log
        ]
        words = units.capital(units.name_of(name))
        drawn.append(figures.line_chart(f"sweep-{number}", words, curves, steps, unit=units.unit_of(name)))
    found = [chart for chart in drawn if chart is not None]
    if not found:
        return Section("curves", title, missing="No point has logged anything yet.")
    left = f" Only the {MOST_CURVES} best points are drawn." if len(chosen) > MOST_CURVES else ""
    return Section("curves", title, f"The legend lists the best points first.{left}", found)


def _log(point: Point, names: Sequence[str]) -> dict[str, Series]:
    assert point.run_dir is not None
    try:
        logged = metrics_of(point.run_dir)
    except UnreadableRecordError:  # its state says so
        return {}
    return series_of({name: record[name] for name in ("step", *names) if name in record} for record in logged)[0]
