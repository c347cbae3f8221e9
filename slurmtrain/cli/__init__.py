"""The command line: argv -> a verb's `main`. Imports no torch, and nothing that the verb does not need."""

from __future__ import annotations

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
    except BrokenPipeError:  # `status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail to flush it at the end
        return 141
    except OSError as error:
        hint = storage_hint(error)
        if isinstance(error, PermissionError) and error.filename is not None:
            hint = "whose is it? `ls -ld` shows that"
        if hint is None:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"slurmtrain: error: {where}{error.strerror}\n  hint: {hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    found = arguments.parse(words)
    verb = VERBS.get(found.verb or "")
    if verb is None and found.help:
        from slurmtrain.cli.help import overview

        print(overview())
        return 0
    if verb is None and found.version:
        from slurmtrain import __version__

        print(f"slurmtrain {__version__}")
        return 0
    if verb is not None and found.verb != "help":
        from slurmtrain.system import logs  # loads logging, which --help and tab completion do without

        logs.set_up()
    function = verb.function if verb is not None and verb.function else f"{found.verb}.main"
    if hasattr(found, "cfg"):  # Hydra's options
        if found.cfg or found.shell_completion:
            function = f"hydra_options.{'show_config' if found.cfg else 'complete'}"
        elif verb is None:
            if found.words:
                raise arguments.not_understood(found.words[0], None)
            names = ", ".join(arguments.visible_verbs())
            raise UsageError("no verb given", hint=f"one of: {names}; python -m slurmtrain --help explains them")
        elif found.multirun and found.verb != "submit":
            raise UsageError(f"-m (--multirun) works with submit, not with {found.verb}", hint="-m key=1,2 submit")
    module, _, name = function.partition(".")
    main_of_verb = getattr(importlib.import_module(f"slurmtrain.cli.{module}"), name)
    signals.raise_again()
    code: int = main_of_verb(found)
    return code
