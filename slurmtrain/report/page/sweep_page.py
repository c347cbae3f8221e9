"""The page of a sweep: its points as a table, parallel coordinates, results over each key, and all curves together."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import UnreadableRecordError, UsageError
from slurmtrain.observe.metrics import is_detail
from slurmtrain.report import plot
from slurmtrain.report.collect import Cell, Point, Table, metrics_of
from slurmtrain.report.goodput.causes import Goodput, over_all
from slurmtrain.report.goodput.run import goodput_of
from slurmtrain.report.page import charts, sentences, units
from slurmtrain.report.page.charts import Chart, Coordinate, Curve, Parallel, Scatter, Thread, Tick
from slurmtrain.report.page.contents import Page, Section, Tile, grid
from slurmtrain.report.page.scales import Scale, scale_of, spread, ticks
from slurmtrain.report.page.series import LARGEST, Series, series_of
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs.run_dir import RunDir

MOST_CURVES = 40  # of one chart; more are not told apart
MOST_THREADS = 400
MOST_AXES = 8
MOST_SCATTERS = 8
MOST_ROWS = 2000
HEIGHT, SCATTER_HEIGHT = 260, 180
TOP = 14  # pixels above the topmost mark of parallel coordinates


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
    path: str
    info: Mapping[str, Any]
    points: tuple[Point, ...]
    states: Mapping[int, RunState]
    table: Table
    now: float


@dataclass(frozen=True)
class Result:
    """A point and the best value of the goal that it reached; None if it has none."""

    point: Point
    value: float | None


def sweep_page(facts: SweepFacts) -> Page:
    """Return the page of a sweep."""
    ranked = _ranked(facts)
    best = ranked[0] if ranked and ranked[0].value is not None else None
    colors = {result.point.number: min(place, charts.COLORS - 1) for place, result in enumerate(ranked)}
    lost = _time_of(facts)
    sections = (
        _table(facts, best),
        _coordinates(facts, ranked, colors),
        _curves(facts, ranked, colors),
        _trouble(facts),
    )
    words = Counter(str(state.status) for state in facts.states.values())
    state = (
        words.most_common(1)[0][0] if len(words) == 1 else ", ".join(f"{n} {word}" for word, n in words.most_common())
    )
    alive = any(each.alive for each in facts.states.values())
    bad = any(each.status in (RunStatus.FAILED, RunStatus.LOST) for each in facts.states.values())
    mood = "busy" if alive else "bad" if bad else "good" if set(words) == {RunStatus.FINISHED} else "still"
    return Page(
        f"Sweep {units.clean(facts.name, 100)}",
        facts.name,
        units.clean(state or "no points yet", 80),
        mood,
        tuple(each for each in (_what_it_is(facts), _how_far(facts, best), _what_it_took(lost)) if each),
        tuple(_advice(facts, best)),
        tuple(_tiles(facts, best, words, lost)),
        tuple(each for each in sections if each is not None),
        sentences.made(facts.now),
        alive,
    )


def _ranked(facts: SweepFacts) -> list[Result]:
    """Return the points with their results, the best first, those without a result last."""
    goal = facts.table.goal
    if goal is None:
        return [Result(point, None) for point in facts.points]
    cells = facts.table.column(goal.column)
    found = [Result(point, _result(cell)) for point, cell in zip(facts.points, cells, strict=True)]
    sign = 1.0 if goal.mode == "min" else -1.0
    return sorted(found, key=lambda each: math.inf if each.value is None else sign * each.value)


def _result(cell: Cell) -> float | None:
    if isinstance(cell, bool) or not isinstance(cell, int | float) or not abs(cell) < LARGEST:
        return None
    return float(cell)


def _what_it_is(facts: SweepFacts) -> str:
    keys = units.listed(units.clean(key, 80) for key in facts.table.varied)
    submitted = f"was submitted on {units.moment(facts.info.get('created'))}"
    over = f" over {keys}" if keys else ""
    return f"Sweep {units.clean(facts.name, 100)} {submitted}: {units.plural(len(facts.points), 'point')}{over}."


def _how_far(facts: SweepFacts, best: Result | None) -> str:
    words = Counter(str(state.status) for state in facts.states.values())
    states = units.listed(f"{count} {units.clean(word, 30)}" for word, count in words.most_common())
    begin = f"State of its points: {states}." if states else "It has no points yet."
    goal = facts.table.goal
    if best is None or goal is None or best.value is None:
        return f"{begin} No point has a result yet."
    where = "lowest" if goal.mode == "min" else "highest"
    value = units.number(best.value, units.unit_of(goal.metric))
    whose = f"point {best.point.number} ({varied_words(best.point)})"
    return f"{begin} The {where} {units.name_of(goal.metric)} is {value}, reached by {whose}."


def varied_words(point: Point) -> str:
    """Return what distinguishes a point: "optim.lr=0.001, train.seed=2"."""
    found = [f"{units.clean(key, 60)}={units.clean(value, 60)}" for key, value in point.varied.items()]
    return ", ".join(found[:6]) or "nothing varies"


def _time_of(facts: SweepFacts) -> Goodput:
    """Return the sum over all points."""
    found = []
    for run_dir, alive in _runs(facts):
        with contextlib.suppress(UnreadableRecordError):
            found.append(goodput_of(run_dir, alive=alive, now=facts.now))
    return over_all(found)


def _runs(facts: SweepFacts) -> list[tuple[RunDir, bool | None]]:
    """Return each run once, since points with the same config share one, and whether it is alive."""
    found: dict[str, tuple[RunDir, bool | None]] = {}
    for point in facts.points:
        state = facts.states.get(point.number)
        if point.run_dir is not None:
            found[point.run_dir.id] = point.run_dir, state.alive if state is not None else None
    return list(found.values())


def _what_it_took(time: Goodput) -> str:
    if not time.held_s > 0:
        return ""
    gpus = f" ({units.hours(3600 * time.gpu_hours)} GPU hours)" if time.gpu_hours > 0 else ""
    share = f", of which {units.percent(time.share)} were productive" if time.share is not None else ""
    interruptions = sum(time.interruptions.values())
    verb = "was" if interruptions == 1 else "were"
    ends = f" {units.plural(interruptions, 'attempt')} {verb} interrupted." if interruptions else ""
    return f"Its points held nodes for {units.duration(time.held_s)} in all{gpus}{share}.{ends}"


def _advice(facts: SweepFacts, best: Result | None) -> list[str]:
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
    goal = facts.table.goal
    if best is not None and goal is not None:
        found += [_at_the_edge(facts, best, key) for key in facts.table.varied]
    return [each for each in found if each] or ["Nothing needs to be done."]


def _at_the_edge(facts: SweepFacts, best: Result, key: str) -> str:
    """Say that the best value of a key of numbers is the least or the greatest that was tried."""
    values = [number for point in facts.points if (number := _number(point.varied.get(key))) is not None]
    mine = _number(best.point.varied.get(key))
    if (
        mine is None
        or len(set(values)) < 3
        or len(values) != len(facts.points)
        or mine not in (min(values), max(values))
    ):
        return ""
    edge, further = ("smallest", "smaller") if mine == min(values) else ("largest", "larger")
    return (
        f"The best point has the {edge} {units.clean(key, 80)} that was tried ({units.number(mine)}): "
        f"{further} values may be better still."
    )


def _number(value: object) -> float | None:
    """Return the number that a varied value is, also as text; None if it is none."""
    if isinstance(value, bool):
        return None
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if abs(found) < LARGEST else None


def _tiles(facts: SweepFacts, best: Result | None, words: Mapping[str, int], time: Goodput) -> Iterable[Tile]:
    done = words.get(RunStatus.FINISHED, 0)
    yield Tile("points finished", f"{done:,}", f"of {len(facts.points):,}")
    goal = facts.table.goal
    if best is not None and goal is not None and best.value is not None:
        unit = units.unit_of(goal.metric)
        note = f"{f'{unit}, ' if unit else ''}point {best.point.number}"
        yield Tile(f"best {units.name_of(goal.metric)}", units.number(best.value), note)
    results = [value for value in (_result(cell) for cell in _goal_cells(facts.table)) if value is not None]
    if len(results) > 1:
        yield Tile(
            "range of results", f"{units.short(min(results))} to {units.short(max(results))}", f"{len(results)} points"
        )
    if time.gpu_hours > 0:
        yield Tile("GPU hours", units.hours(3600 * time.gpu_hours))
    elif time.held_s > 0:
        yield Tile("allocated time", units.duration(time.held_s))
    if time.share is not None:
        yield Tile("goodput", units.percent(time.share), "of the allocated time")


def _goal_cells(table: Table) -> list[Cell]:
    return table.column(table.goal.column) if table.goal is not None else []


def _table(facts: SweepFacts, best: Result | None) -> Section:
    if not facts.points:
        return Section("points", "Points", missing="The sweep has no points yet.")
    kept = [place for place, name in enumerate(facts.table.columns) if not is_detail(name)]
    header = [units.clean(facts.table.columns[place], 80) for place in kept]
    header.append("attempts")
    rows, marked = [], set()
    for number, (point, row) in enumerate(zip(facts.points[:MOST_ROWS], facts.table.rows, strict=False)):
        state = facts.states.get(point.number)
        rows.append(
            [*(_cell_text(row[place]) for place in kept), str(len(state.attempts)) if state is not None else ""]
        )
        if best is not None and point.number == best.point.number:
            marked.add(number)
    about = "The best point is marked." if best is not None else ""
    if len(facts.points) > MOST_ROWS:
        about += (
            f" The first {MOST_ROWS:,} of {len(facts.points):,} points are shown; `sweep collect` lists all of them."
        )
    table = grid(
        "Points", header, rows, caption="All points with their metrics", sortable=True, marked=frozenset(marked)
    )
    return Section("points", "Points", about.strip(), grids=(table,))


def _cell_text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, int):
        return str(cell) if abs(cell) < 10**15 else f"{cell:.5g}" if abs(cell) < 10**300 else units.clean(cell, 40)
    return f"{cell:.5g}" if isinstance(cell, float) else units.clean(cell, 120)


def _coordinates(facts: SweepFacts, ranked: Sequence[Result], colors: Mapping[int, int]) -> Section:
    title = "What the result depends on"
    goal = facts.table.goal
    good = [result for result in ranked if result.value is not None]
    if goal is None or not good:
        return Section("coordinates", title, missing="No point has a result yet.")
    if not facts.table.varied:
        return Section("coordinates", title, missing="No config field differs between the points.")
    scatters: tuple[Scatter, ...] = ()
    with contextlib.suppress(UsageError):  # nothing that can be drawn
        scatters = tuple(_scatter(facts, panel) for panel in plot.panels(facts.table)[:MOST_SCATTERS])
    keys = facts.table.varied[:MOST_AXES]
    about = ""
    if len(facts.table.varied) > MOST_AXES:
        about = f"The first {MOST_AXES} of {len(facts.table.varied)} varied fields are drawn."
    return Section("coordinates", title, about, parallel=_parallel(facts, good, keys, colors), scatters=scatters)


@dataclass(frozen=True)
class _Axis:
    """An axis of parallel coordinates: places of its values, from the bottom up, and its marks."""

    places: Mapping[str, float]
    marks: tuple[tuple[float, str], ...]


def _axis(values: Sequence[Any]) -> _Axis:
    """Return the axis of a key: by number where all values are numbers, otherwise by name, in the order of appearance."""
    numbers = [_number(value) for value in values]
    known = [value for value in numbers if value is not None]
    if len(known) == len(numbers) and known:
        log = min(known) > 0 and max(known) / min(known) >= 10
        scale = Scale(min(known), max(known), log)
        marked = sorted(set(known)) if len(set(known)) <= 6 else [min(known), *ticks(scale, 4), max(known)]
        marks = tuple((scale.at(value), units.short(value)) for value in dict.fromkeys(marked))
        return _Axis({str(value): scale.at(number) for value, number in zip(values, known, strict=True)}, marks)
    names = list(dict.fromkeys(str(value) for value in values))
    places = spread(names)
    shown = places if len(names) <= 12 else places[:: -(-len(names) // 12)]
    return _Axis(
        dict(zip(names, places, strict=True)),
        tuple((place, units.clean(name, 16)) for name, place in zip(names, places, strict=True) if place in shown),
    )


def _parallel(facts: SweepFacts, good: Sequence[Result], keys: Sequence[str], colors: Mapping[int, int]) -> Parallel:
    goal = facts.table.goal
    assert goal is not None
    shown = good[:MOST_THREADS]
    axes = [_axis([result.point.varied.get(key, "-") for result in shown]) for key in keys]
    values = [result.value for result in shown if result.value is not None]
    # Better is higher, so that good points end at the top.
    scale = Scale(min(values), max(values), min(values) > 0 and max(values) / min(values) >= 100)
    down = HEIGHT - TOP

    def height(place: float) -> float:
        return round(TOP + (down - TOP) * (1 - place), 1)

    def result_place(value: float) -> float:
        return 1 - scale.at(value) if goal is not None and goal.mode == "min" else scale.at(value)

    across = spread([*keys, "result"])
    threads, raw = [], []
    for place, result in enumerate(shown):
        assert result.value is not None
        places = [axis.places[str(result.point.varied.get(key, "-"))] for key, axis in zip(keys, axes, strict=True)]
        places.append(result_place(result.value))
        path = "L".join(f"{1000 * x:g} {height(y):g}" for x, y in zip(across, places, strict=True))
        reached = f"{units.name_of(goal.metric)} {units.number(result.value)}"
        words = f"point {result.point.number}: {varied_words(result.point)}; {reached}"
        threads.append(Thread(str(result.point.number), colors[result.point.number], f"M{path}", place == 0, words))
        raw.append(tuple(places))
    marks = [ticks(scale, 4) if len(set(values)) > 1 else [values[0]]]
    ends = tuple(Tick(height(result_place(value)), units.short(value)) for value in marks[0])
    coordinates = [
        Coordinate(units.clean(key, 40), round(100 * x, 2), tuple(Tick(height(at), text) for at, text in axis.marks))
        for key, x, axis in zip(keys, across, axes, strict=False)
    ]
    coordinates.append(Coordinate(units.name_of(goal.metric), 100.0, ends))
    # The best is drawn last, on top of the others.
    return Parallel(tuple(coordinates), tuple(reversed(threads)), HEIGHT, len(facts.points) - len(shown), tuple(raw))


def _scatter(facts: SweepFacts, panel: plot.Panel) -> Scatter:
    if panel.x.kind == "category":
        x = Scale(-0.5, max(0.5, len(panel.x.names) - 0.5))
        marks = [(float(place), units.clean(name, 14)) for place, name in enumerate(panel.x.names)][:12]
    else:
        low, high = min(panel.xs), max(panel.xs)
        log = panel.x.kind == "log"
        room = 1.15 if log else 0.06 * (high - low) or 0.5
        x = Scale(low / room, high * room, True) if log else Scale(low - room, high + room)
        marks = [(value, units.short(value)) for value in ticks(x, 5)]
    y = scale_of(panel.ys, log=panel.y.kind == "log")
    goal = facts.table.goal
    assert goal is not None
    dots = [
        (
            round(100 * x.at(across), 2),
            round(SCATTER_HEIGHT * (1 - y.at(up)), 1),
            f"{panel.key}={panel.x.names[int(across)] if panel.x.names else units.number(across)}: "
            f"{units.name_of(goal.metric)} {units.number(up)}",
            index == panel.best,
        )
        for index, (across, up) in enumerate(zip(panel.xs, panel.ys, strict=True))
    ]
    dots.sort(key=lambda dot: dot[3])
    note = (
        f"{units.plural(panel.left_out, 'point')} without a result {'is' if panel.left_out == 1 else 'are'} not drawn."
        if panel.left_out
        else ""
    )
    return Scatter(
        units.clean(panel.key, 80),
        units.name_of(goal.metric),
        tuple((across, up, units.clean(words), best) for across, up, words, best in dots[-2000:]),
        tuple(
            Tick(round(100 * x.at(value), 2), text, len(marks) > 3 and bool(index % 2))
            for index, (value, text) in enumerate(marks)
        ),
        tuple(Tick(round(SCATTER_HEIGHT * (1 - y.at(value)), 1), units.short(value)) for value in ticks(y, 4)),
        note,
    )


def _curves(facts: SweepFacts, ranked: Sequence[Result], colors: Mapping[int, int]) -> Section:
    """Return the curves of the goal and of the loss, those of the best points, whose order is that of their results."""
    title = "Curves of all points"
    goal = facts.table.goal
    names = list(dict.fromkeys([*([goal.metric] if goal is not None else []), "loss"]))
    chosen = [result.point for result in ranked if result.point.run_dir is not None][:MOST_CURVES]
    logs = [(point, _log(point, names)) for point in chosen]
    found = {name: [(point, log[name]) for point, log in logs if name in log] for name in names}
    every = [series for pairs in found.values() for _, series in pairs]
    span = charts.span_of(every)
    columns = charts.columns_for(len(every))
    drawn: list[Chart] = []
    for name in names:
        curves = [
            Curve(
                series,
                f"point {point.number}: {varied_words(point)}",
                colors[point.number],
                thin=place >= charts.COLORS,
            )
            for place, (point, series) in enumerate(found[name])
        ]
        words = units.name_of(name)
        made = charts.line_chart(
            f"sweep-{len(drawn)}",
            words[:1].upper() + words[1:],
            curves,
            span,
            unit=units.unit_of(name),
            columns=columns,
        )
        drawn += [made] if made is not None else []
    if not drawn:
        return Section("curves", title, missing="No point has logged anything yet.")
    about = "The legend lists the best points first."
    left = sum(result.point.run_dir is not None for result in ranked) - len(chosen)
    if left > 0:
        about += f" Only the {MOST_CURVES} best points are drawn."
    return Section("curves", title, about, tuple(drawn))


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
        grids=(grid("These points", header, rows[:MOST_ROWS]),),
    )
