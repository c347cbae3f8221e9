"""What is drawn, as data: curves, areas, shares, the timeline of attempts, parallel coordinates, points.

A chart is made from series and drawn twice: as SVG in the page by the templates, and as a picture by matplotlib
(`pictures`). Places along x are percent of the chart's width and places along y are pixels, so that one drawing fits a
phone and a desk; lines are in a box that is 1000 wide and is stretched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.report.page import units
from slurmtrain.report.page.scales import Scale, scale_of, step_ticks, ticks, time_ticks
from slurmtrain.report.page.series import Series, column_means, m4, rows_of

WIDTH, HEIGHT = 1000, 220  # of the box of a line chart
COLUMNS, LEAST_COLUMNS, ALL_COLUMNS = 500, 60, 9000  # of one curve, at least, and of all curves of a page together
COLORS = 8  # that the style sheet has, --c0 to --c7
STACK_COLUMNS = 150


@dataclass(frozen=True)
class Tick:
    """A mark of an axis: its place (percent along x, pixels along y) and its words."""

    at: float
    text: str
    minor: bool = False  # not shown where there is little room


@dataclass(frozen=True)
class Line:
    """One curve: its path in the box, points that stand alone as (percent, pixels), and its colour."""

    name: str
    color: int
    path: str = ""
    dots: tuple[tuple[float, float], ...] = ()
    thin: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Table:
    """The numbers of a chart for those who do not see it: cells are text already."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """One chart of curves or areas.

    Attributes:
        key: names it within the page, and its picture and table as files.
        unit: of the values.
        data: what the script needs to draw a part of it: x, log, and name, steps and values of each series.
    """

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    table: Table
    data: Mapping[str, Any]
    series: tuple[Series, ...] = field(repr=False)  # with the names that the run gave them
    x_label: str = "step"
    note: str = ""
    summary: str = ""
    log: bool = False
    stacked: bool = False
    height: int = HEIGHT


@dataclass(frozen=True)
class Curve:
    """A series and how it is drawn."""

    series: Series
    name: str
    color: int = 0
    thin: bool = False
    dashed: bool = False
    points: bool = False  # a dot at each value, where there are few
    derived: bool = False  # from another curve of the chart


def columns_for(curves: int) -> int:
    """Return the columns of each curve, so that a page of many curves stays small."""
    return max(LEAST_COLUMNS, min(COLUMNS, ALL_COLUMNS // max(1, curves)))


def line_chart(
    key: str,
    title: str,
    curves: Sequence[Curve],
    span: tuple[float, float],
    *,
    unit: str = "",
    columns: int = COLUMNS,
    log: bool | None = None,
) -> Chart | None:
    """Return a chart of curves over the steps of `span`; None if no curve has a value that can be drawn."""
    low, high = span
    drawn = [(curve, m4(curve.series, columns, low, high)) for curve in curves]
    found = [series.finite.values for _, series in drawn if len(series.finite.values)]
    if not found:
        return None
    y = scale_of([float(edge) for values in found for edge in (values.min(), values.max())], log=log)
    x = Scale(low, high)
    series = tuple(curve.series for curve, _ in drawn)
    return Chart(
        key,
        title,
        unit,
        tuple(_line(curve, kept, x, y) for curve, kept in drawn),
        _step_marks(x),
        _value_marks(y),
        _curve_table(curves, title, unit),
        {
            "x": [low, high],
            "log": y.log,
            "series": [
                {"name": curve.name, "unit": unit, "color": curve.color, **_points(kept)} for curve, kept in drawn
            ],
        },
        series,
        note=_broken(curves),
        summary=_summary(curves, unit),
        log=y.log,
    )


def _points(series: Series) -> dict[str, list[float | None]]:
    """Return steps and values with six digits, as JSON has them: null where there is no number."""
    values = series.values.tolist()
    return {
        "s": [int(step) for step in series.steps.tolist()],
        "v": [None if math.isnan(value) else _digits(value) for value in values],
    }


def _digits(value: float) -> float:
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _line(curve: Curve, kept: Series, x: Scale, y: Scale) -> Line:
    parts: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(kept.steps.tolist(), kept.values.tolist(), strict=True):
        if math.isnan(value):
            parts.append([])
        else:
            parts[-1].append((x.at(step), HEIGHT * (1 - y.at(value))))
    alone = [part[0] for part in parts if len(part) == 1]
    several = [part for part in parts if len(part) > 1]
    if curve.points and sum(map(len, parts)) <= 60:
        alone = [point for part in parts for point in part]
    return Line(
        curve.name,
        curve.color,
        " ".join(_path(part) for part in several),
        tuple((round(100 * across, 2), round(down, 1)) for across, down in alone[:200]),
        curve.thin,
        curve.dashed,
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return the commands of a path; the first point is absolute, the others are relative, which takes fewer bytes."""
    places = [(round(10 * WIDTH * x), round(10 * y)) for x, y in points]
    words = [f"M{_tenth(places[0][0])} {_tenth(places[0][1])}l"]
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        words.append(f"{_tenth(x1 - x0)} {_tenth(y1 - y0)} ")
    return "".join(words).rstrip()


def _tenth(tenths: int) -> str:
    return f"{tenths / 10:g}"


def _step_marks(x: Scale) -> tuple[Tick, ...]:
    marks = step_ticks(x.low, x.high)
    return tuple(
        Tick(round(100 * x.at(step), 2), units.short(step), bool(index % 2)) for index, step in enumerate(marks)
    )


def _value_marks(y: Scale) -> tuple[Tick, ...]:
    return tuple(Tick(round(HEIGHT * (1 - y.at(value)), 1), units.short(value)) for value in ticks(y))


def _curve_table(curves: Sequence[Curve], title: str, unit: str) -> Table:
    rows = rows_of([curve.series for curve in curves])
    return Table(
        ("step", *(curve.name for curve in curves)),
        tuple(
            (f"{step:,.0f}", *("" if value is None else units.number(value) for value in values))
            for step, values in rows
        ),
        f"{title}{f', in {unit}' if unit else ''}: {len(rows)} steps, evenly spread",
    )


def _broken(curves: Sequence[Curve]) -> str:
    """Say where curves have gaps, since values are not finite."""
    found = [
        f"{units.plural(curve.series.broken, 'value')} of {curve.name} not finite"
        for curve in curves
        if curve.series.broken and not curve.derived
    ]
    return f"Gaps: {', '.join(found)}." if found else ""


def _summary(curves: Sequence[Curve], unit: str) -> str:
    """Return what the curves show, in a sentence, for those who do not see them."""
    parts = []
    for curve in curves:
        found = curve.series.finite
        if len(found.values):
            first, last, least, most = (
                (units.number(float(found.values[index])), f"step {found.steps[index]:,.0f}")
                for index in (0, -1, int(found.values.argmin()), int(found.values.argmax()))
            )
            parts.append(
                f"{curve.name}: {first[0]} at {first[1]}, {last[0]}{f' {unit}' if unit else ''} at {last[1]}; "
                f"minimum {least[0]} ({least[1]}), maximum {most[0]} ({most[1]})"
            )
    return ". ".join(parts[:COLORS])


def stacked_chart(
    key: str, title: str, parts: Sequence[tuple[str, Series]], span: tuple[float, float], *, unit: str
) -> Chart | None:
    """Return areas on top of each other, by name, from the bottom up; None if no step has them all."""
    steps, means = column_means([series for _, series in parts], STACK_COLUMNS)
    if not steps:
        return None
    x = Scale(*span)
    tops, bottom = [], [0.0] * len(steps)
    for values in means:
        bottom = [below + max(0.0, value) for below, value in zip(bottom, values, strict=True)]
        tops.append(bottom)
    y = scale_of(bottom, from_zero=True)
    lines, below = [], [0.0] * len(steps)
    for number, ((name, _), top) in enumerate(zip(parts, tops, strict=True)):
        ahead = [(x.at(step), HEIGHT * (1 - y.at(value))) for step, value in zip(steps, top, strict=True)]
        back = [(x.at(step), HEIGHT * (1 - y.at(value))) for step, value in zip(steps, below, strict=True)]
        if len(steps) == 1:  # one step has no width: the area of a small one
            width = 0.01
            ahead = [(max(0.0, ahead[0][0] - width), ahead[0][1]), (min(1.0, ahead[0][0] + width), ahead[0][1])]
            back = [(ahead[0][0], back[0][1]), (ahead[1][0], back[0][1])]
        lines.append(Line(name, number % COLORS, f"{_path([*ahead, *reversed(back)])}Z"))
        below = top
    series = tuple(each for _, each in parts)
    named = [Curve(each, name) for name, each in parts]
    data = [
        {
            "name": name,
            "unit": unit,
            "color": number % COLORS,
            "s": [int(step) for step in steps],
            "v": [_digits(v) for v in values],
        }
        for number, ((name, _), values) in enumerate(zip(parts, means, strict=True))
    ]
    return Chart(
        key,
        title,
        unit,
        tuple(lines),
        _step_marks(x),
        _value_marks(y),
        _curve_table(named, title, unit),
        {"x": list(span), "log": False, "stacked": True, "series": data},
        series,
        summary=_summary(named, unit),
        stacked=True,
    )


@dataclass(frozen=True)
class Share:
    """A part of a whole: its begin and width in percent, its value, and its words."""

    name: str
    color: str
    begin: float
    width: float
    value: str
    percent: str


def shares(parts: Sequence[tuple[str, str, float, str]]) -> list[Share]:
    """Return a bar of parts, each (name, colour, size, the size in words), in percent of them all."""
    total = sum(size for _, _, size, _ in parts if size > 0)
    found, begin = [], 0.0
    for name, color, size, words in parts:
        if size > 0:
            width = 100 * size / total
            found.append(Share(name, color, round(begin, 3), round(width, 3), words, units.percent(size / total)))
            begin += width
    return found


@dataclass(frozen=True)
class Bar:
    """A span of a row of the timeline: what it was spent on; begin and width in percent."""

    what: str
    color: str
    begin: float
    width: float
    title: str


@dataclass(frozen=True)
class Mark:
    """A moment of a row of the timeline; `shape` names a symbol of the template."""

    shape: str
    at: float
    title: str


@dataclass(frozen=True)
class Row:
    """A row of the timeline: one attempt."""

    name: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    ending: str = ""
    number: int = 0


@dataclass(frozen=True)
class Timeline:
    """The attempts of a run one below the other, along the clock.

    Attributes:
        links: (row, percent) of each restart in place: an arrow leads from that row down to the next.
        shapes: symbols that occur, with their words, for the legend.
        colors: colours that occur, with their words.
        left_out: attempts before the first row that are not drawn.
    """

    rows: tuple[Row, ...]
    x_ticks: tuple[Tick, ...]
    links: tuple[tuple[int, float], ...] = ()
    shapes: tuple[tuple[str, str], ...] = ()
    colors: tuple[tuple[str, str], ...] = ()
    left_out: int = 0
    begins: str = ""
    ends: str = ""
    summary: str = ""


def clock_marks(seconds: float) -> tuple[Tick, ...]:
    """Return the marks of a time axis that is so many seconds long."""
    return tuple(
        Tick(round(100 * each / seconds, 2) if seconds else 0.0, units.duration(each) if each else "0", bool(index % 2))
        for index, each in enumerate(time_ticks(seconds))
    )


@dataclass(frozen=True)
class Coordinate:
    """An axis of parallel coordinates: its place in percent, its name, and its marks in pixels."""

    name: str
    at: float
    marks: tuple[Tick, ...]

    @property
    def side(self) -> str:
        """The side of the axis at which its name begins: names of the outer ones stay inside of the chart."""
        return "first" if self.at <= 0 else "last" if self.at >= 100 else "inner"


@dataclass(frozen=True)
class Thread:
    """One point of parallel coordinates: its path, colour and words."""

    name: str
    color: int
    path: str
    best: bool
    words: str


@dataclass(frozen=True)
class Parallel:
    """Parallel coordinates: each point of a sweep is a line over axes, one for each varied key and one for the result."""

    axes: tuple[Coordinate, ...]
    threads: tuple[Thread, ...]
    height: int = 260
    left_out: int = 0
    raw: tuple[tuple[float, ...], ...] = field(default=(), repr=False)  # places 0 to 1 of each thread on each axis


@dataclass(frozen=True)
class Scatter:
    """The result of each point over one varied key: (percent, pixels, words, best)."""

    key: str
    result: str
    dots: tuple[tuple[float, float, str, bool], ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    note: str = ""


def span_of(found: Sequence[Series]) -> tuple[float, float]:
    """Return the first and the last step of all series, from 0 on where the first is close to it."""
    steps = [float(step) for series in found if len(series.steps) for step in (series.steps[0], series.steps[-1])]
    if not steps:
        return 0.0, 1.0
    low, high = min(steps), max(steps)
    if 0 < low <= 0.2 * high:
        low = 0.0
    return (low, high) if high > low else (low - 1, high + 1)
