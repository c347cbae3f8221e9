"""What Hydra answers: --cfg, --info, --hydra-help, and tab completion of overrides; the other words are completed here.

The shell function that `slurmtrain -sc install=bash` prints calls `slurmtrain -sc query=bash` with the line in
COMP_LINE, and gives what that prints to `compgen -W`, which expands it: `$(...)` in it runs. Names of runs and of files may be
those of other users, so words that mean something to bash are not offered.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from slurmtrain.cli.arguments import find_verb, visible_verbs
from slurmtrain.cli.verbs import HYDRA, NO_VERB, VERBS, WITH_VALUE, Argument
from slurmtrain.config.folders import search_folders, search_path
from slurmtrain.config.frozen import to_values
from slurmtrain.system.paths import runs_root

NEWEST = 30  # so many runs are offered: a person looks for one of the last days
PLAIN = re.compile(r"[\w.,:/@%+=\[\]-]+")  # words that bash takes as they are


def main(arguments: argparse.Namespace) -> int:
    """Pass the options and overrides to Hydra, without the verb and all else, and return the exit code.

    Raises:
        UsageError, ConfigError: as for `compose`.
    """
    from slurmtrain.config.compose import Composer, explaining

    if arguments.cfg == "job":
        import yaml

        folders = search_folders(arguments.config_name, arguments.config_dir)
        config = Composer(folders, arguments.config_name).compose(arguments.overrides)
        print(yaml.safe_dump(to_values(config), sort_keys=False), end="")
        return 0
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    with explaining():
        show(arguments)
    return 0


def show(arguments: argparse.Namespace) -> None:
    """Let Hydra print the requested information and exit."""
    import hydra

    from slurmtrain.config.compose import register_schema

    register_schema()
    # Hydra seeks the primary config only in the folder that is given below.
    first, *others = search_folders(arguments.config_name, arguments.config_dir)
    sys.argv = ["slurmtrain", *arguments.overrides, *([search_path(others)] if others else [])]
    for name in [each.names[0] for each in HYDRA if "--config-dir" not in each.names]:
        value = getattr(arguments, name[2:].replace("-", "_"))
        sys.argv += [name] if value is True else [name, value] if value else []

    @hydra.main(config_path=str(first), config_name="config", version_base="1.3")
    def never_run(config: Any) -> None:
        """Never run: every option that comes here prints and exits."""

    never_run()


def complete(arguments: argparse.Namespace) -> int:
    """Print the words that match the line in COMP_LINE, and return the exit code."""
    first, *before = os.environ.get("COMP_LINE", "").split(" ")
    last = before.pop() if before else ""
    name = find_verb(before)
    verb = VERBS[name] if name is not None else NO_VERB
    words = visible_verbs() if name is None else [*verb.actions, "--help"]
    for action in verb.actions:
        if action in before[before.index(name or "") + 1 :]:
            verb, words = verb.with_action(action), ["--help"]
    options = verb.options
    if before and before[-1] in options and before[-1] in WITH_VALUE:
        _offer(_values(options[before[-1]]), last)
        return 0
    words += [option for option, each in options.items() if each.settings["help"] != argparse.SUPPRESS]
    words += [word for each in verb.arguments if not each.names[0].startswith("-") for word in _values(each)]
    _offer(words, last)
    if last.startswith("-") or not verb.composes:
        return 0
    from slurmtrain.config.overrides import normalise

    # Hydra would take the verb for a broken override, and knows groups of the defaults list without a plus only.
    kept = [normalise(word) for word in before if word not in VERBS and not word.startswith("-")]
    os.environ["COMP_LINE"] = " ".join([first, *kept, normalise(last.lstrip("+"))])
    found = io.StringIO()
    with contextlib.redirect_stdout(found), contextlib.suppress(SystemExit):
        show(arguments)
    plus = last[: len(last) - len(last.lstrip("+"))]
    _offer((f"{plus}{word}" for word in found.getvalue().split()), plus)
    return 0


def _values(argument: Argument) -> list[str]:
    """Return the values that an argument may have, if they can be listed."""
    metavar = argument.settings.get("metavar") or ""
    words = list(argument.settings.get("choices") or ())
    if metavar == "TOPIC":
        from slurmtrain.cli.help import topics

        words += topics()
    if re.search("RUN|SWEEP", metavar):
        from slurmtrain.runs import lookup

        root = runs_root()
        found = [each.id for each in lookup.all_runs(root)] if "RUN" in metavar else []
        sweeps = [each.id for each in lookup.all_sweeps(root)] if "SWEEP" in metavar else []
        # `submit` makes no name that begins with a dash, and a person may: --state=failed
        words += ["last", *(name for name in [*found[-NEWEST:], *sweeps[-NEWEST:]] if name[0].isalnum())]
    return words


def _offer(words: Iterable[str], beginning: str) -> None:
    """Print those words with this beginning that bash may have, one on a line."""
    print("\n".join(word for word in words if word.startswith(beginning) and PLAIN.fullmatch(word)))
