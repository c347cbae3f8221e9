"""The page of a sweep: its points as a table, parallel coordinates, and all curves together."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.observe.metrics import is_detail
from slurmtrain.report.collect import Goal, Point, Table, metrics_of
from slurmtrain.report.goodput.causes import Goodput, over_all
from slurmtrain.report.goodput.run import goodput_of
from slurmtrain.report.page import figures, sentences, units
from slurmtrain.report.page.contents import Chart, Page, Section, Tile, grid
from slurmtrain.report.page.figures import Curve
from slurmtrain.report.page.series import LARGEST, Series, series_of
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.report.table_files import short
from slurmtrain.runs.run_dir import RunDir

MOST_CURVES = 40  # of one chart; more are not told apart
MOST_THREADS = 400  # lines of parallel coordinates
MOST_AXES = 8
APART = 0.07  # share of the height of parallel coordinates between two marks of an axis
MOST_POINTS = 2000  # rows of the table, and points of a chart


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

    def reached(self, result: Result) -> str:
        """Say what a point has reached."""
        value = f"{units.name_of(self.goal.metric)} {units.number(result.value)}"
        return f"point {result.point.number}: {varied_words(result.point)}; {value}"


def varied_words(point: Point) -> str:
    """Return what distinguishes a point: "optim.lr=0.001, train.seed=2"."""
    found = [f"{units.clean(key, 60)}={units.clean(value, 60)}" for key, value in point.varied.items()]
    return ", ".join(found[:6]) or "nothing varies"


def sweep_page(facts: SweepFacts) -> Page:
    """Return the page of a sweep."""
    place = {result.point.number: index for index, result in enumerate(facts.results)}
    colors = {point.number: min(place.get(point.number, figures.COLORS), figures.COLORS - 1) for point in facts.points}
    sections = (_table(facts), _coordinates(facts, colors), _curves(facts, colors), _trouble(facts))
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
        tuple(filter(None, (_what_it_is(facts), _how_far(facts), _what_it_took(facts.time)))),
        tuple(_advice(facts)),
        tuple(_tiles(facts)),
        tuple(each for each in sections if each is not None),
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


def _tiles(facts: SweepFacts) -> Iterable[Tile]:
    yield Tile("points finished", f"{facts.counts.get(RunStatus.FINISHED, 0):,}", f"of {len(facts.points):,}")
    results, time = facts.results, facts.time
    if results:
        metric = facts.goal.metric
        unit = units.unit_of(metric)
        note = f"{f'{unit}, ' if unit else ''}point {results[0].point.number}"
        yield Tile(f"best {units.name_of(metric)}", units.number(results[0].value), note)
    if len(results) > 1:
        low, high = sorted((results[0].value, results[-1].value))
        yield Tile("range of results", f"{units.brief(low)} to {units.brief(high)}", f"{len(results)} points")
    if time.gpu_hours > 0:
        yield Tile("GPU hours", units.hours(3600 * time.gpu_hours))
    elif time.held_s > 0:
        yield Tile("allocated time", units.duration(time.held_s))
    if time.share is not None:
        yield Tile("goodput", units.percent(time.share), "of the allocated time")


def _table(facts: SweepFacts) -> Section:
    if not facts.points:
        return Section("points", "Points", missing="The sweep has no points yet.")
    kept = [place for place, name in enumerate(facts.table.columns) if not is_detail(name)]
    best = facts.results[0].point.number if facts.results else None
    rows, marked = [], set()
    for index, (point, row) in enumerate(zip(facts.points[:MOST_POINTS], facts.table.rows, strict=False)):
        state = facts.states.get(point.number)
        attempts = str(len(state.attempts)) if state is not None else ""
        rows.append([*(units.clean(short(row[place]), 120) for place in kept), attempts])
        if point.number == best:
            marked.add(index)
    about = "The best point is marked." if best is not None else ""
    if len(facts.points) > MOST_POINTS:
        all_points = f"{MOST_POINTS:,} of {len(facts.points):,}"
        about += f" The first {all_points} points are shown; `sweep collect` lists all of them."
    header = [*(units.clean(facts.table.columns[place], 80) for place in kept), "attempts"]
    table = grid("All points", header, rows, sortable=True, marked=frozenset(marked))
    return Section("points", "Points", about.strip(), grids=(table,))


def _coordinates(facts: SweepFacts, colors: Mapping[int, int]) -> Section:
    title, varied = "What the result depends on", facts.table.varied
    good = facts.results[:MOST_POINTS]
    if not good:
        return Section("coordinates", title, missing="No point has a result yet.")
    if not varied:
        return Section("coordinates", title, missing="No config field differs between the points.")
    keys = varied[:MOST_AXES]
    about = f"The first {MOST_AXES} of {len(varied)} varied fields are drawn." if len(varied) > MOST_AXES else ""
    return Section("coordinates", title, about, (_parallel(facts, good[:MOST_THREADS], keys, colors),))


def _places(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return places 0 to 1 of values along an axis, from the bottom up, and those marks that have room beside each other.

    Numbers lie where they are, others evenly apart in the order of appearance.
    """
    numbers = [number for value in values if (number := _number(value)) is not None]
    if len(numbers) == len(values):
        low, high = min(numbers), max(numbers)
        scale: Callable[[float], float] = math.log if low > 0 and high / low >= 10 else float
        room = scale(high) - scale(low)
        place_of = {each: (scale(each) - scale(low)) / room if room else 0.5 for each in sorted(numbers)}
        places = [place_of[each] for each in numbers]
        named = [(place, units.brief(each)) for each, place in place_of.items()]
    else:
        names = list(dict.fromkeys(map(str, values)))
        places = [names.index(str(value)) / (len(names) - 1) if len(names) > 1 else 0.5 for value in values]
        named = [(index / max(1, len(names) - 1), units.clean(name, 16)) for index, name in enumerate(names)]
    marks = named[-1:]  # the topmost, and from the bottom up what has room
    for place, text in named[:-1]:
        if all(abs(place - other) >= APART for other, _ in marks):
            marks.append((place, text))
    return places, marks


def _parallel(facts: SweepFacts, good: Sequence[Result], keys: Sequence[str], colors: Mapping[int, int]) -> Chart:
    """Return parallel coordinates: each point is a line over the varied keys to its result, the best at the top."""
    goal = facts.goal
    axes = [_places([result.point.varied.get(key, "-") for result in good]) for key in keys]
    heights, marks = _places([result.value for result in good])
    if goal.mode == "min":
        heights, marks = [1 - each for each in heights], [(1 - place, text) for place, text in marks]
    axes.append((heights, marks))
    names = [*(units.clean(key, 40) for key in keys), units.name_of(goal.metric)]
    across = list(range(len(axes)))
    data = []
    for place, result in reversed(list(enumerate(good))):  # the best is drawn last, on top of the others
        color = figures.color_of(colors[result.point.number])
        words = figures.plain(facts.reached(result))
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": words,
                "x": across,
                "y": [round(places[place], 4) for places, _ in axes],
                "line": {"color": color, "width": 4 if place == 0 else 1.5},
                "marker": {"color": color, "size": 7},
                "opacity": 1 if place == 0 else 0.6,
                "hoverinfo": "name",
            }
        )
    marked = [(number, place, text) for number, (_, marks) in enumerate(axes) for place, text in marks]
    data.append(
        figures.points(
            [x for x, _, _ in marked], [y for _, y, _ in marked], [""] * len(marked), color="--muted", size=3
        )
        | {
            "mode": "markers+text",
            "text": [f"\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}{figures.plain(text)}" for _, _, text in marked],
            "hoverinfo": "skip",
        }
        | {"textposition": "middle right", "textfont": {"color": "--text"}, "cliponaxis": False}
    )
    xaxis = {"tickvals": across, "ticktext": [figures.plain(name) for name in names], "range": [-0.15, len(keys) + 0.3]}
    yaxis = {"visible": False, "range": [-0.06, 1.06]}
    figure = {"data": data, "layout": figures.layout(340, xaxis=xaxis, yaxis=yaxis, hovermode="closest")}
    left = len(facts.points) - len(good)
    note = (
        f"{units.plural(left, 'point')} not drawn: without a result, or beyond the {MOST_THREADS} best." if left else ""
    )
    return Chart(
        "parallel", "Parallel coordinates: each line is a point, the best at the top", figure, note=note, wide=True
    )


def _curves(facts: SweepFacts, colors: Mapping[int, int]) -> Section:
    """Return the curves of the goal and of the loss, those of the best points, whose order is that of their results."""
    title = "Curves of all points"
    names = list(dict.fromkeys([*([facts.goal.metric] if facts.table.goal is not None else []), "loss"]))
    ranked = dict.fromkeys(
        [*(result.point.number for result in facts.results), *(each.number for each in facts.points)]
    )
    by_number = {point.number: point for point in facts.points if point.run_dir is not None}
    chosen = [by_number[number] for number in ranked if number in by_number]
    logs = [(point, _log(point, names)) for point in chosen[:MOST_CURVES]]
    every = [series for _, log in logs for series in log.values()]
    span, columns = figures.span_of(every), figures.columns_for(len(every))
    drawn: list[Chart | None] = []
    for number, name in enumerate(names):
        curves = [
            Curve(
                log[name],
                f"point {point.number}: {varied_words(point)}",
                colors[point.number],
                thin=place >= figures.COLORS,
            )
            for place, (point, log) in enumerate(logs)
            if name in log
        ]
        words, unit = units.name_of(name), units.unit_of(name)
        words = words[:1].upper() + words[1:]
        drawn.append(figures.line_chart(f"sweep-{number}", words, curves, span, unit=unit, columns=columns))
    found = tuple(chart for chart in drawn if chart is not None)
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
    wanted = ({name: record[name] for name in ("step", *names) if name in record} for record in logged)
    return series_of(wanted)[0]


def _trouble(facts: SweepFacts) -> Section | None:
    rows = [
        (
            str(point.number),
            varied_words(point),
            units.clean(state.status, 30),
            str(len(state.attempts)),
            units.clean(state.explanation),
        )
        for point in facts.points
        if (state := facts.states.get(point.number)) is not None
        and (state.status != RunStatus.FINISHED or len(state.attempts) > 1)
    ]
    if not rows:
        return None
    header = ("point", "varied fields", "state", "attempts", "details")
    return Section(
        "interrupted",
        "Points that have not finished or needed several attempts",
        grids=(grid("These points", header, rows[:MOST_POINTS]),),
    )
