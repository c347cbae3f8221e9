"""The charts of a page as figures of plotly: plain JSON that plotly.js draws in the page.

Colours are variables of the style sheet, such as "--c0", since a page has two themes. plotly reads tags such as <b> and
<a> in text, so everything that a run may have written goes through `plain`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurmtrain.report.page import units
from slurmtrain.report.page.contents import Chart
from slurmtrain.report.page.series import Series, aligned, thinned, trailing_mean

HEIGHT = 260  # pixels
COLUMNS, LEAST_COLUMNS, ALL_COLUMNS = 500, 60, 9000  # of one curve, at least, and of all curves of a page together
STACK_COLUMNS = 150
COLORS = 8  # that the style sheet has, --c0 to --c7
DOTS = 60  # a curve of fewer points shows each of them
DECADES = 100.0  # an axis of positive values that span more than this is logarithmic, if it may be
SMOOTHED_PARTS = 50  # the mean of a curve is over this part of its points
SMOOTHED_LEAST = 4  # points of a mean: one of fewer is not drawn
CLEAR = "rgba(0,0,0,0)"
AXIS = {"gridcolor": "--edge", "linecolor": "--strong-edge", "zeroline": False, "automargin": True}


@dataclass(frozen=True)
class Curve:
    """A series and how it is drawn."""

    series: Series
    name: str
    color: int = 0
    thin: bool = False
    derived: bool = False  # from another curve of the chart


@dataclass(frozen=True)
class Steps:
    """The steps that all charts of a page show, and how many columns of pixels each of its curves has."""

    span: tuple[float, float]
    columns: int

    @classmethod
    def of(cls, found: Sequence[Series]) -> Steps:
        """Return the steps of all series, from 0 on where the first is close to it; few columns where there are many."""
        ends = [float(step) for series in found if len(series.steps) for step in (series.steps[0], series.steps[-1])]
        low, high = min(ends, default=0.0), max(ends, default=1.0)
        if 0 < low <= 0.2 * high:
            low = 0.0
        span = (low, high) if high > low else (low - 1, high + 1)
        return cls(span, max(LEAST_COLUMNS, min(COLUMNS, ALL_COLUMNS // (len(found) + 2))))

    def layout(self, **yaxis: Any) -> dict[str, Any]:
        """Return the layout of a chart over these steps."""
        xaxis = {"title": {"text": "step", "standoff": 4}, "range": list(self.span)}
        return layout(xaxis=xaxis, yaxis=yaxis, hovermode="x unified")


def plain(text: str) -> str:
    """Return a text that plotly shows as it is."""
    return html.escape(text, quote=False)


def color_of(number: int) -> str:
    """Return one of the colours that the curves of a chart take in turn."""
    return f"--c{number % COLORS}"


def layout(height: int = HEIGHT, *, xaxis: Any, yaxis: Any, **more: Any) -> dict[str, Any]:
    """Return what all charts have in common, and what is set beside."""
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
        "xaxis": AXIS | xaxis,
        "yaxis": AXIS | yaxis,
        **more,
    }


def with_mean(series: Series, name: str) -> list[Curve]:
    """Return a curve; of many points thin, and with the mean over a fiftieth of them."""
    size = len(series.values) // SMOOTHED_PARTS
    if size < SMOOTHED_LEAST:
        return [Curve(series, name)]
    mean = Curve(trailing_mean(series, size), f"{name}, mean of {size:,} logged steps", derived=True)
    return [Curve(series, name, thin=True), mean]


def line_chart(
    key: str, title: str, curves: Sequence[Curve], steps: Steps, *, unit: str = "", may_be_log: bool = True
) -> Chart | None:
    """Return a chart of curves over the steps; None if no curve has a value that can be drawn.

    Args:
        may_be_log: its axis is logarithmic if the values span decades.
    """
    drawn = [(curve, thinned(curve.series, steps.columns, *steps.span)) for curve in curves]
    values = [value for _, kept in drawn for value in kept.finite.values.tolist()]
    if not values:
        return None
    broken = [
        f"{units.plural(curve.series.broken, 'value')} of {curve.name} not finite"
        for curve in curves
        if curve.series.broken and not curve.derived
    ]
    data = [
        _line(kept, curve.name, curve.color, 1 if curve.thin else 2, opacity=0.55 if curve.thin else 1)
        for curve, kept in drawn
    ]
    is_log = may_be_log and min(values) > 0 and max(values) / min(values) >= DECADES
    legend = [(color_of(each.color), f"{each.name}{' (thin)' if each.thin else ''}") for each in curves[:COLORS]]
    if len(curves) > COLORS:
        legend.append(("", f"and {len(curves) - COLORS} more, named when they are pointed at"))
    return Chart(
        key,
        title,
        {"data": data, "layout": steps.layout(**({"type": "log"} if is_log else {}))},
        unit,
        legend if len(legend) > 1 else [],
        over_steps=True,
        note=f"Gaps: {', '.join(broken)}." if broken else "",
        summary=_summary([(curve.name, curve.series) for curve in curves], unit),
        scalable=min(values) > 0,
    )


def stacked_chart(key: str, title: str, parts: Mapping[str, Series], steps: Steps, *, unit: str) -> Chart | None:
    """Return areas on top of each other, by name, from the bottom up; None if no step has them all.

    They are means over as many parts of the steps, so that the areas keep their sizes.
    """
    common, columns = aligned(parts.values())
    if not len(common):
        return None
    begins = np.arange(0, len(common), -(-len(common) // STACK_COLUMNS))
    sizes = np.diff(np.append(begins, len(common)))
    data = []
    for number, (name, values) in enumerate(zip(parts, columns, strict=True)):
        means = np.maximum(0.0, np.add.reduceat(values, begins) / sizes)
        means_of = Series(name, common[begins + sizes - 1], means)
        data.append(_line(means_of, name, number, 0.5, stackgroup="all", fillcolor=color_of(number)))
    figure = {"data": data, "layout": steps.layout(rangemode="tozero")}
    legend = [(color_of(number), name) for number, name in enumerate(parts)]
    summary = _summary(list(parts.items()), unit)
    return Chart(key, title, figure, unit, legend, over_steps=True, summary=summary, wide=True)


def _line(series: Series, name: str, color: int, width: float, **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(series.steps) <= DOTS else "lines",
        "name": plain(name),
        "x": _numbers(series.steps.tolist()),
        "y": _numbers(series.values.tolist()),
        "line": {"color": color_of(color), "width": width},
        "marker": {"color": color_of(color), "size": 5},
        "connectgaps": False,
        **more,
    }


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
