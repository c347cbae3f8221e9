"""`--help`: enough to find everything. Plain text from the verb table and the conf folder; nothing heavy is imported."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from slurmtrain.cli.arguments import HELP_COLUMNS, PROGRAM, epilog
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.folders import config_groups


def help_text(verb: str | None = None) -> str:
    """Return the help of everything, or of one verb that composes a config."""
    return _overview() if verb is None else _of_verb(verb)


def _overview() -> str:
    verbs = "\n".join(f"  {name:<12}{found.summary}" for name, found in VERBS.items() if not found.hidden)
    groups = "\n".join(
        textwrap.fill(" ".join(names), 116, initial_indent=f"  {group + '=':<13}", subsequent_indent=" " * 15)
        for group, names in config_groups().items()
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
{_HYDRA}

Examples
  {PROGRAM} +cluster=local submit                       a run on this machine, one to two minutes
  {PROGRAM} +cluster=local +experiment=smoke submit     a few seconds
  {PROGRAM} sandbox up && {PROGRAM} +cluster=sandbox submit --follow
  {PROGRAM} +cluster=a100x4 cluster.nodes=4 train.steps=100000 submit
  {PROGRAM} +cluster=a100x4 submit -- python my_train.py --layers 1,2 --lr 1e-3
  {PROGRAM} --host user@login +cluster=a100x4 submit    from your laptop, over ssh
"""


_HYDRA = f"""\
  {PROGRAM} --cfg job [overrides]     the composed config, with every field
  --config-dir DIR     your own configs (DIR/cluster/mine.yaml -> cluster=mine)
  --config-name NAME   another primary config
  --config-path DIR    searched first, with its own primary config
  +key=value adds, ~key removes, ++key=value adds or overrides; --info defaults-tree; --hydra-help
  eval "$(slurmtrain -sc install=bash)"    tab completion"""


def _of_verb(verb: str) -> str:
    """Return the help of a verb that composes a config, in the shape that argparse gives the others."""
    found = VERBS[verb]
    usage = textwrap.fill(
        f"usage: {PROGRAM} {found.usage}", HELP_COLUMNS, subsequent_indent=" " * 7, break_on_hyphens=False
    )
    options = [(f"{flag.name} {flag.metavar}", flag.help) for flag in found.options]
    overrides = [
        ("GROUP=NAME", f"choose from a config group: {', '.join(config_groups())}"),
        ("KEY=VALUE", "set one field, such as cluster.nodes=4; +KEY=VALUE adds one, ~KEY removes one"),
        ("--config-dir DIR", "also look for configs in DIR"),
        ("--cfg job", "print the composed config with every field, and do nothing else"),
    ]
    return "\n\n".join(
        [
            usage,
            textwrap.fill(found.help, HELP_COLUMNS),
            "options:\n" + _rows([*options, ("-h, --help", "show this help and exit")]),
            "config:\n" + _rows(overrides),
            epilog(verb),
        ]
    )


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return two columns, as argparse lays out its options."""
    return "\n".join(
        textwrap.fill(what, HELP_COLUMNS, initial_indent=f"  {name:<24}", subsequent_indent=" " * 26)
        for name, what in rows
    )
