"""What a page holds, and how it becomes one HTML file that loads nothing and sends nothing.

Everything that comes from a run directory is somebody else's text. jinja2 escapes all of it; figures are JSON without `<`,
`>` and `&`; and a Content-Security-Policy names the digests of plotly.js and of our own script, so that a browser would run
nothing else even if something had slipped through. plotly.js sets styles, which load nothing under this policy.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from slurmtrain.errors import UsageError
from slurmtrain.system.records import printable

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Grid:
    """A table. Its cells are text already.

    Attributes:
        sortable: a click on a column's name sorts by it.
        marked: number of the row that stands out.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    sortable: bool = False
    marked: int | None = None


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        key: names it within the page.
        figure: `data` and `layout` as plotly has them; its colours are variables of the style sheet, such as "--c0".
        unit: of the values.
        over_steps: its curves are over the steps, which all such charts of a page show alike.
        note: what a person should know who sees it.
        summary: what it shows, in a sentence, for those who do not see it.
        scalable: a logarithmic scale can be chosen.
        wide: it takes the whole width of the page.
    """

    key: str
    title: str
    figure: Mapping[str, Any]
    unit: str = ""
    over_steps: bool = False
    note: str = ""
    summary: str = ""
    scalable: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """One section of a page: sentences, such as why there is nothing to show, charts and tables."""

    key: str
    title: str
    sentences: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    grids: Sequence[Grid] = ()


@dataclass(frozen=True)
class Page:
    """A whole page. All text is plain text.

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


def render(page: Page, *, refresh_s: float | None = None, library: bool = True) -> str:
    """Return the page as HTML, in ASCII: what is no ASCII letter is a character reference, whatever reads the file.

    Args:
        refresh_s: it is served, and asks its server for a newer one so often; None: it is a file, and asks nobody.
        library: with plotly.js, which is most of the page; without, for a browser that has it already.

    Raises:
        UsageError: plotly is not installed.
    """
    text = _template().render(
        page=page,
        policy=policy(served=refresh_s is not None),
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        refresh_s=f"{refresh_s:g}" if refresh_s is not None else None,
    )
    whole = text.encode("ascii", "xmlcharrefreplace").decode()
    return whole.replace("<script></script>", f"<script>{plotly_js()}</script>", 1) if library else whole


@functools.cache
def policy(*, served: bool) -> str:
    """Return the Content-Security-Policy: two scripts alone, and no request, or only to the page's server."""
    digests = [hashlib.sha256(script.encode()).digest() for script in (plotly_js(), _asset("page.js"))]
    scripts = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    requests = "; connect-src 'self'" if served else ""
    return f"default-src 'none'; script-src {scripts}; {rest}{requests}"


@functools.cache
def plotly_js() -> str:
    """Return plotly.js in ASCII, from the package plotly, of which nothing is imported: that would take a second.

    Raises:
        UsageError: it is not installed.
    """
    found = importlib.util.find_spec("plotly")
    try:
        folder = Path((found.submodule_search_locations or [""])[0]) if found is not None else Path()
        text = (folder / "package_data/plotly.min.js").read_text(encoding="utf-8")
    except OSError:
        raise UsageError("the page needs plotly, which is not installed", hint="pip install plotly") from None
    return text.encode("ascii", "backslashreplace").decode()


@functools.cache
def _template() -> jinja2.Template:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # Text is cleaned where it is read, and here once more.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made.get_template("page.html.j2")


@functools.cache
def _asset(name: str) -> str:
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    assert text.isascii(), f"{name} has a letter that would become a character reference, which scripts do not read"
    assert "</" not in text, f"{name} would end its own element"
    return text
