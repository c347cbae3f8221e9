"""The verb `help`: show a page of the manual. The pages are slurmtrain/docs/*.md, which ship with the package."""

from __future__ import annotations

import os
import re
import sys

from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.verbs import VERBS
from slurmtrain.errors import UsageError, nearest
from slurmtrain.resources import PACKAGE

PAGES = PACKAGE / "docs"
ORDER = (
    "quickstart clusters own-scripts clients python models data parallelism planning requeue drill preflight checkpoints "
    "evaluation numbers sweeps runs loggers usage shared-folders secrets troubleshooting config internals changelog"
).split()
WIDEST = 120  # columns; longer lines of prose are hard to read


def main(verb: str, words: list[str]) -> int:
    """Print the list of topics, a page, or the help of a verb.

    Raises:
        UsageError: there is no such topic.
    """
    parser = Parser.of(verb)
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="a page of the manual, or a verb")
    topic = parser.parse_args(words).topic
    if topic is None:
        print(_contents())
    elif topic in topics():
        _show((PAGES / f"{topic}.md").read_text(encoding="utf-8"))
    elif topic in VERBS:
        from slurmtrain import cli

        return cli.main([topic, "--help"])
    else:
        raise UsageError(
            f"there is no topic {topic!r}",
            hint=nearest(topic, {*topics(), *(name for name, known in VERBS.items() if not known.hidden)}),
        )
    return 0


def topics() -> dict[str, str]:
    """Return the name of every page and what it is about, in one line, in the order of reading."""
    pages = sorted(PAGES.glob("*.md"), key=lambda page: (_place(page.stem), page.stem))
    return {page.stem: _subject(page.read_text(encoding="utf-8")) for page in pages}


def _place(topic: str) -> int:
    return ORDER.index(topic) if topic in ORDER else len(ORDER)


def _subject(page: str) -> str:
    """Return what a page is about: its title is `# Topic: subject`."""
    return page.partition("\n")[0].partition(": ")[2]


def _contents() -> str:
    known = topics()
    width = max(map(len, known))
    lines = "\n".join(f"  {name:<{width}}  {subject}" for name, subject in known.items())
    return (
        f"Topics of the manual. Show one with: python -m slurmtrain help TOPIC\n{lines}\n\n"
        "Flags and examples of a verb: python -m slurmtrain VERB --help"
    )


def _show(page: str) -> None:
    """Print a page: rendered and in a pager on a terminal, as it is otherwise."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        print(page, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.theme import Theme

    os.environ.setdefault("LESS", "FRX")  # as git does: show colours, and exit at once if the page fits the screen
    console = Console(theme=Theme({"markdown.code": "bold cyan"}))  # rich's own is on black, also on white terminals
    console.width = min(console.width, WIDEST)
    with console.pager(styles=True):
        console.print(Markdown(_as_commands(page), code_theme="ansi_dark", hyperlinks=False))


def _as_commands(page: str) -> str:
    """Return the page with its links to other pages as the commands that show these."""
    return re.sub(r"\[[^]]+\]\(([a-z-]+)\.md(?:#[a-z-]*)?\)", r"`help \1`", page)
