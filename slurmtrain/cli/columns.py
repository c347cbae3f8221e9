"""Tables of runs and of points, sentences as wide as the terminal, and --watch, which draws a table again and again."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import UsageError
from slurmtrain.system.durations import roughly
from slurmtrain.system.records import printable

if TYPE_CHECKING:
    from rich.console import Console

    from slurmtrain.report.status.state import RunState


GAP = 3  # between two columns
LONGEST_RULE = 120  # in a file or pipe, where the longest sentence is one line
LONGEST_REMARK = 140  # of a run in a file or pipe; `status RUN` and --json have all of it
LEAST_ROOM = 30  # least width of the last column beside the others
INDENT = 4  # indentation of the last column below the others
PROGRESS = ("step", "loss", "valid loss", "tokens/s", "ETA")
# Columns that a narrow terminal leaves out, in this order.
LEAST_WANTED = (
    *("queue h", "checkpoint", "evaluation", "startup", "idle end", "between", "unknown", "lost"),
    *("GPUs idle", "redone", "hung", "attempts", "valid loss", "tokens/s", "name", "run", "loss"),
)


def progress_cells(now: RunState) -> list[str]:
    """Return the cells below PROGRESS; a cell is empty if its value is not known."""
    progress, tokens = now.progress, ""
    if progress.tokens_per_s is not None:
        from slurmtrain.observe.progress import format_count

        tokens = format_count(progress.tokens_per_s)
    of = "" if progress.steps is None else f"/{progress.steps}"
    return [
        "" if progress.step is None else f"{progress.step}{of}",
        *(
            "" if loss is None else f"{loss:.4f}" if abs(loss) < 1000 else f"{loss:.3g}"
            for loss in (progress.loss, progress.valid_loss)
        ),
        tokens,
        "" if progress.eta_s is None else roughly(progress.eta_s),
    ]


def remark(now: RunState) -> str:
    """Return what there is to say of a run in a row, beyond the word for its state: whole on a terminal, which wraps it."""
    text = "" if now.explanation == now.status else now.explanation
    return text if terminal_width() is not None else textwrap.shorten(text, LONGEST_REMARK, placeholder=" ...")


def urgency(now: RunState) -> int:
    """Return the sort key by which runs that run come first, then those that wait, then those that have ended."""
    return 2 if not now.alive else int(now.waits)


def counts(found: Iterable[RunState]) -> dict[str, int]:
    """Count the runs in each state, the most frequent first."""
    return dict(Counter(now.status for now in found).most_common())


def summary(by_word: dict[str, int]) -> str:
    """Describe how many runs are in each state."""
    return ", ".join(f"{number} {word}" for word, number in by_word.items())


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of a table with aligned columns, without columns of PROGRESS that are empty.

    It is written by hand, because rich takes longer over a thousand rows than everything else together.

    Args:
        width: width of the terminal. The last column wraps in it; if it has no room, it comes below the others, and the
            least important columns are left out. None: a row is a line.
    """
    columns = [[one_line(cell) for cell in column] for column in zip(header, *rows, strict=True)]
    first, *middle, last = [column for column in columns if column[0] not in PROGRESS or any(column[1:])]
    room = sys.maxsize if width is None else width
    for name in LEAST_WANTED:
        if width is not None and sum(max(map(len, column)) + GAP for column in (first, *middle)) > width:
            middle = [column for column in middle if column[0] != name]
    sizes = [max(map(len, column)) + GAP for column in (first, *middle)]
    beside = sum(sizes)
    indent = beside if room - beside >= LEAST_ROOM else INDENT
    lines = []
    for *cells, text in zip(first, *middle, last, strict=True):
        begin = "".join(cell.ljust(size) for cell, size in zip(cells, sizes, strict=True))
        parts = [text]
        if beside + len(text) > room:
            parts = textwrap.wrap(text, max(LEAST_ROOM, room - indent), break_on_hyphens=False)
            if indent != beside:
                parts.insert(0, "")
        lines += [(begin + parts[0]).rstrip(), *(" " * indent + part for part in parts[1:])]
    rule = "-" * min(max(map(len, lines)), LONGEST_RULE if width is None else width)
    return [lines[0], rule, *lines[1:]]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the table, as wide as the terminal; in a file or pipe each row is one line."""
    print("\n".join(table_lines(header, rows, terminal_width())))


def sentence_lines(sentence: str, indent: int, width: int | None) -> list[str]:
    """Return a sentence as lines of a terminal, of which the later ones are indented; one line if `width` is None."""
    if width is None:
        return [sentence]
    least = max(width, indent + LEAST_ROOM)
    return textwrap.wrap(
        sentence, least, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def print_sentence(sentence: str, indent: int) -> None:
    """Print a sentence, as wide as the terminal; in a file or pipe it is one line."""
    print("\n".join(sentence_lines(sentence, indent, terminal_width())))


def terminal_width() -> int | None:
    """Return the width in letters; None in a file or pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def one_line(cell: str) -> str:
    """Replace line ends and everything else that could control a terminal: a program's last words may hold anything."""
    return (cell if cell.isprintable() else "".join(each if each.isprintable() else " " for each in cell)).rstrip()


SHARE = 0.1  # greatest share of time spent on asking: after an answer that took a second, ten seconds pass
SILENT_AT_MOST_S = 300.0  # between two questions to a controller that does not answer


@dataclass(frozen=True)
class View:
    """The result of one look.

    Attributes:
        lines: lines to show, the most important first; those below the terminal's end are not shown by --watch.
        doubts: reasons why SLURM could not be asked.
        over: whether nothing will change any more.
    """

    lines: list[str]
    doubts: list[str]
    over: bool = True


def show(options: argparse.Namespace, look: Callable[[], View], value: Callable[[], Any]) -> int:
    """Print `value` with --json, or else what `look` returns, with --watch again and again until it is over.

    Raises:
        UsageError: --watch is not possible.
    """
    if options.watch and options.json:
        raise UsageError("--watch and --json exclude each other", hint="a program can call status repeatedly")
    if options.watch and not sys.stdout.isatty():
        raise UsageError("--watch needs a terminal", hint="leave it out, or use --json")
    if options.watch:
        return watch(look, options.every)
    if options.json:
        print_json(value())
        return 0
    view = look()
    print("\n".join(view.lines))
    print_doubts(view.doubts)
    return 0


def doubts(found: Iterable[RunState]) -> list[str]:
    """Return the reasons why SLURM could not be asked, each once."""
    return list(dict.fromkeys(now.slurm_error for now in found if now.slurm_error))


def print_doubts(reasons: Iterable[str]) -> None:
    """Print the reasons why SLURM could not be asked."""
    for reason in reasons:
        print()
        print_sentence(f"SLURM cannot be asked: {printable(reason)}", 2)


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
    from rich.text import Text

    console = console or Console(highlight=False)
    shown, seen, failures = View([], []), 0.0, 0
    with Live(Text("asking SLURM ..."), console=console, auto_refresh=False) as live:
        while True:
            began = clock()
            view = look()
            took_s = clock() - began
            failures = failures + 1 if view.doubts else 0
            if not view.doubts or not shown.lines:
                shown, seen = view, began
            age = roughly(max(0.0, clock() - seen))
            note = f"SLURM cannot be asked: {'; '.join(view.doubts)}" if view.doubts else "Ctrl-C leaves"
            end = ["", f"as of {time.strftime('%H:%M:%S', time.localtime(seen))}, {age} ago; {note}"]
            end = [] if view.over else end
            lines, room = shown.lines, console.height - 1 - len(end)
            if len(lines) > room:
                lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more"]
            live.update(Text("\n".join([*lines, *end]), no_wrap=True, overflow="ellipsis"), refresh=True)
            if view.over:
                return 0
            patience_s = min(every_s * 2.0 ** min(failures, 10), max(every_s, SILENT_AT_MOST_S))
            sleep(max(patience_s, took_s * (1 / SHARE - 1)))
