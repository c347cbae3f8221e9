"""Axes: where a value lies, and which round values are marked. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DECADES = 100.0  # an axis of positive values that span more than this is logarithmic
TIME_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800)


@dataclass(frozen=True)
class Scale:
    """One axis from `low` to `high`; `log`: by powers of ten."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return where a value lies, 0 to 1; values outside are moved to the end of the axis."""
        if self.log:
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low))
        else:
            low, high = self.low, self.high
        return 0.5 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))


def scale_of(values: Iterable[float], *, from_zero: bool = False, log: bool | None = None) -> Scale:
    """Return an axis for finite values, a little longer than they need.

    Args:
        from_zero: it begins at 0, as an axis of areas must.
        log: None: if they are positive and span more than `DECADES`.
    """
    found = list(values)
    if not found:
        return Scale(0.0, 1.0)
    low, high = min(found), max(found)
    if from_zero:
        return Scale(min(0.0, low), high * 1.05 or 1.0)
    if log is None:
        log = low > 0 and high / low >= DECADES
    if log and low > 0:
        return Scale(low / 1.1, high * 1.1, True)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    bottom = 0.0 if low >= 0 and low - room < 0 else low - room
    return Scale(bottom, high + room)


def ticks(scale: Scale, count: int = 5) -> list[float]:
    """Return about so many round values on an axis: 1, 2 or 5 times a power of ten; of a logarithmic one, powers of ten."""
    if scale.log:
        return _log_ticks(scale, count)
    step = round_step((scale.high - scale.low) / count)
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, min(last, first + 20) + 1)]


def round_step(least: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is no smaller."""
    if not least > 0 or not math.isfinite(least):
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next((power * factor for factor in (1, 2, 5) if power * factor >= least * (1 - 1e-9)), power * 10)


def _log_ticks(scale: Scale, count: int) -> list[float]:
    first, last = math.ceil(math.log10(scale.low) - 1e-9), math.floor(math.log10(scale.high) + 1e-9)
    powers = list(range(first, last + 1))
    if len(powers) >= 3:
        every = -(-len(powers) // count)
        return [10.0**power for power in powers[::every]]
    few = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
    return [float(f"{value:.6g}") for value in few if scale.low <= value <= scale.high]


def time_ticks(seconds: float, count: int = 6) -> list[float]:
    """Return round times since the beginning, in seconds, of a span of so many seconds."""
    step = next((each for each in TIME_STEPS_S if seconds / each <= count), 0)
    step = step or 86400 * round(round_step(seconds / 86400 / count))
    return [index * float(step) for index in range(int(seconds / step) + 1)]


def step_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round whole steps between two steps."""
    return [step for step in ticks(Scale(low, high), count) if step == int(step)]


def spread(values: Sequence[str]) -> list[float]:
    """Return places 0 to 1 for named values, evenly apart."""
    return [0.5] if len(values) == 1 else [index / (len(values) - 1) for index in range(len(values))]
