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
from collections.abc import Iterable, Sequence
from typing import Any

from slurmtrain.cli.arguments import find_verb, visible_verbs
from slurmtrain.cli.verbs import ROOT, VERBS, Argument
from slurmtrain.config.folders import Primary, search_folders, search_path
from slurmtrain.system.paths import runs_root


def main(arguments: argparse.Namespace) -> int:
    """Pass the options and overrides to Hydra, without the verb and all else, and return the exit code.

    Raises:
        UsageError, ConfigError: as for `compose`.
    """
    from slurmtrain.config.compose import Composer, explaining, resolved, with_shares

    primary = _primary(arguments)
    if arguments.cfg == "job" and not (arguments.package or arguments.multirun):
        import yaml

        values = with_shares(Composer(primary).values(arguments.overrides))
        print(yaml.safe_dump(resolved(values) if arguments.resolve else values, sort_keys=False), end="")
        return 0
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    with explaining():
        show(arguments, primary)
    return 0


def _primary(arguments: argparse.Namespace) -> Primary:
    """Return the folders that a verb would search, too."""
    name = arguments.config_name
    return Primary(name, search_folders(name, arguments.config_dir, arguments.config_path))


def show(arguments: argparse.Namespace, primary: Primary | None = None) -> None:
    """Let Hydra print the requested information and exit."""
    import hydra

    from slurmtrain.config.compose import register_schema

    register_schema()
    first, *others = (primary or _primary(arguments)).folders
    # Nothing is run, so Hydra need not make a folder for its outputs. The folders are given below: by itself, Hydra takes
    # --config-path as relative to this file and then searches no other folder, and seeks the primary config only there.
    sys.argv = [
        "slurmtrain",
        *_options(arguments),
        *arguments.overrides,
        *([search_path(others)] if others else []),
    ]

    @hydra.main(config_path=str(first), config_name="config", version_base="1.3")
    def never_run(config: Any) -> None:
        """Never run: every option that comes here prints and exits."""

    never_run()


def _options(arguments: argparse.Namespace) -> list[str]:
    """Return Hydra's options as words, without those that name folders."""
    values = {name: getattr(arguments, name) for name in ("cfg", "package", "info")}
    values["config_name"] = arguments.config_name if arguments.config_name != "config" else None
    flags = [
        name for name in ("resolve", "hydra_help", "shell_completion", "multirun", "run") if getattr(arguments, name)
    ]
    words = [f"--{name.replace('_', '-')}" for name in flags]
    return [
        *words,
        *(word for name, value in values.items() if value for word in (f"--{name.replace('_', '-')}", value)),
    ]


NEWEST = 30  # so many runs are offered: a person looks for one of the last days
PLAIN = re.compile(r"[\w.,:/@%+=\[\]-]+")  # words that bash takes as they are


def complete(arguments: argparse.Namespace) -> None:
    """Print the words that match the line in COMP_LINE."""
    first, *before = os.environ.get("COMP_LINE", "").split(" ")
    last = before.pop() if before else ""
    name = find_verb(before)
    words, is_value = offers(before, name)
    _offer(word for word in words if word.startswith(last))
    if is_value or last.startswith("-") or (name is not None and not VERBS[name].composes):
        return
    from slurmtrain.config.overrides import normalise

    # Hydra would take the verb for a broken override, and knows groups of the defaults list without a plus only.
    kept = [normalise(word) for word in before if word not in VERBS and not word.startswith("-")]
    os.environ["COMP_LINE"] = " ".join([first, *kept, normalise(last.lstrip("+"))])
    found = io.StringIO()
    with contextlib.redirect_stdout(found), contextlib.suppress(SystemExit):
        show(arguments)
    plus = last[: len(last) - len(last.lstrip("+"))]
    _offer(f"{plus}{word}" for word in found.getvalue().split())


def offers(before: Sequence[str], name: str | None) -> tuple[list[str], bool]:
    """Return the words of ours that may come after others, and whether they are values of the option before them."""
    arguments, words = list(ROOT), [*visible_verbs(), "--host", "--host-python"]
    if name is not None:
        verb = VERBS[name]
        action = verb.action_in(before[before.index(name) + 1 :])
        words = [*(() if action else verb.actions), "--help"]
        arguments = verb.arguments_of(action)
    options = {option: each for each in arguments for option in each.names if option.startswith("-")}
    asking = options.get(before[-1]) if before else None
    if asking is not None and asking.takes_value:
        return _values(asking), True
    words += [option for option, each in options.items() if each.settings.get("help") != argparse.SUPPRESS]
    return [*words, *(word for each in arguments if each.positional for word in _values(each))], False


def _values(argument: Argument) -> list[str]:
    """Return the values that an argument may have, as far as they can be listed."""
    metavar = argument.settings.get("metavar") or ""
    words = list(argument.settings.get("choices") or ())
    words += ["last"] if re.search("RUN|SWEEP", metavar) else []
    words += _newest(sweeps=False) if "RUN" in metavar else []
    words += _newest(sweeps=True) if "SWEEP" in metavar else []
    if metavar == "TOPIC":
        from slurmtrain.cli.help import topics

        words += topics()
    return words


def _offer(words: Iterable[str]) -> None:
    """Print the words that bash may have, one on a line."""
    print("\n".join(word for word in words if PLAIN.fullmatch(word)))


def _newest(*, sweeps: bool) -> list[str]:
    """Return the names of the newest runs, or of the newest sweeps."""
    from slurmtrain.runs import lookup

    root = runs_root()
    found = lookup.all_sweeps(root) if sweeps else lookup.all_runs(root)
    names = [each.id for each in found]
    own = [name for name in names if name[0].isalnum()]  # `submit` makes no other, and a person may: --host=elsewhere
    return own[-NEWEST:]
