"""What can be wrong with the program of job.command, said on the login node before the job is queued."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.choices import JobKind
from slurmtrain.config.launched_program import paths_in, program_of, script_and_module
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.launch.code_source import CodeSource
from slurmtrain.system.paths import absolute
from slurmtrain.system.sight import Sight, look

NAMES_A_PATH = re.compile("path|dir|file|folder|root")  # in the name of a field


def check_program(config: Config, cwd: Path) -> None:
    """Check that the interpreter and the script or module of job.command exist, and that it can be executed.

    Raises:
        ConfigError: something is missing that this machine would see.
    """
    if config.job.kind != JobKind.COMMAND:
        return
    command = program_of(config)
    word, (script, module) = shlex.split(command)[0], script_and_module(command)
    for name in filter(None, (word if os.sep in word else None, script)):
        path = absolute(name, cwd)
        if not os.path.isabs(name):  # the job gets it from here, wherever this is
            missing = not path.exists()
        elif config.cluster.container.kind is not None:  # which has its own files
            continue
        else:
            missing = look(path, config.cluster.node_paths).sight == Sight.MISSING
        if missing:
            raise ConfigError(
                f"job.command: there is no {path.name} in {path.parent}",
                hint="its paths are relative to the folder of the command, which the job gets a snapshot of",
            )
    path = absolute(word, cwd)
    as_argument = f"submit -- {'python' if path.suffix == '.py' else 'bash'} {command}"
    if os.sep not in word and path.suffix in (".py", ".sh") and path.is_file() and shutil.which(word) is None:
        message = f"job.command: {word} is a file of this folder, and no program that is found in PATH"
        raise ConfigError(message, hint=f"{as_argument}, or ./{word} for an executable file")
    if os.sep in word and path.is_file() and not os.access(path, os.X_OK):
        raise ConfigError(f"job.command: {word} cannot be executed", hint=f"{as_argument}, or chmod +x {word}")
    # A folder without __init__.py may have further parts elsewhere.
    if module and (cwd / module.partition(".")[0] / "__init__.py").exists() and not _can_run(cwd, module):
        raise ConfigError(
            f"job.command: there is no module {module} in {cwd}, or it is a package without __main__.py",
            hint="python -m needs the name with dots, without .py",
        )


def _can_run(folder: Path, module: str) -> bool:
    """Return whether `python -m MODULE` finds the module in a folder: source, compiled, or a package with __main__.py."""
    path = folder.joinpath(*module.split("."))
    # name.py, name.so, name.cpython-311-....so
    return (path / "__main__.py").exists() or any(path.parent.glob(f"{path.name}.*[yo]"))


def check_in_snapshot(config: Config, workdir: Path, source: CodeSource, cwd: Path) -> list[str]:
    """Check that the program of job.command is in the snapshot, and return a warning for each other path that is not.

    Args:
        workdir: the working directory of the ranks.

    Raises:
        ConfigError: it is not, because git ignores it.
    """
    if source.root is None:  # it runs in `cwd` itself
        return []
    top = os.path.realpath(source.root)

    def why_missing(path: str) -> str:
        if not Path(os.path.realpath(cwd / path)).is_relative_to(top):
            return f"it lies outside of {source.root}"
        return "git ignores it" if source.git else "hidden files are not copied"

    if config.job.kind == JobKind.COMMAND:
        command = program_of(config)
        script, module = script_and_module(command)
        refused = None
        if script is not None and not os.path.isabs(script) and not (workdir / script).exists():
            refused, why = script, why_missing(script)
        elif module is not None and _can_run(cwd, module) and not _can_run(workdir, module):
            refused, why = f"the module {module}", why_missing(module.replace(".", "/"))
        if refused is not None:
            ways = ["take it out of .gitignore", "copy the whole folder with job.snapshot=cwd"] if source.git else []
            raise ConfigError(
                f"job.command: {refused} is not in the snapshot that the job would run, because {why}",
                hint=", ".join([*ways, "or run in place: job.snapshot=none"]).removeprefix("or "),
            )
        named = list(dict.fromkeys(paths_in(command)))
    else:  # own classes may get paths of which nothing else is known
        named = list(_paths_of({"data": config.data, "model": config.model, "eval.sets": config.eval.sets}))
    return [
        f"{path} is not in the snapshot that the job runs, because {why_missing(path)}, so `{word}` does not name it there; "
        f"name it by its absolute path: {absolute(path, cwd)}"
        for word, path in named
        if not os.path.isabs(path) and _exists(cwd / path) and not _exists(workdir / path)
    ]


def _paths_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield "name=value" and value of all texts in config groups that may be paths."""
    for key, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield from _paths_of(each, f"{prefix}{key}.")
            elif isinstance(each, str) and key != "_target_" and (os.sep in each or NAMES_A_PATH.search(key)):
                yield f"{prefix}{key}={each}", each


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # words that are no paths: too long, or with a null byte
        return False
