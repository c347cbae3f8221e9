"""The tables of a page as CSV files, one for each: those of sections, and all points of each chart's curves."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurmtrain.errors import UsageError
from slurmtrain.report.page.charts import Chart
from slurmtrain.report.page.contents import Page
from slurmtrain.report.page.units import slug
from slurmtrain.report.table_files import write_whole


def write_all(page: Page, folder: Path) -> list[Path]:
    """Write every table of a page into a folder, which is made if need be, and return the files.

    Raises:
        UsageError: they cannot be written.
    """
    make_folder(folder)
    written = []
    for chart in page.charts:
        path = folder / f"{slug(chart.key)}.csv"
        write_whole(path, _csv(*_curve_rows(chart)))
        written.append(path)
    for section in page.sections:
        for each in section.grids:
            if each.table.rows:
                path = folder / f"{slug(section.key)}-{slug(each.title)}.csv"
                write_whole(path, _csv(each.table.header, each.table.rows))
                written.append(path)
    return written


def make_folder(folder: Path) -> None:
    """Make a folder unless it is there.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}", hint="give another folder") from None


def _curve_rows(chart: Chart) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
    """Return one row for each step that a curve of the chart has, with all digits."""
    names = chart.table.header[1:]
    by_step = [dict(zip(series.steps.tolist(), series.values.tolist(), strict=True)) for series in chart.series]
    steps = sorted(set().union(*by_step))
    rows = ((f"{step:.0f}", *(_exact(values.get(step)) for values in by_step)) for step in steps)
    return ("step", *names), rows


def _exact(value: float | None) -> str:
    if value is None:
        return ""
    return repr(value) if math.isfinite(value) else str(value)


def _csv(header: Sequence[str], rows: Iterable[Sequence[str]]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([_cell(cell) for cell in header])
    writer.writerows([_cell(cell) for cell in row] for row in rows)
    return out.getvalue().encode("utf-8", errors="backslashreplace")


def _cell(text: str) -> str:
    """Return a cell that a spreadsheet takes for text unless it is a number: a formula of somebody else would be run."""
    return (
        f"'{text}"
        if text[:1] in ("=", "+", "-", "@") and not re.fullmatch(r"-|[-+]?[\d.,]+(e[-+]?\d+)?|-?(inf|nan)", text)
        else text
    )
