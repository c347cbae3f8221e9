"""A table of points on a terminal or in a file, and a picture of it: the options, and what they do."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.cli.columns import print_table
from slurmtrain.errors import UsageError
from slurmtrain.launch.collect import Table
from slurmtrain.launch.table_files import FORMATS, format_of, short, table_bytes, write_whole
from slurmtrain.records import printable

GAP = 3  # between two columns of a printed table


def add_collect_options(parser: argparse.ArgumentParser) -> None:
    """The options of a verb that collects. `table_of` wants metric and mode, `print_collected` the others."""
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write FILE.csv, .md, .json or .parquet instead of printing"
    )
    parser.add_argument("--format", choices=FORMATS, help="of FILE, whatever its name; without -o, of what is printed")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="compare the points by the best value of this (default: the config's checkpoint.best_metric, else loss)",
    )
    parser.add_argument("--mode", choices=("min", "max"), help="which values of it are good (default: min for a loss)")
    parser.add_argument(
        "--plot",
        metavar="OUT",
        help="draw that value over each varied key: OUT.png, OUT.svg, or - for plain text on the terminal",
    )


def print_collected(table: Table, options: argparse.Namespace) -> None:
    """Print, write and draw a table as the options of `add_collect_options` say.

    Raises:
        UsageError: a format or a file that is not possible.
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
        from slurmtrain.launch import plot

        if options.plot == "-":
            print(plot.drawn_as_text(table), end="")
        else:
            plot.draw(table, Path(options.plot))
            print(f"{options.plot}: {table.goal.metric if table.goal else ''} over {', '.join(table.varied)}")


def _print(table: Table) -> None:
    header = [printable(name) for name in table.columns]
    rows = [[printable(short(cell)) for cell in row] for row in table.rows]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    least = 3 + len(table.varied) if table.goal is None else table.columns.index(table.goal.column) + 1
    count = _columns_that_fit([header, *rows], width, least)
    print_table(header[:count], [row[:count] for row in rows])
    if count < len(table.columns):
        print(f"\n{len(table.columns) - count} more columns have no room: {', '.join(header[count:])}")


def _columns_that_fit(rows: Sequence[Sequence[str]], width: int | None, least: int) -> int:
    """How many of the columns, from the left, fit into a terminal; never fewer than `least`. No width: all."""
    widths = [max(map(len, column)) + GAP for column in zip(*rows, strict=True)]
    if width is None:
        return len(widths)
    return max(least, sum(sum(widths[: count + 1]) <= width for count in range(len(widths))))
