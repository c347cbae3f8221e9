"""The file that job.command runs, as a pure function, so that a missing one is reported before anything waits for it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

PYTHON = re.compile(r"python(\d+(\.\d+)?)?$")
SHELLS = ("bash", "sh", "dash", "zsh", "ksh", "fish", "csh", "tcsh")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")  # with a script among many options
IN_A_SHELL = re.compile(r"[$`*?{}]")  # characters that only a shell, or a rank, can expand
PYTHON_OPTIONS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def script_of(command: str) -> str | None:
    """Return the file that a command runs: a program by its path, or the script of an interpreter; None: none is named."""
    words = _words(command)
    if not words or module_of(command) is not None:
        return None
    program = os.path.basename(words[0])
    script: str | None = None
    if PYTHON.match(program) or program in SHELLS:
        script = _after_options(words[1:], PYTHON_OPTIONS_WITH_VALUE if PYTHON.match(program) else ("-o", "-O"))
    elif program in LAUNCHERS:
        script = next((word for word in words[1:] if word.endswith(".py") and "=" not in word), None)
    elif os.sep in words[0]:
        script = words[0]
    return script if script and not IN_A_SHELL.search(script) else None


def module_of(command: str) -> str | None:
    """Return the module that a command runs with `-m`; None where it runs something else."""
    words = _words(command)
    program = os.path.basename(words[0]) if words else ""
    module: str | None = None
    if PYTHON.match(program):
        module = _module_of_python(words[1:])
    elif program in LAUNCHERS:
        # Before any script: what comes after one is the script's own.
        before = words[: next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))]
        flag = next((at for at, word in enumerate(before) if word in ("-m", "--module")), None)
        module = next(iter(words[flag + 1 :]), None) if flag is not None else None
    return module if module and re.fullmatch(r"\w+(\.\w+)*", module) else None


def paths_in(command: str) -> Iterator[tuple[str, str]]:
    """Yield each word of a command that may name a file by a relative path, and that path: `--data=a.bin`, `a.bin`.

    Words that only a shell or a rank can complete are left out, and so are the program and its script or module. The code of
    `bash -c CODE` is taken apart, too, unless it changes the folder.
    """
    words = _words(command)
    if words and os.path.basename(words[0]) in SHELLS and "-c" in words[1:-1]:
        code = _words(words[words.index("-c") + 1])
        words = ["bash", *code] if not {"cd", "pushd"} & set(code) else []
    runs = {script_of(command), module_of(command)}
    for word in words[1:]:
        path = word.partition("=")[2] if "=" in word else word
        if word in runs or not path or path.startswith(("-", "~", "/")) or IN_A_SHELL.search(path):
            continue
        yield word, path


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _module_of_python(words: list[str]) -> str | None:
    """Return the module of `-m MODULE`, which may stand at the end of a group of short options (`-um`)."""
    rest = iter(words)
    for word in rest:
        if word[:2] in PYTHON_OPTIONS_WITH_VALUE:
            if len(word) == 2:
                next(rest, None)
        elif not word.startswith("-") or word.startswith("--") or word == "-" or "c" in word:
            return None
        elif "m" in word:
            return word.partition("m")[2] or next(rest, None)
    return None


def _after_options(words: list[str], with_value: tuple[str, ...]) -> str | None:
    """Return the first word that is no option; None if code or a module is given instead."""
    rest = iter(words)
    for word in rest:
        if word in with_value:
            next(rest, None)
        elif word[:2] in with_value:  # -Ximporttime: the value is in the same word
            continue
        elif word == "--":
            return next(rest, None)
        elif not word.startswith("-") or word == "-":
            return word if word != "-" else None
        elif not word.startswith("--") and re.search(r"[cm]", word[1:]):
            return None
    return None
