"""The charts of a page as figures of plotly: series of a run's metrics by step, and what of them is drawn.

A figure is plain JSON that plotly.js draws in the page; what all have in common, such as fonts and margins, is in page.js.
Colours are variables of the style sheet, such as "--c0", since a page has two themes. plotly reads tags such as <b> and
<a> in text, so everything that a run may have written goes through `plain`.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slurmtrain.report.page import units
from slurmtrain.report.page.render import Chart
from slurmtrain.system.records import is_scalar

Numbers = NDArray[np.float64]
Span = tuple[float, float]  # the first and the last step

LARGEST = 1e150  # a larger value counts as not finite: the square of what is drawn must still be a number
MOST_METRICS = 200  # a run that makes up a name for each step would otherwise fill the memory
COLUMNS = 200  # of pixels of a curve, each of which shows the least and the greatest value
MEANS = 150  # points of a curve of means; one of four times as many values is drawn with its means
COLORS = 8  # that the style sheet has, --c0 to --c7
DOTS = 60  # a curve of fewer points shows each of them


@dataclass(frozen=True, eq=False)
class Series:
    """The values of one metric.

    Attributes:
        steps: ascending, shape (n,).
        values: one for each step; NaN where it is not finite, or too large to be drawn.
    """

    steps: Numbers
    values: Numbers

    @classmethod
    def of(cls, steps: Sequence[float], values: Sequence[float]) -> Series:
        """Return a series of plain numbers."""
        found = np.asarray(values, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            return cls(np.asarray(steps, dtype=np.float64), np.where(np.abs(found) < LARGEST, found, np.nan))

    @functools.cached_property
    def finite(self) -> Series:
        """The part of it that can be drawn."""
        sound = ~np.isnan(self.values)
        return Series(self.steps[sound], self.values[sound])


def series_of(found: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Return the scalar metrics by name, in the order of their first appearance; at most `MOST_METRICS`.

    Args:
        found: records by step, each value once, as `collect.metrics_of` returns them.
    """
    columns: dict[str, tuple[list[float], list[float]]] = {}
    for record in found:
        for name, value in record.items():
            if name != "step" and is_scalar(value) and (name in columns or len(columns) < MOST_METRICS):
                steps, values = columns.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    return {name: Series.of(*column) for name, column in columns.items()}


def thinned(series: Series, columns: int = COLUMNS) -> Series:
    """Return the least and the greatest value of each of so many parts of a series, so that no spike is lost.

    Of values that are not finite, the first of each part stays, so that the line has a gap there.
    """
    values = series.values
    if len(values) <= 3 * columns:
        return series
    gaps = np.isnan(values)
    low, high = np.where(gaps, np.inf, values), np.where(gaps, -np.inf, values)
    kept = [
        part[0] + found
        for part in np.array_split(np.arange(len(values)), columns)
        for found in (low[part].argmin(), high[part].argmax(), gaps[part].argmax())
    ]
    chosen = np.unique(kept)
    return Series(series.steps[chosen], values[chosen])


def averaged(series: Series, points: int = MEANS) -> Series:
    """Return the means over so many parts of the values that can be drawn, each at the last step of its part."""
    steps, values = series.finite.steps, series.finite.values
    parts = np.array_split(np.arange(len(steps)), max(1, min(points, len(steps))))
    means = [float(values[part].mean()) for part in parts if len(part)]
    return Series.of([float(steps[part[-1]]) for part in parts if len(part)], means)


class Curve(NamedTuple):
    """A series and how it is drawn."""

    series: Series
    name: str
    color: int = 0
    thin: bool = False


def span_of(found: Iterable[Series]) -> Span:
    """Return the steps that all charts of a page show, from 0 on where the first is close to it."""
    ends = [float(step) for series in found if len(series.steps) for step in (series.steps[0], series.steps[-1])]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    low = 0.0 if 0 < low <= 0.2 * high else low
    return (low, high) if high > low else (low - 1, high + 1)


def with_means(series: Series, name: str) -> list[Curve]:
    """Return a curve; of many values thin, and with their means."""
    if len(series.values) < 4 * MEANS:
        return [Curve(series, name)]
    return [Curve(series, name, thin=True), Curve(averaged(series), f"{name}, means")]


def plain(text: str) -> str:
    """Return a text that plotly shows as it is."""
    return html.escape(text, quote=False)


def line_chart(key: str, title: str, curves: Sequence[Curve], span: Span, *, unit: str = "") -> Chart | None:
    """Return a chart of curves over the steps; None if no curve has a value that can be drawn."""
    if not any(len(curve.series.finite.steps) for curve in curves):
        return None
    data = [  # of many curves, the later ones are named when they are pointed at
        _line(thinned(each.series), each, showlegend=place < COLORS) for place, each in enumerate(curves)
    ]
    broken = [
        f"{units.plural(count, 'value')} of {each.name} not finite"
        for each in curves
        if (count := int(np.isnan(each.series.values).sum()))
    ]
    note = f"Gaps: {', '.join(broken)}." if broken else ""
    summary = _summary(curves, unit)
    return Chart(key, title, _over(span, data), unit, over_steps=True, scalable=True, note=note, summary=summary)


def stacked_chart(key: str, title: str, parts: Mapping[str, Series], span: Span, *, unit: str) -> Chart:
    """Return areas on top of each other, by name, from the bottom up: means over the same parts of the steps."""
    curves = [Curve(averaged(series), name, number) for number, (name, series) in enumerate(parts.items())]
    data = [_line(each.series, each, stackgroup="all", fillcolor=f"--c{each.color % COLORS}") for each in curves]
    summary = _summary(curves, unit)
    return Chart(key, title, _over(span, data), unit, over_steps=True, summary=summary, wide=True)


def _over(span: Span, data: list[dict[str, Any]]) -> dict[str, Any]:
    xaxis = {"title": {"text": "step", "standoff": 4}, "range": list(span)}
    return {"data": data, "layout": {"height": 260, "xaxis": xaxis, "hovermode": "x unified"}}


def _line(series: Series, curve: Curve, **more: Any) -> dict[str, Any]:
    color = f"--c{curve.color % COLORS}"
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(series.steps) <= DOTS else "lines",
        "name": plain(curve.name),
        "x": [int(step) for step in series.steps.tolist()],
        "y": [None if math.isnan(value) else float(f"{value:.6g}") for value in series.values.tolist()],
        "line": {"color": color, "width": 1 if curve.thin else 2},
        "marker": {"color": color, "size": 5},
        "opacity": 0.55 if curve.thin else 1,
        **more,
    }


def _summary(curves: Sequence[Curve], unit: str) -> str:
    """Return what the curves show, in a sentence, for those who do not see them."""
    parts = []
    for curve in curves[:COLORS]:
        if len(values := curve.series.finite.values):
            steps, (least, most) = curve.series.finite.steps, (int(values.argmin()), int(values.argmax()))
            last, lowest, highest = (units.number(float(values[place])) for place in (-1, least, most))
            parts.append(
                f"{curve.name}: {last}{f' {unit}' if unit else ''} at step {steps[-1]:,.0f}; minimum {lowest} "
                f"(step {steps[least]:,.0f}), maximum {highest} (step {steps[most]:,.0f})"
            )
    return ". ".join(parts)
