"""What a page holds, whatever it is about: sentences, tiles, and sections of charts and tables. All text is plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.report.page.charts import Chart, Parallel, Scatter, Share, Table, Timeline

_NUMBER = re.compile(
    r"[-+]?(?:[\d,]*\.?\d+(?:e[-+]?\d+)?|nan|inf)(?: ?[%A-Za-z/²°]{1,12}(?: \d+ [a-z]{1,3})?)?", re.IGNORECASE
)


@dataclass(frozen=True)
class Tile:
    """One number that a person looks for first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ShareBar:
    """A whole and its parts."""

    title: str
    parts: tuple[Share, ...]


@dataclass(frozen=True)
class Grid:
    """A table of a section.

    Attributes:
        folded: it is opened by a click.
        sortable: a click on a column's name sorts by it.
        marked: numbers of rows that stand out.
    """

    title: str
    table: Table
    folded: bool = False
    sortable: bool = False
    marked: frozenset[int] = frozenset()

    @property
    def numeric(self) -> frozenset[int]:
        """The columns of numbers, which are aligned at the right."""
        found = set()
        for index in range(len(self.table.header)):
            cells = [row[index] for row in self.table.rows if row[index] not in ("", "-")]
            if cells and all(_NUMBER.fullmatch(cell) for cell in cells):
                found.add(index)
        return frozenset(found)


@dataclass(frozen=True)
class Section:
    """One section of a page; `missing` says why there is nothing to show, if so."""

    key: str
    title: str
    about: str = ""
    charts: tuple[Chart, ...] = ()
    bars: tuple[ShareBar, ...] = ()
    timeline: Timeline | None = None
    parallel: Parallel | None = None
    scatters: tuple[Scatter, ...] = ()
    grids: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()
    text: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Page:
    """A whole page.

    Attributes:
        state: one word on the state, and `mood` ("good", "bad", "busy" or "still") that colours it.
        sentences: what this is, how far it got, what was lost and why.
        advice: what to do.
        alive: it still changes.
        slug: names the files that are made of it.
        sweep: name of the sweep of which the run is a point; "" if it is none.
    """

    title: str
    slug: str
    state: str
    mood: str
    sentences: tuple[str, ...]
    advice: tuple[str, ...]
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    made: str
    alive: bool = False
    troubles: tuple[str, ...] = ()
    sweep: str = ""

    @property
    def charts(self) -> list[Chart]:
        """All charts of curves, in the order of the page."""
        return [chart for section in self.sections for chart in section.charts]


def grid(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    folded: bool = False,
    sortable: bool = False,
    marked: frozenset[int] = frozenset(),
) -> Grid:
    """Return a table of a section."""
    cells = tuple(tuple(row) for row in rows)
    return Grid(title, Table(tuple(header), cells, caption or title), folded, sortable, marked)
