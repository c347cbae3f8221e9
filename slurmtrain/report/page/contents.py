"""What a page holds, whatever it is about: sentences, and sections of charts and tables. All text is plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(
    r"[-+]?(?:[\d,]*\.?\d+(?:e[-+]?\d+)?|nan|inf)(?: ?[%A-Za-z/²°]{1,12}(?: \d+ [a-z]{1,3})?)?", re.IGNORECASE
)


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        rows: cells are text already.
        folded: it is opened by a click.
        sortable: a click on a column's name sorts by it.
        marked: number of the row that stands out.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    sortable: bool = False
    marked: int | None = None

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether it holds numbers, which are aligned at the right."""
        columns = [
            [row[index] for row in self.rows if row[index] not in ("", "-")] for index in range(len(self.header))
        ]
        return [bool(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in columns]


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        key: names it within the page.
        figure: `data` and `layout` as plotly has them; its colours are variables of the style sheet, such as "--c0".
        unit: of the values.
        legend: (colour, words) of each thing drawn; "" in place of a colour where the words begin with a symbol.
        over_steps: its curves are over the steps, which all such charts of a page show alike.
        note: what a person should know who sees it.
        summary: what it shows, in a sentence, for those who do not see it.
        scalable: its values are positive, so that a logarithmic scale can be chosen.
        wide: it takes the whole width of the page.
    """

    key: str
    title: str
    figure: Mapping[str, Any]
    unit: str = ""
    legend: Sequence[tuple[str, str]] = ()
    over_steps: bool = False
    note: str = ""
    summary: str = ""
    scalable: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """One section of a page; `missing` says why there is nothing to show, if so."""

    key: str
    title: str
    about: str = ""
    charts: Sequence[Chart] = ()
    grids: Sequence[Grid] = ()
    notes: Sequence[str] = ()
    missing: str = ""


@dataclass(frozen=True)
class Page:
    """A whole page.

    Attributes:
        slug: names the file that is made of it.
        state: one word on the state, and `mood` ("good", "bad", "busy" or "still") that colours it.
        sentences: what this is, how far it got, what was lost and why.
        advice: what to do.
        made: when, and in which time zone its times are.
        alive: it still changes.
        troubles: why parts could not be read.
        sweep: name of the sweep of which the run is a point; "" if it is none.
    """

    title: str
    slug: str
    state: str
    mood: str
    sentences: Sequence[str]
    advice: Sequence[str]
    sections: Sequence[Section]
    made: str
    alive: bool = False
    troubles: Sequence[str] = ()
    sweep: str = ""

    @property
    def charts(self) -> list[Chart]:
        """All charts, in the order of the page."""
        return [chart for section in self.sections for chart in section.charts]
