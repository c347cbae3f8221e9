"""The progress of a run, for a person: a line redrawn in place on a terminal, written now and then to a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

LINE_EVERY_S = 10.0  # between plain lines: a log of a day stays below 10,000 lines


def display(stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Bar | Lines:
    """Return the kind of display that suits `stream` (default: stdout)."""
    stream = stream or sys.stdout
    return Bar(stream) if stream.isatty() else Lines(stream, clock)


class Lines:
    """Plain lines: the first, one every `LINE_EVERY_S` seconds, and the last."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]):
        self._stream, self._clock, self._due = stream, clock, clock()
        self._whole = False  # the last one is printed

    def begin(self, line: str, done: float, total: float) -> None:
        """Show the starting point, before there is any progress to show."""
        self.say(line)

    def show(self, line: str, done: float, total: float) -> None:
        """Show the progress, in words and, for a bar, as `done` of `total`."""
        if self._clock() >= self._due or (done >= total and not self._whole):
            self._due, self._whole = self._clock() + LINE_EVERY_S, done >= total
            self.say(line)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        # Flushed, because a person follows the log with `tail -f`.
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:  # nobody reads any more
            raise
        except OSError:  # the disk of the log is full: what is shown matters less than what goes on
            pass

    def close(self) -> None:
        pass


class Bar:
    """A line behind a bar, redrawn in place by rich; messages are printed above it, without rich's markup or colours."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        line = TextColumn("{task.fields[line]}", markup=False)
        self._bar = Progress(BarColumn(bar_width=24), line, console=Console(file=stream))
        self._task = self._bar.add_task("", total=None, line="", visible=False)  # until there is something to say
        self._bar.start()

    def begin(self, line: str, done: float, total: float) -> None:
        self.show(line, done, total)

    def show(self, line: str, done: float, total: float) -> None:
        self._bar.update(self._task, line=line, completed=done, total=total, visible=True)

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()  # draws it a last time and shows the cursor again


class ProgressLine:
    """A progress line of steps, metrics and the time left.

    The time is estimated from the mean pace since this attempt began, pauses included.

    Args:
        total: steps of the run.
        initial: steps that were done before this attempt.
        stream, clock: see `display`.
    """

    def __init__(
        self, total: int, initial: int = 0, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._total, self._initial, self._clock, self._began = total, initial, clock, clock()
        self._display = display(stream, clock)
        self._display.begin(f"step {initial}/{total}  waiting for the first step", initial, total)

    def update(self, step: int, **metrics: float) -> None:
        """Show that `step` steps are done.

        `metrics` are numbers; loss, lr and tokens_per_s have formats of their own.
        """
        pace = (self._clock() - self._began) / max(step - self._initial, 1)
        eta = f"eta {format_duration(pace * max(self._total - step, 0))}"
        line = "  ".join([f"step {step}/{self._total}", *format_metrics(metrics), eta])
        self._display.show(line, step, self._total)

    def message(self, text: str) -> None:
        """Print a line that stays."""
        self._display.say(text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._display.close()


def format_metrics(metrics: dict[str, Any]) -> list[str]:
    """Format each metric for a person: `loss 2.31`, `lr 3.0e-4`, `12.3k tok/s`."""
    return [
        _FORMATS.get(name, lambda value, name=name: f"{name} {value:.4g}")(value) for name, value in metrics.items()
    ]


def format_count(value: float) -> str:
    """Format a number of tokens: 950, 12.3k, 4.0M, 1.2G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:  # a value that would round to 1000.0 gets the next letter
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Format seconds as a clock: 1:02, 2:03:04, 3-04:05:06 (days as SLURM writes them)."""
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
