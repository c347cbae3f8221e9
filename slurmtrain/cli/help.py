"""`--help` without a verb, and the verb `help`: the pages of the manual, slurmtrain/docs/*.md, which ship with the package.

Nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap

from slurmtrain.cli.arguments import PROGRAM, visible_verbs
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.folders import PACKAGE, shipped
from slurmtrain.errors import UsageError, nearest

PAGES = PACKAGE / "docs"
ORDER = (
    "quickstart clusters own-scripts clients python models data parallelism planning requeue drill preflight checkpoints "
    "evaluation numbers sweeps runs loggers usage shared-folders secrets troubleshooting config internals changelog"
).split()
WIDEST = 120  # columns; longer lines of prose are hard to read


def main(options: argparse.Namespace) -> int:
    """Print the list of topics, a page, or the help of a verb.

    Raises:
        UsageError: there is no such topic.
    """
    topic = options.topic
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
            hint=nearest(topic, {*topics(), *visible_verbs()}),
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


def overview() -> str:
    """Return the help of everything."""
    verbs = "\n".join(f"  {name:<12}{found.summary}" for name, found in VERBS.items() if not found.hidden)
    groups = "\n".join(
        textwrap.fill(" ".join(names), 116, initial_indent=f"  {group + '=':<13}", subsequent_indent=" " * 15)
        for group, names in _config_groups().items()
    )
    return f"""slurmtrain: run training jobs on SLURM: submit with one command, stop cleanly, resume exactly.

{PROGRAM} [overrides] VERB [options]        (the verb may stand anywhere; `slurmtrain` is the same)
{PROGRAM} VERB --help                       usage, options and examples of a verb
{PROGRAM} help [TOPIC]                      the manual

Verbs
{verbs}
  RUN is a run ID, a unique prefix of one, a path, or `last`.

Config groups (choose with group=option; single fields with group.field=value)
{groups}

Hydra
  {PROGRAM} --cfg job [overrides]     the composed config, with every field
  --config-dir DIR     your own configs (DIR/cluster/mine.yaml -> cluster=mine)
  --config-name NAME   another primary config
  --config-path DIR    searched first, with its own primary config
  +key=value adds, ~key removes, ++key=value adds or overrides; --info defaults-tree; --hydra-help
  eval "$(slurmtrain -sc install=bash)"    tab completion

Examples
  {PROGRAM} +cluster=local submit                       a run on this machine, one to two minutes
  {PROGRAM} +cluster=local +experiment=smoke submit     a few seconds
  {PROGRAM} sandbox up && {PROGRAM} +cluster=sandbox submit --follow
  {PROGRAM} +cluster=a100x4 cluster.nodes=4 train.steps=100000 submit
  {PROGRAM} +cluster=a100x4 submit -- python my_train.py --layers 1,2 --lr 1e-3
  {PROGRAM} --host user@login +cluster=a100x4 submit    from your laptop, over ssh
"""


def _config_groups() -> dict[str, list[str]]:
    folder = shipped("conf")
    return {
        group: sorted(file.removesuffix(".yaml") for file in os.listdir(folder / group) if file.endswith(".yaml"))
        for group in sorted(os.listdir(folder))
        if not group.startswith((".", "_")) and (folder / group).is_dir()
    }
