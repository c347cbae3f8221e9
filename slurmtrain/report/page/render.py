"""From what a page holds to one HTML file that loads nothing and sends nothing.

Everything that comes from a run directory is somebody else's text. jinja2 escapes all of it; numbers for the script are JSON
without `<`, `>` and `&`; and a Content-Security-Policy names the digests of our one style sheet and our one script, so that
a browser would run nothing else even if something had slipped through.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

import jinja2
from markupsafe import Markup

from slurmtrain.report.page.contents import Page
from slurmtrain.system.records import printable

TEMPLATES = Path(__file__).parent / "templates"


def render(page: Page, *, refresh_s: float | None = None) -> str:
    """Return the page as HTML, in ASCII: what is no ASCII letter is a character reference, whatever reads the file.

    Args:
        refresh_s: it is served, and asks its server for a newer one so often; None: it is a file, and asks nobody.
    """
    style, script = _asset("page.css"), _asset("page.js")
    text = (
        _templates()
        .get_template("page.html.j2")
        .render(
            page=page,
            policy=policy(served=refresh_s is not None),
            style=Markup(style),
            script=Markup(script),
            refresh_s=f"{refresh_s:g}" if refresh_s is not None else None,
        )
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()


def policy(*, served: bool) -> str:
    """Return the Content-Security-Policy: our own style and script alone, and no request, or only to the page's server."""
    sources = [
        "default-src 'none'",
        f"style-src '{_digest('page.css')}'",
        f"script-src '{_digest('page.js')}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if served else []),
    ]
    return "; ".join(sources)


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
    assert "</" not in text.replace("<\\/", ""), f"{name} would end its own element"
    return text


@functools.cache
def _digest(name: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()}"
