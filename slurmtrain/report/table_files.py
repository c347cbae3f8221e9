"""A table as CSV, Markdown or JSON, written to a file atomically."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from slurmtrain.errors import UsageError
from slurmtrain.report.collect import Cell, Table
from slurmtrain.system.files import write_where_named
from slurmtrain.system.json_text import json_text

SUFFIXES = {".csv": "csv", ".md": "markdown", ".markdown": "markdown", ".json": "json"}


def format_of(path: Path) -> str:
    """Return the format that a file's name asks for.

    Raises:
        UsageError: the name has no known suffix.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"the name {path.name!r} does not say how to write the table",
            hint=f"end it in {', '.join(SUFFIXES)}, or add --format",
        )
    return SUFFIXES[path.suffix.lower()]


def table_bytes(table: Table, kind: str) -> bytes:
    """Return the content of a file of that format."""
    text = {"csv": _csv, "markdown": _markdown, "json": _json}[kind](table)
    return text.encode("utf-8", errors="backslashreplace")  # a path may hold bytes that are no Unicode


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old or the new one, never half of it.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_where_named(path, content)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            hint="name a file in a folder that exists and that you may write to",
        ) from None


def short(cell: Cell) -> str:
    """Format a cell for a person: five digits of a number, nothing for an unknown value."""
    if isinstance(cell, float):
        return f"{cell:.5g}"
    return plain(cell)


def plain(cell: Cell) -> str:
    """Format a cell with all its digits: reading them gives the same bits. An unknown value is empty."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return repr(cell) if isinstance(cell, float) else str(cell)


def _csv(table: Table) -> str:
    """Format the table by RFC 4180, with a header: CRLF, quotes if needed.

    NaN is `nan`, the infinities `inf` and `-inf`.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(table.columns)
    writer.writerows([plain(cell) for cell in row] for row in table.rows)
    return out.getvalue()


def _markdown(table: Table) -> str:
    """Format the table as GitHub does: one line per row, whatever is in a cell."""
    head = [_escape(name) for name in table.columns]
    rows = [[_escape(short(cell)) for cell in row] for row in table.rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def _escape(cell: str) -> str:
    return re.sub(r"([\\|*<`\[\]])", r"\\\1", " ".join(cell.split()))


def _json(table: Table) -> str:
    """Format one object per row, by column. An unknown value is null, not a number is "NaN"."""
    return json_text([dict(zip(table.columns, row, strict=True)) for row in table.rows])
