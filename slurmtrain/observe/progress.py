"""The progress of a run, or of the preparation of data, for a person: a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from slurmtrain.data.prepare.worker_pool import Tally

LINE_EVERY_S = 10.0  # between plain lines: a log of a day stays below 10,000 lines


class Lines:
    """Plain lines: the first, one every `LINE_EVERY_S` seconds, and the last.

    Args:
        stream: default: stdout.
        clock: seconds, monotonic.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock, self._due = stream or sys.stdout, clock, clock()
        self._whole = False  # the last one is printed

    def show(self, line: str, done: float, total: float) -> None:
        """Show the progress in words; it is `done` of `total`."""
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


class ProgressLine:
    """A progress line of steps, metrics and the time left.

    The time is estimated from the mean pace since this attempt began, pauses included.

    Args:
        total: steps of the run.
        initial: steps that were done before this attempt.
        stream, clock: see `Lines`.
    """

    def __init__(
        self, total: int, initial: int = 0, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._total, self._initial, self._clock, self._began = total, initial, clock, clock()
        self._lines = Lines(stream, clock)
        self._lines.say(f"step {initial}/{total}  waiting for the first step")

    def update(self, step: int, **metrics: float) -> None:
        """Show that `step` steps are done.

        `metrics` are numbers; loss, lr and tokens_per_s have formats of their own.
        """
        pace = (self._clock() - self._began) / max(step - self._initial, 1)
        eta = f"eta {format_duration(pace * max(self._total - step, 0))}"
        line = "  ".join([f"step {step}/{self._total}", *format_metrics(metrics), eta])
        self._lines.show(line, step, self._total)

    def message(self, text: str) -> None:
        """Print a line that stays."""
        self._lines.say(text)


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


class Preparing:
    """The progress of `prepare`: bytes, documents and the time left. `stream` and `clock`: see `Lines`."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began, self._lines = clock, clock(), Lines(stream, clock)

    def show(self, tally: Tally) -> None:
        """Show the progress: 120.0/800.0 MB  5.1 MB/s  12.3k documents  2 bad  eta 2:13."""
        words, seconds = [f"{tally.size / 1e6:.1f}/{tally.total / 1e6:.1f} MB"], self._clock() - self._began
        speed = (tally.size - tally.before) / seconds if seconds > 0 else 0.0
        if speed:
            words.append(f"{speed / 1e6:.1f} MB/s")
        words.append(f"{format_count(tally.documents)} documents")
        if tally.bad:
            words.append(f"{format_count(tally.bad)} bad")
        if speed and tally.size < tally.total:
            words.append(f"eta {format_duration((tally.total - tally.size) / speed)}")
        self._lines.show("  ".join(words), tally.size, tally.total)
