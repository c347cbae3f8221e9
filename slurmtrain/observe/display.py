"""A progress line for a person: redrawn in place on a terminal, written now and then to a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

LINE_EVERY_S = 10.0  # between plain lines: a log of a day stays below 10,000 lines


class ProgressDisplay(Protocol):
    """The interface of both kinds of progress line."""

    def begin(self, line: str, done: float, total: float) -> None:
        """Show the starting point, before there is any progress to show."""

    def show(self, line: str, done: float, total: float) -> None:
        """Show the progress, in words and, for a bar, as `done` of `total`."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def display(stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> ProgressDisplay:
    """Return the kind of display that suits `stream` (default: stdout)."""
    stream = stream or sys.stdout
    return _Bar(stream) if stream.isatty() else _Lines(stream, clock)


class _Lines:
    """Plain lines: the first, one every `LINE_EVERY_S` seconds, and the last."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]):
        self._stream, self._clock, self._due = stream, clock, clock()
        self._whole = False  # the last one is printed

    def begin(self, line: str, done: float, total: float) -> None:
        self.say(line)

    def show(self, line: str, done: float, total: float) -> None:
        if self._clock() >= self._due or (done >= total and not self._whole):
            self._due, self._whole = self._clock() + LINE_EVERY_S, done >= total
            self.say(line)

    def say(self, text: str) -> None:
        # Flushed, because a person follows the log with `tail -f`.
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:  # nobody reads any more
            raise
        except OSError:  # the disk of the log is full: what is shown matters less than what goes on
            pass

    def close(self) -> None:
        pass


class _Bar:
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
