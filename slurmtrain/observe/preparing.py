"""How far `prepare` is, for a person: a live bar on a terminal, now and then a plain line in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from slurmtrain.data.prepare.crew import Tally
from slurmtrain.observe.progress import LINE_EVERY_S, format_count, format_duration


class PreparingLines:
    """Plain lines: one at the start, one every `LINE_EVERY_S` seconds, the last."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock, self._began = stream, clock, clock()
        self._due = self._began

    def show(self, tally: Tally) -> None:
        """Print a line if one is due."""
        if self._clock() >= self._due or tally.units_done == tally.units:
            self._due = self._clock() + LINE_EVERY_S
            self.say(describe(tally, self._clock() - self._began))

    def say(self, text: str) -> None:
        """Print a line; flushed, because a person follows the log with `tail -f`."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to put back."""


class PreparingBar:
    """One line that is drawn again in place, by rich."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._clock, self._began = clock, clock()
        self._bar = RichProgress(
            BarColumn(bar_width=24), TextColumn("{task.fields[said]}", markup=False), console=Console(file=stream)
        )
        self._task = self._bar.add_task("", total=None, said="")
        self._bar.start()

    def show(self, tally: Tally) -> None:
        """Move the bar."""
        said = describe(tally, self._clock() - self._began)
        self._bar.update(self._task, total=tally.total, completed=tally.size, said=said)

    def say(self, text: str) -> None:
        """Print a line above the bar, as it is."""
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draw the bar a last time and show the cursor again."""
        self._bar.stop()


def preparing(stream: TextIO | None = None) -> PreparingLines | PreparingBar:
    """The kind that suits `stream` (default: stdout)."""
    stream = stream or sys.stdout
    return PreparingBar(stream) if stream.isatty() else PreparingLines(stream)


def describe(tally: Tally, seconds: float) -> str:
    """A tally in words, `seconds` after its first: 120.0/800.0 MB  5.1 MB/s  12.3k documents  2 bad  eta 2:13."""
    words = [f"{tally.size / 1e6:.1f}/{tally.total / 1e6:.1f} MB"]
    speed = (tally.size - tally.before) / seconds if seconds > 0 else 0.0
    if speed:
        words.append(f"{speed / 1e6:.1f} MB/s")
    words.append(f"{format_count(tally.documents)} documents")
    if tally.bad:
        words.append(f"{format_count(tally.bad)} bad")
    if speed and tally.size < tally.total:
        words.append(f"eta {format_duration((tally.total - tally.size) / speed)}")
    return "  ".join(words)
