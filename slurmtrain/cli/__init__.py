"""The command line: argv -> a verb's `main`. Imports no torch, and nothing that the verb does not need."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from slurmtrain.cli import arguments
from slurmtrain.cli.verbs import VERBS
from slurmtrain.errors import SlurmtrainError, UsageError, storage_hint
from slurmtrain.system import signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except SystemExit as done:  # argparse has printed the help
        return int(done.code or 0)
    except SlurmtrainError as error:
        from slurmtrain.system.records import printable
        from slurmtrain.system.redaction import SECRET_VARIABLE, hide, redact

        # Hydra's message about an interpolation that it cannot use may repeat the value of any variable.
        hide({name: value for name, value in os.environ.items() if SECRET_VARIABLE.search(name)})
        print(f"slurmtrain: error: {printable(redact(str(error)))}", file=sys.stderr)
        return error.exit_code
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"slurmtrain: error: {error.filename}: {error.strerror}; whose is it?", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail to flush it at the end
        return 141
    except OSError as error:
        hint = storage_hint(error)
        if hint is None:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"slurmtrain: error: {where}{error.strerror}\n  hint: {hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    if any(word.startswith("--host") for word in words):
        from slurmtrain.cli import remote

        if remote.wanted(words):
            signals.raise_again()
            return remote.main(words)
    found = arguments.parse(words)
    if found.verb is None:
        return _without_verb(found)
    verb = VERBS[found.verb]
    module = f"slurmtrain.cli.{verb.module or found.verb}"
    if found.verb != "help":
        from slurmtrain.system import logs  # loads logging, which --help and tab completion do without

        logs.set_up()
    if verb.composes:
        if _is_for_hydra(found):
            module = "slurmtrain.cli.hydra_options"
        elif found.multirun and found.verb != "submit":
            raise UsageError(f"-m (--multirun) works with submit, not with {found.verb}", hint="-m key=1,2 submit")
    main_of_verb = importlib.import_module(module).main
    signals.raise_again()
    code: int = main_of_verb(found)
    return code


def _without_verb(found: argparse.Namespace) -> int:
    if found.help:
        from slurmtrain.cli.help import overview

        print(overview())
        return 0
    if found.version:
        from slurmtrain import __version__

        print(f"slurmtrain {__version__}")
        return 0
    if found.shell_completion and "query=bash" in found.overrides:
        from slurmtrain.cli.hydra_options import complete

        complete(found)
        return 0
    if _is_for_hydra(found):
        from slurmtrain.cli import hydra_options

        signals.raise_again()
        return hydra_options.main(found)
    if found.words:
        raise arguments.not_understood(found.words[0], None)
    names = ", ".join(arguments.visible_verbs())
    raise UsageError("no verb given", hint=f"one of: {names}; python -m slurmtrain --help explains them")


def _is_for_hydra(found: argparse.Namespace) -> bool:
    """Return whether Hydra answers the command line itself: it prints something and runs nothing."""
    if found.experimental_rerun is not None:
        raise UsageError(
            "--experimental-rerun is not supported", hint="`resume RUN` continues a run as it was submitted"
        )
    return bool(found.cfg or found.info or found.hydra_help or found.shell_completion)
