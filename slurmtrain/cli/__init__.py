"""The command line: argv -> verb + Hydra overrides. Imports no torch, and nothing that the verb does not need."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from slurmtrain.cli import arguments
from slurmtrain.cli.verbs import VERBS
from slurmtrain.errors import SlurmtrainError, UsageError, storage_hint
from slurmtrain.system import interrupts
from slurmtrain.system.records import printable
from slurmtrain.system.redaction import SECRET_VARIABLE, hide, redact

HYDRA_ONLY = ("--cfg", "--info", "-i", "--hydra-help", "--shell-completion", "-sc")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except SlurmtrainError as error:
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
        sys.stderr.close()
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
            interrupts.raise_again()
            return remote.main(words)
    verb = arguments.find_verb(words)
    if verb is not None and not VERBS[verb].composes:
        if verb != "help":
            _log_to_stderr()
        rest = list(words)
        rest.remove(verb)
        module = importlib.import_module(VERBS[verb].module)
        interrupts.raise_again()
        result: int = module.main(verb, rest)
        return result

    parsed = arguments.parse(words)
    if "--help" in parsed.options:
        from slurmtrain.cli.help import help_text

        print(help_text(parsed.verb))
        return 0
    if "--version" in parsed.options:
        from slurmtrain import __version__

        print(f"slurmtrain {__version__}")
        return 0
    if "--experimental-rerun" in parsed.options:
        raise UsageError(
            "--experimental-rerun is not supported", hint="`resume RUN` continues a run as it was submitted"
        )
    if any(option in parsed.options for option in HYDRA_ONLY):
        from slurmtrain.cli.hydra_options import run_hydra

        interrupts.raise_again()
        return run_hydra(parsed)
    if parsed.verb is None:
        if parsed.positionals:
            raise arguments.unknown_verb(parsed.positionals[0])
        names = ", ".join(name for name, each in VERBS.items() if not each.hidden)
        raise UsageError("no verb given", hint=f"one of: {names}; python -m slurmtrain --help explains them")
    if parsed.positionals and parsed.verb not in ("train", "prepare", "drill"):
        raise arguments.no_override(parsed.positionals[0], parsed.verb)
    _log_to_stderr()
    if "--multirun" in parsed.options:
        if parsed.verb != "submit":
            raise UsageError(f"-m (--multirun) works with submit, not with {parsed.verb}", hint="-m key=1,2 submit")
        if "--from" in parsed.options:
            raise UsageError(
                "--from submits one run, but -m makes a sweep", hint="submit --from BUNDLE once for each value"
            )
        from slurmtrain.cli import multirun

        interrupts.raise_again()
        return multirun.submit(parsed)
    module = importlib.import_module(VERBS[parsed.verb].module)
    interrupts.raise_again()
    code: int = module.main(parsed)
    return code


def _log_to_stderr() -> None:
    from slurmtrain.system import logs  # loads logging, which --help and tab completion do without

    logs.set_up()
