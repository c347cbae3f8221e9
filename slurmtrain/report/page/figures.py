"""The charts of a page as figures of plotly: plain JSON that plotly.js draws in the page.

Colours are variables of the style sheet, such as "--c0", since a page has two themes. plotly reads tags such as <b> and
<a> in text, so everything that a run may have written goes through `plain`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.report.page import units
from slurmtrain.report.page.contents import Chart
from slurmtrain.report.page.series import Series, column_means, thinned

HEIGHT = 260  # pixels
COLUMNS, LEAST_COLUMNS, ALL_COLUMNS = 500, 60, 9000  # of one curve, at least, and of all curves of a page together
STACK_COLUMNS = 150
COLORS = 8  # that the style sheet has, --c0 to --c7
DOTS = 60  # a curve of fewer points shows each of them
DECADES = 100.0  # an axis of positive values that span more than this is logarithmic
CLEAR = "rgba(0,0,0,0)"


@dataclass(frozen=True)
class Curve:
    """A series and how it is drawn."""

    series: Series
    name: str
    color: int = 0
    thin: bool = False
    derived: bool = False  # from another curve of the chart


def plain(text: str) -> str:
    """Return a text that plotly shows as it is."""
    return html.escape(text, quote=False)


def color_of(number: int) -> str:
    """Return one of the colours that the curves of a chart take in turn."""
    return f"--c{number % COLORS}"


def layout(height: int = HEIGHT, *, xaxis: Any = None, yaxis: Any = None, **more: Any) -> dict[str, Any]:
    """Return what all charts have in common, and what is set beside."""
    axis = {"gridcolor": "--edge", "linecolor": "--strong-edge", "zeroline": False, "automargin": True}
    return {
        "height": height,
        "showlegend": False,  # the page has one below the title, as text
        "margin": {"l": 52, "r": 14, "t": 10, "b": 34},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"color": "--muted", "size": 12},
        "hoverlabel": {
            "bgcolor": "--bg",
            "bordercolor": "--strong-edge",
            "font": {"color": "--text"},
            "namelength": -1,
        },
        "modebar": {"bgcolor": CLEAR, "color": "--muted", "activecolor": "--accent"},
        "xaxis": axis | (xaxis or {}),
        "yaxis": axis | (yaxis or {}),
        **more,
    }


def columns_for(curves: int) -> int:
    """Return the columns of each curve, so that a page of many curves stays small."""
    return max(LEAST_COLUMNS, min(COLUMNS, ALL_COLUMNS // max(1, curves)))


def is_log(values: Sequence[float]) -> bool:
    """Return whether an axis for these values, all finite, is logarithmic."""
    return min(values) > 0 and max(values) / min(values) >= DECADES


def span_of(found: Sequence[Series]) -> tuple[float, float]:
    """Return the first and the last step of all series, from 0 on where the first is close to it."""
    steps = [float(step) for series in found if len(series.steps) for step in (series.steps[0], series.steps[-1])]
    if not steps:
        return 0.0, 1.0
    low, high = min(steps), max(steps)
    if 0 < low <= 0.2 * high:
        low = 0.0
    return (low, high) if high > low else (low - 1, high + 1)


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
    """Return a chart of curves over the steps of `span`; None if no curve has a value that can be drawn.

    Args:
        log: None: if the values span decades.
    """
    drawn = [(curve, thinned(curve.series, columns, *span)) for curve in curves]
    values = [value for _, kept in drawn for value in kept.finite.values.tolist()]
    if not values:
        return None
    broken = [
        f"{units.plural(curve.series.broken, 'value')} of {curve.name} not finite"
        for curve in curves
        if curve.series.broken and not curve.derived
    ]
    logarithmic = is_log(values) if log is None else log and min(values) > 0
    yaxis = {"type": "log"} if logarithmic else {}
    return Chart(
        key,
        title,
        {"data": [_line(curve, kept) for curve, kept in drawn], "layout": _over_steps(span, yaxis)},
        unit,
        tuple(
            (color_of(each.color), f"{each.name}{' (thin)' if each.thin else ''}") for each in curves if len(curves) > 1
        ),
        over_steps=True,
        note=f"Gaps: {', '.join(broken)}." if broken else "",
        summary=_summary([(curve.name, curve.series) for curve in curves], unit),
        scalable=min(values) > 0,
    )


def _over_steps(span: tuple[float, float], yaxis: dict[str, Any]) -> dict[str, Any]:
    xaxis = {"title": {"text": "step", "standoff": 4}, "range": list(span)}
    return layout(xaxis=xaxis, yaxis=yaxis, hovermode="x unified")


def _line(curve: Curve, kept: Series) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(kept.values) <= DOTS else "lines",
        "name": plain(curve.name),
        "x": _numbers(kept.steps.tolist()),
        "y": _numbers(kept.values.tolist()),
        "line": {"color": color_of(curve.color), "width": 1 if curve.thin else 2},
        "marker": {"color": color_of(curve.color), "size": 5},
        "opacity": 0.55 if curve.thin else 1,
        "connectgaps": False,
    }


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Return numbers as JSON has them: null where there is none, whole ones whole, others with six digits."""
    short = (None if math.isnan(value) else float(f"{value:.6g}") if value != int(value) else value for value in values)
    return [int(each) if each is not None and each == int(each) and abs(each) < 1e15 else each for each in short]


def _summary(curves: Sequence[tuple[str, Series]], unit: str) -> str:
    """Return what the curves show, in a sentence, for those who do not see them."""
    parts = []
    for name, series in curves[:COLORS]:
        found = series.finite
        if len(found.values):
            first, last, least, most = (
                (units.number(float(found.values[index])), f"step {found.steps[index]:,.0f}")
                for index in (0, -1, int(found.values.argmin()), int(found.values.argmax()))
            )
            parts.append(
                f"{name}: {first[0]} at {first[1]}, {last[0]}{f' {unit}' if unit else ''} at {last[1]}; "
                f"minimum {least[0]} ({least[1]}), maximum {most[0]} ({most[1]})"
            )
    return ". ".join(parts)


def stacked_chart(
    key: str, title: str, parts: Sequence[tuple[str, Series]], span: tuple[float, float], *, unit: str
) -> Chart | None:
    """Return areas on top of each other, by name, from the bottom up; None if no step has them all."""
    steps, means = column_means([series for _, series in parts], STACK_COLUMNS)
    if not steps:
        return None
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(steps) == 1 else "lines",
            "stackgroup": "all",
            "name": plain(name),
            "x": _numbers(steps),
            "y": _numbers([max(0.0, value) for value in values]),
            "line": {"color": color_of(number), "width": 0.5},
            "fillcolor": color_of(number),
        }
        for number, ((name, _), values) in enumerate(zip(parts, means, strict=True))
    ]
    legend = tuple((color_of(number), name) for number, (name, _) in enumerate(parts))
    figure = {"data": data, "layout": _over_steps(span, {"rangemode": "tozero"})}
    return Chart(key, title, figure, unit, legend, over_steps=True, summary=_summary(parts, unit), wide=True)


def share_chart(key: str, title: str, parts: Sequence[tuple[str, str, float, str]]) -> Chart:
    """Return a bar of parts, each (name, colour, size, the size in words), in percent of them all."""
    found = [part for part in parts if part[2] > 0]
    total = sum(size for _, _, size, _ in found)
    data, legend, begin = [], [], 0.0
    for name, color, size, words in found:
        said = f"{name}: {units.percent(size / total)} ({words})"
        data.append(bars(said, color, [""], [begin], [100 * size / total], [said]))
        legend.append((color, said))
        begin += 100 * size / total
    figure = {
        "data": data,
        "layout": layout(
            80,
            xaxis={"range": [0, 100], "ticksuffix": " %", "fixedrange": True},
            yaxis={"visible": False, "fixedrange": True},
            barmode="overlay",
        ),
    }
    return Chart(key, title, figure, legend=tuple(legend), wide=True)


def bars(
    name: str, color: str, rows: Sequence[str], begins: Sequence[Any], widths: Sequence[float], words: Sequence[str]
) -> dict[str, Any]:
    """Return horizontal bars of one colour, with what is said of each when it is pointed at."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": plain(name),
        "y": list(rows),
        "base": [round(each, 4) if isinstance(each, float) else each for each in begins],
        "x": [round(each, 4) for each in widths],
        "marker": {"color": color, "line": {"color": "--strong-edge", "width": 0.5}},
        "hovertext": [plain(each) for each in words],
        "hoverinfo": "text",
    }


def points(
    xs: Sequence[Any],
    ys: Sequence[Any],
    words: Sequence[str],
    *,
    color: str,
    symbol: str = "circle",
    size: int = 8,
    name: str = "",
) -> dict[str, Any]:
    """Return points of one colour, with what is said of each when it is pointed at."""
    marker = {"color": color, "symbol": symbol, "size": size, "line": {"color": color, "width": 2}}
    shown = {"hovertext": [plain(each) for each in words], "hoverinfo": "text"}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(name),
        "x": list(xs),
        "y": list(ys),
        "marker": marker,
    } | shown
