"""`--help` without a verb, and the verb `help`: the pages of the manual, slurmtrain/docs/*.md, which ship with the package.

Nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap

from slurmtrain.cli.arguments import PROGRAM, parser_of, visible_verbs
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.folders import PACKAGE, config_groups
from slurmtrain.errors import UsageError, nearest

PAGES = PACKAGE / "docs"
ORDER = (
    "quickstart clusters kubernetes own-scripts clients engines python models data parallelism planning requeue drill "
    "preflight checkpoints evaluation numbers sweeps runs loggers usage shared-folders secrets troubleshooting config "
    "internals changelog"
).split()


def main(options: argparse.Namespace) -> int:
    """Print the list of topics, a page, or the help of a verb.

    Raises:
        UsageError: there is no such topic.
    """
    topic, known = options.topic, topics()
    if topic is None:
        width = max(map(len, known))
        print(f"Topics of the manual. Show one with: {PROGRAM} help TOPIC")
        print("\n".join(f"  {name:<{width}}  {subject}" for name, subject in known.items()))
        print(f"\nFlags and examples of a verb: {PROGRAM} VERB --help")
    elif topic in known:
        _show((PAGES / f"{topic}.md").read_text(encoding="utf-8"))
    elif topic in VERBS:
        parser_of(topic).print_help()
    else:
        raise UsageError(f"there is no topic {topic!r}", hint=nearest(topic, {*known, *visible_verbs()}))
    return 0


def topics() -> dict[str, str]:
    """Return the name of every page and what it is about, in the order of reading. A page begins with `# Topic: subject`."""
    found = {}
    for page in sorted(
        PAGES.glob("*.md"), key=lambda page: ORDER.index(page.stem) if page.stem in ORDER else len(ORDER)
    ):
        with page.open(encoding="utf-8") as file:
            found[page.stem] = file.readline().rstrip("\n").partition(": ")[2]
    return found


def _show(page: str) -> None:
    """Print a page, in a pager on a terminal."""
    if not sys.stdout.isatty():
        print(page, end="")
        return
    import pydoc

    os.environ.setdefault("LESS", "FRX")  # as git does: exit at once if the page fits the screen
    pydoc.pager(page)


def overview() -> str:
    """Return the help of everything."""
    verbs = "\n".join(f"  {name:<12}{found.summary}" for name, found in VERBS.items() if not found.hidden)
    groups = "\n".join(
        textwrap.fill(" ".join(names), 116, initial_indent=f"  {group + '=':<13}", subsequent_indent=" " * 15)
        for group, names in sorted(config_groups().items())
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
  --config-dir DIR     your own configs (DIR/cluster/mine.yaml -> cluster=mine), also with a primary config of its own
  --config-name NAME   another primary config
  +key=value adds, ~key removes, ++key=value adds or overrides
  eval "$(slurmtrain -sc install=bash)"    tab completion

Examples
  {PROGRAM} +cluster=local submit                       a run on this machine, half a minute
  {PROGRAM} +cluster=local +experiment=smoke submit     a few seconds
  {PROGRAM} sandbox up && {PROGRAM} +cluster=sandbox submit --follow
  {PROGRAM} +cluster=a100x4 cluster.nodes=4 train.steps=100000 submit
  {PROGRAM} +cluster=a100x4 submit -- python my_train.py --layers 1,2 --lr 1e-3
"""
