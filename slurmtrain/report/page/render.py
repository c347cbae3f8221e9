"""From what a page holds to one HTML file that loads nothing and sends nothing.

Everything that comes from a run directory is somebody else's text. jinja2 escapes all of it; figures are JSON without `<`,
`>` and `&`; and a Content-Security-Policy names the digests of plotly.js and of our own script, so that a browser would run
nothing else even if something had slipped through. plotly.js sets styles, which load nothing under this policy.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
from pathlib import Path

import jinja2
from markupsafe import Markup

from slurmtrain.errors import UsageError
from slurmtrain.report.page.contents import Page
from slurmtrain.system.records import printable

TEMPLATES = Path(__file__).parent / "templates"


def render(page: Page, *, refresh_s: float | None = None, library: bool = True) -> str:
    """Return the page as HTML, in ASCII: what is no ASCII letter is a character reference, whatever reads the file.

    Args:
        refresh_s: it is served, and asks its server for a newer one so often; None: it is a file, and asks nobody.
        library: with plotly.js, which is most of the page; without, for a browser that has it already.

    Raises:
        UsageError: plotly is not installed.
    """
    text = (
        _templates()
        .get_template("page.html.j2")
        .render(
            page=page,
            policy=policy(served=refresh_s is not None),
            style=Markup(_asset("page.css")),
            script=Markup(_asset("page.js")),
            refresh_s=f"{refresh_s:g}" if refresh_s is not None else None,
        )
    )
    whole = text.encode("ascii", "xmlcharrefreplace").decode()
    return whole.replace("<script></script>", f"<script>{plotly_js()}</script>", 1) if library else whole


def policy(*, served: bool) -> str:
    """Return the Content-Security-Policy: two scripts alone, and no request, or only to the page's server."""
    sources = [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        f"script-src '{_digest(plotly_js())}' '{_digest(_asset('page.js'))}'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if served else []),
    ]
    return "; ".join(sources)


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
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_without_control_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made


def _without_control_characters(value: object) -> object:
    """Return what a template shows; text is cleaned where it is read, and here once more."""
    return printable(value) if type(value) is str else value


@functools.cache
def _asset(name: str) -> str:
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    assert text.isascii(), f"{name} has a letter that would become a character reference, which scripts do not read"
    assert "</" not in text, f"{name} would end its own element"
    return text


@functools.cache
def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
