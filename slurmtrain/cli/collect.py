"""A table of points on a terminal or in a file, and a picture of it: the options of a verb that collects, and their effect."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.cli.columns import GAP, print_table, terminal_width
from slurmtrain.errors import UsageError
from slurmtrain.report.collect import Table
from slurmtrain.report.table_files import FORMATS, format_of, short, table_bytes, write_whole
from slurmtrain.system.records import printable

LEFT_OUT_FIRST = ("run", "step", "state")


def add_collect_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verb that collects. `table_of` takes metric and mode, `print_collected` the others."""
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write FILE.csv, .md, .json or .parquet instead of printing"
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="format of FILE, whatever its suffix; without -o, of the printed table"
    )
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="compare the points by the best value of this metric (default: the config's checkpoint.best_metric, else loss)",
    )
    parser.add_argument(
        "--mode", choices=("min", "max"), help="whether lower or higher values are better (default: min for a loss)"
    )
    parser.add_argument(
        "--plot",
        metavar="OUT",
        help="plot that value over each varied key: OUT.png, OUT.svg, or - for plain text on the terminal",
    )


def print_collected(table: Table, options: argparse.Namespace) -> None:
    """Print, write and draw a table as the options of `add_collect_options` say.

    Raises:
        UsageError: a format or a file is not possible.
    """
    if options.output is not None:
        write_whole(options.output, table_bytes(table, options.format or format_of(options.output)))
        print(f"{options.output}: {len(table.rows)} points, {len(table.columns)} columns")
    elif options.format == "parquet":
        raise UsageError("Parquet is nothing for a terminal", hint="add -o FILE.parquet")
    elif options.format is not None:
        sys.stdout.write(table_bytes(table, options.format).decode())
    elif options.plot is None:
        _print(table)
    if options.plot is not None:
        from slurmtrain.report import plot

        if options.plot == "-":
            print(plot.drawn_as_text(table), end="")
        else:
            plot.draw(table, Path(options.plot))
            print(f"{options.plot}: {table.goal.metric if table.goal else ''} over {', '.join(table.varied)}")


def _print(table: Table) -> None:
    header = [printable(name) for name in table.columns]
    rows = [[printable(short(cell)) for cell in row] for row in table.rows]
    wanted = len(table.varied) + 4 if table.goal is None else table.columns.index(table.goal.column) + 1
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    chosen = columns_that_fit(header, widths, wanted, terminal_width())
    print_table([header[i] for i in chosen], [[row[i] for i in chosen] for row in rows])
    left_out = [name for i, name in enumerate(header) if i not in chosen]
    if left_out:
        print(f"\n{len(left_out)} more columns have no room: {', '.join(left_out)}")


def columns_that_fit(header: Sequence[str], widths: Sequence[int], wanted: int, width: int | None) -> list[int]:
    """Return the numbers of the columns to print in a terminal that is `width` letters wide (None: all of them).

    The first `wanted` columns are the essential ones, up to the metric by which points are compared. If even these do
    not fit, the run's id, its step and its state are left out in turn; if they do, as many others are added as fit.
    """
    if width is None:
        return list(range(len(header)))
    chosen = list(range(wanted))

    def fits(columns: Sequence[int]) -> bool:
        return sum(widths[i] for i in columns) + GAP * (len(columns) - 1) <= width

    for name in LEFT_OUT_FIRST:
        if not fits(chosen):
            chosen = [i for i in chosen if header[i] != name]
    for more in range(wanted, len(header)):
        if not fits([*chosen, more]):
            break
        chosen.append(more)
    return chosen
