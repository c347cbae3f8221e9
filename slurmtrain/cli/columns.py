"""Tables of runs and of points, and sentences, as wide as the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from slurmtrain.system.records import printable
from slurmtrain.system.texts import roughly

if TYPE_CHECKING:
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
    *("redone", "hung", "attempts", "valid loss", "tokens/s", "name", "run", "loss"),
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


def print_doubts(found: Iterable[RunState]) -> None:
    """Print the reasons why SLURM could not be asked, each once."""
    for reason in dict.fromkeys(now.slurm_error for now in found if now.slurm_error):
        print()
        print_sentence(f"SLURM cannot be asked: {printable(reason)}", 2)
