"""Series of a run's metrics by step, and what of them is drawn.

A page draws a curve of 100,000 steps in some hundred columns of pixels. `thinned` keeps of each column the least and the
greatest value, by which the line looks as if all points were drawn: Jugel, Jerzak, Hackenbroich, Markl, "M4: A
Visualization-Oriented Time Series Data Aggregation", PVLDB 7(10), 2014.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurmtrain.system.records import is_scalar

Numbers = NDArray[np.float64]

LARGEST = 1e150  # a larger value counts as not finite: the square of what is drawn must still be a number
MOST_COUNTED = 10_000  # names of further metrics
MOST_METRICS = 200  # a run that makes up a name for each step would otherwise fill the memory


@dataclass(frozen=True, eq=False)
class Series:
    """The values of one metric.

    Attributes:
        steps: ascending, shape (n,).
        values: one for each step; NaN and the infinities are kept.
    """

    name: str
    steps: Numbers
    values: Numbers

    @classmethod
    def of(cls, name: str, steps: Sequence[float], values: Sequence[float]) -> Series:
        """Return a series of plain numbers."""
        return cls(name, np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64))

    @functools.cached_property
    def finite(self) -> Series:
        """The part of it that can be drawn."""
        sound = is_drawable(self.values)
        return self if sound.all() else Series(self.name, self.steps[sound], self.values[sound])

    @property
    def broken(self) -> int:
        """The number of values that are not finite."""
        return len(self.values) - len(self.finite.values)

    @property
    def mean_of_last_half(self) -> float | None:
        """The mean over the last half of the values that can be drawn; None if there is none."""
        values = self.finite.values
        return float(values[len(values) // 2 :].mean()) if len(values) else None


def is_drawable(values: Numbers) -> NDArray[np.bool_]:
    """Return which values are finite, and not beyond what can be drawn."""
    return np.isfinite(values) & (np.abs(values) < LARGEST)


def series_of(found: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Series], int]:
    """Return the scalar metrics by name, in the order of their first appearance, and the number of names left out.

    Args:
        found: records by step, each value once, as `collect.metrics_of` returns them.
    """
    columns: dict[str, tuple[list[float], list[float]]] = {}
    left_out: set[str] = set()
    for record in found:
        step = record["step"]
        for name, value in record.items():
            if name == "step" or not is_scalar(value):
                continue
            column = columns.get(name)
            if column is None and len(columns) >= MOST_METRICS:
                if len(left_out) < MOST_COUNTED:
                    left_out.add(name)
                continue
            steps, values = column or columns.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    return {name: Series.of(name, *column) for name, column in columns.items()}, len(left_out)


def thinned(series: Series, columns: int, low: float, high: float) -> Series:
    """Return the points of a series that a line over [low, high] needs in so many columns of pixels: least and greatest.

    A NaN stays in the place of values that are not finite, so that the line has a gap there. At most three points of a
    column are kept.
    """
    steps, sound = series.steps, is_drawable(series.values)
    values = np.where(sound, series.values, np.nan)
    if len(steps) <= 3 * columns:
        return Series(series.name, steps, values)
    place = np.clip((steps - low) * (columns / (high - low or 1.0)), 0, columns - 1).astype(np.int64)
    sound_ones, broken = np.flatnonzero(sound), np.flatnonzero(~sound)
    order = sound_ones[np.lexsort((values[sound_ones], place[sound_ones]))]  # by column, and from the least of it on
    least = order[np.diff(place[order], prepend=-1) > 0]
    greatest = order[np.diff(place[order], append=columns) > 0]
    _, gaps = np.unique(place[broken], return_index=True)
    chosen = np.unique(np.concatenate((least, greatest, broken[gaps])))
    return Series(series.name, steps[chosen], values[chosen])


def trailing_mean(series: Series, points: int) -> Series:
    """Return the mean of each value and the `points` - 1 before it; values that are not finite do not count.

    The first values, before which there are fewer, are means of those that there are.
    """
    sound = is_drawable(series.values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(sound, series.values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(sound)))
    begin = np.maximum(np.arange(len(series.values)) + 1 - points, 0)
    many = counts[1:] - counts[begin]
    means = np.where(many > 0, (sums[1:] - sums[begin]) / np.maximum(many, 1), np.nan)
    return Series(series.name, series.steps, means)


def aligned(found: Iterable[Series]) -> tuple[Numbers, list[Numbers]]:
    """Return the steps at which all of these series have a value that can be drawn, and the values of each there."""
    sound = [series.finite for series in found]
    steps = functools.reduce(np.intersect1d, [each.steps for each in sound])
    return steps, [each.values[np.searchsorted(each.steps, steps)] for each in sound]
