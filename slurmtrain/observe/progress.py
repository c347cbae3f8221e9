"""How far it is, for a person: a live bar on a terminal, now and then a plain line in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

LINE_EVERY_S = 10.0  # between plain lines: a log of a day stays below 10,000 lines


class Progress(Protocol):
    """What both kinds offer. `metrics` are numbers; loss, lr and tokens_per_s have a format of their own."""

    def update(self, step: int, **metrics: float) -> None:
        """`step` steps are done."""

    def message(self, text: str) -> None:
        """Print a line of its own, above the bar."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def progress(
    total: int, initial: int = 0, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Progress:
    """The kind of progress that suits `stream` (default: stdout), for steps `initial` + 1 ... `total`."""
    stream = stream or sys.stdout
    kind = BarProgress if stream.isatty() else LineProgress
    return kind(total, initial, stream, clock)


class LineProgress:
    """Plain lines: the first step, the last, and one every `LINE_EVERY_S` seconds."""

    def __init__(self, total: int, initial: int, stream: TextIO, clock: Callable[[], float]):
        self._total, self._stream, self._clock = total, stream, clock
        self._eta = _Eta(total, initial, clock)
        self._due = clock()

    def update(self, step: int, **metrics: float) -> None:
        """Print a line if one is due."""
        if self._clock() >= self._due or step >= self._total:
            self._due = self._clock() + LINE_EVERY_S
            eta = f"eta {format_duration(self._eta.seconds(step))}"
            self.message("  ".join([f"step {step}/{self._total}", *format_metrics(metrics), eta]))

    def message(self, text: str) -> None:
        """Print a line; flushed, because a person follows the log with `tail -f`."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to put back."""


class BarProgress:
    """One line that is drawn again in place, by rich."""

    def __init__(self, total: int, initial: int, stream: TextIO, clock: Callable[[], float]):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._eta = _Eta(total, initial, clock)
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[metrics]}", markup=False),
            console=Console(file=stream),
        )
        self._task = self._bar.add_task("", total=total, completed=initial, metrics="")
        self._bar.start()

    def update(self, step: int, **metrics: float) -> None:
        """Move the bar."""
        eta = f"eta {format_duration(self._eta.seconds(step))}"
        self._bar.update(self._task, completed=step, metrics="  ".join([*format_metrics(metrics), eta]))

    def message(self, text: str) -> None:
        """Print a line above the bar, as it is: no markup, no colours of rich's own."""
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draw the bar a last time and show the cursor again."""
        self._bar.stop()


class _Eta:
    """The time left, from the mean pace since this attempt began, pauses included."""

    def __init__(self, total: int, initial: int, clock: Callable[[], float]):
        self._total, self._initial, self._clock, self._begin = total, initial, clock, clock()

    def seconds(self, step: int) -> float:
        done = max(step - self._initial, 1)
        return (self._clock() - self._begin) / done * max(self._total - step, 0)


def format_metrics(metrics: dict[str, Any]) -> list[str]:
    """Each metric as a person reads it: `loss 2.31`, `lr 3.0e-4`, `12.3k tok/s`."""
    return [
        _FORMATS.get(name, lambda value, name=name: f"{name} {value:.4g}")(value) for name, value in metrics.items()
    ]


def format_count(value: float) -> str:
    """A number of tokens with its size: 950, 12.3k, 4.0M, 1.2G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:  # what would round to 1000.0 belongs to the next letter
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Seconds as a clock: 1:02, 2:03:04, 3-04:05:06 (days as SLURM writes them)."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.3f}",
    "lr": lambda value: f"lr {value:.1e}".replace("e-0", "e-"),
    "tokens_per_s": lambda value: f"{format_count(value)} tok/s",
}
