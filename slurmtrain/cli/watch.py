"""`--watch`: redraw the same table in place on the terminal, without overloading the controller."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmtrain.errors import UsageError
from slurmtrain.report.progress import roughly

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

EVERY_S = 5.0
SHARE = 0.1  # greatest share of time spent on asking: after an answer that took a second, ten seconds pass
SILENT_AT_MOST_S = 300.0  # between two questions to a controller that does not answer


@dataclass(frozen=True)
class View:
    """The result of one look.

    Attributes:
        lines: lines to show, the most important first; those below the terminal's end are not shown.
        doubts: reasons why SLURM could not be asked.
        over: whether nothing will change any more.
    """

    lines: list[str]
    doubts: list[str]
    over: bool


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `--watch`."""
    parser.add_argument(
        "-w",
        "--watch",
        action="store_true",
        help="redraw the table in place until everything has ended; Ctrl-C stops",
    )
    parser.add_argument(
        "--every",
        type=float,
        default=EVERY_S,
        metavar="SECONDS",
        help=f"seconds between updates (default: {EVERY_S:g})",
    )


def check_watch_options(options: argparse.Namespace) -> None:
    """Check the options of `--watch`.

    Raises:
        UsageError: they are not possible.
    """
    if not options.every >= 1:
        raise UsageError(f"--every {options.every:g}: expected at least 1 second")
    if options.watch and options.json:
        raise UsageError("--watch and --json exclude each other", hint="a program can call status repeatedly")
    if options.watch and not sys.stdout.isatty():
        raise UsageError("--watch needs a terminal", hint="leave it out, or use --json")


def watch(
    look: Callable[[], View],
    every_s: float,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show what `look` returns until it is over. Ctrl-C is passed on, with the terminal as it was.

    While SLURM does not answer, the last view stays, with its age.

    Args:
        every_s: seconds between two looks, if they are quick.
    """
    from rich.console import Console
    from rich.live import Live

    console = console or Console(highlight=False)
    screen, failures = _Screen(console, clock), 0
    with Live(console=console, get_renderable=screen.render, refresh_per_second=1) as live:
        while True:
            began = clock()
            view = look()
            took_s = clock() - began
            failures = failures + 1 if view.doubts else 0
            screen.show(view, began)
            live.refresh()
            if view.over:
                return 0
            sleep(pause_s(every_s, took_s, failures))


def pause_s(every_s: float, took_s: float, failures: int) -> float:
    """Return the seconds until the next look, by the duration of the last one and the failures so far."""
    patience_s = min(every_s * 2.0 ** min(failures, 10), max(every_s, SILENT_AT_MOST_S))
    return max(patience_s, took_s * (1 / SHARE - 1))


class _Screen:
    """The content of the terminal. Another thread draws it, too, so that its age grows while SLURM does not answer."""

    def __init__(self, console: Console, clock: Callable[[], float]):
        self._console, self._clock = console, clock
        self._shown: tuple[View, float] | None = None
        self._doubts: list[str] = []

    def show(self, view: View, seen: float) -> None:
        self._doubts = view.doubts
        if self._shown is None or not view.doubts:
            self._shown = view, seen

    def render(self) -> Text:
        from rich.text import Text

        return Text("\n".join(self._lines(self._console.height - 1)), no_wrap=True, overflow="ellipsis")

    def _lines(self, height: int) -> list[str]:
        if self._shown is None:
            return ["asking SLURM ..."]
        view, seen = self._shown
        room = height if view.over else height - 2
        lines = (
            view.lines
            if len(view.lines) <= room
            else [*view.lines[: room - 1], f"... {len(view.lines) - room + 1} more"]
        )
        if view.over:
            return lines
        age = roughly(max(0.0, self._clock() - seen))
        words = f"as of {time.strftime('%H:%M:%S', time.localtime(seen))}, {age} ago"
        words += f"; SLURM cannot be asked: {'; '.join(self._doubts)}" if self._doubts else "; Ctrl-C leaves"
        return [*lines, "", words]
