"""What job.command names: which file it runs, so that one that is missing is said before anything waits for it. Pure."""

from __future__ import annotations

import os
import re
import shlex

PYTHON = re.compile(r"python(\d+(\.\d+)?)?$")
SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")  # with a script among many options
PYTHON_OPTIONS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def script_of(command: str) -> str | None:
    """Return the file that a command runs: a program by its path, or the script of an interpreter; None: none is named."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if not words:
        return None
    program = os.path.basename(words[0])
    script: str | None = None
    if PYTHON.match(program) or program in SHELLS:
        script = _after_options(words[1:], PYTHON_OPTIONS_WITH_VALUE if PYTHON.match(program) else ("-o", "-O"))
    elif program in LAUNCHERS:
        script = next((word for word in words[1:] if word.endswith(".py") and "=" not in word), None)
    elif os.sep in words[0]:
        script = words[0]
    return script if script and not re.search(r"[$`*?{}]", script) else None


def _after_options(words: list[str], with_value: tuple[str, ...]) -> str | None:
    """The first word that is no option; None where code or a module is given instead."""
    rest = iter(words)
    for word in rest:
        if word in with_value:
            next(rest, None)
        elif word == "--":
            return next(rest, None)
        elif not word.startswith("-") or word == "-":
            return word if word != "-" else None
        elif not word.startswith("--") and re.search(r"[cm]", word[1:]):
            return None
    return None
