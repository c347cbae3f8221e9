"""Check the program of job.command on the login node: does it exist, and do the packages that it imports?"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.choices import JobKind
from slurmtrain.config.launched_program import PACKAGES, has_launcher, program_of
from slurmtrain.config.program_words import PYTHON, module_of, paths_in, script_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.snapshot import CodeSource
from slurmtrain.system.paths import absolute

ASK_S = 60
# Finds modules without importing them: takes names as arguments, and prints those that are missing.
QUESTION = """
import importlib.util, json, sys
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:
        return True
print(json.dumps([name for name in sys.argv[1:] if not there(name)]))
"""


def check_program(config: Config, cwd: Path) -> None:
    """Check that the script of job.command exists, and the packages that it imports at its top.

    Raises:
        ConfigError: something is missing that this machine would see.
    """
    command = _command(config)
    script, module = script_of(command), module_of(command)
    if module is not None:
        _check_module(config, module, cwd)
    if has_launcher(config):
        _check_launcher(config)
    if script is None:
        return
    path = absolute(script, cwd)
    if not path.exists() and (not os.path.isabs(script) or path.parent.is_dir()):
        raise ConfigError(
            f"job.command: there is no {script} in {path.parent if os.path.isabs(script) else cwd}",
            hint="its paths are relative to the folder of the command, which the job gets a snapshot of",
        )
    if script == shlex.split(command)[0] and path.is_file() and not os.access(path, os.X_OK):
        raise ConfigError(
            f"job.command: {script} cannot be executed",
            hint=f"chmod +x {script}, or name an interpreter: bash {script}",
        )
    interpreter = _interpreter(config)
    if interpreter is not None and path.suffix == ".py" and path.is_file():
        missing = _missing(interpreter, list(imports_of(path)), path.parent, cwd)
        if missing:
            raise _not_installed(f"{script} imports {' and '.join(missing)}", interpreter)


def _check_module(config: Config, module: str, cwd: Path) -> None:
    """Raise ConfigError where `python -m MODULE` finds nothing: neither in the folder of the command nor installed."""
    package = module.partition(".")[0]
    # A folder without __init__.py may have further parts elsewhere.
    if (cwd / package / "__init__.py").exists() and not _can_run(cwd, module):
        raise ConfigError(
            f"job.command: there is no module {module} in {cwd}, or it is a package without __main__.py",
            hint="python -m needs the name with dots, without .py",
        )
    if (cwd / package).is_dir() or _can_run(cwd, package):
        return
    interpreter = _interpreter(config)
    if interpreter is not None and _missing(interpreter, [package], cwd):
        raise _not_installed(f"python -m {module} needs {package}", interpreter)


def _check_launcher(config: Config) -> None:
    """Raise ConfigError where the Python that is to run the launcher does not have it."""
    interpreter, package = _interpreter(config), PACKAGES[config.job.launcher]
    if interpreter is not None and _missing(interpreter, [package], Path("/")):
        raise ConfigError(
            f"job.launcher={config.job.launcher} needs {package}, which {interpreter} does not find",
            hint=f"{interpreter} -m pip install {package}, or name the environment of the job: cluster.venv, cluster.conda_env",
        )


def _not_installed(what: str, interpreter: str) -> ConfigError:
    return ConfigError(
        f"job.command: {what}, which {interpreter} does not find",
        hint=f"{interpreter} -m pip install ..., or name the environment of the job: cluster.venv, cluster.conda_env",
    )


def _can_run(folder: Path, module: str) -> bool:
    """Return whether `python -m MODULE` finds the module in a folder.

    It may be source or compiled, or a package with __main__.py.
    """
    path = folder.joinpath(*module.split("."))
    # name.py, name.so, name.cpython-311-....so
    return (path / "__main__.py").exists() or any(path.parent.glob(f"{path.name}.*[yo]"))


def check_in_snapshot(config: Config, workdir: Path, source: CodeSource, cwd: Path) -> list[str]:
    """Check that the script of job.command is in the snapshot, and return a warning for each other path that is not.

    Args:
        workdir: the working directory of the ranks.

    Raises:
        ConfigError: it is not, because git ignores it.
    """
    if source.root is None:  # it runs in `cwd` itself
        return []
    if config.job.kind != JobKind.COMMAND:
        return list(_not_in_snapshot(config, workdir, source, cwd))
    command, root = _command(config), source.root
    script, module = script_of(command), module_of(command)

    def why_missing(path: str) -> str:
        real = os.path.realpath(cwd / path)
        if not Path(real).is_relative_to(os.path.realpath(root)):
            return f"it lies outside of {root}"
        return "git ignores it" if source.git else "hidden files are not copied"

    def refused(what: str, why: str) -> ConfigError:
        ways = ["take it out of .gitignore", "copy the whole folder with job.snapshot=cwd"] if source.git else []
        return ConfigError(
            f"job.command: {what} is not in the snapshot that the job would run, because {why}",
            hint=", ".join([*ways, "or run in place: job.snapshot=none"]).removeprefix("or "),
        )

    if script is not None and not os.path.isabs(script) and not (workdir / script).exists():
        raise refused(script, why_missing(script))
    if module is not None and _can_run(cwd, module) and not _can_run(workdir, module):
        raise refused(f"the module {module}", why_missing(module.replace(".", "/")))
    return [
        f"{path} is not in the snapshot that the job runs, because {why_missing(path)}, so `{word}` does not name it there; "
        f"name it by its absolute path: {absolute(path, cwd)}"
        for word, path in dict.fromkeys(paths_in(command))
        if _exists(cwd / path) and not _exists(workdir / path)
    ]


def _not_in_snapshot(config: Config, workdir: Path, source: CodeSource, cwd: Path) -> Iterator[str]:
    """Yield a warning for each path of a class of the user's own that means a file here, and none where the job runs."""
    for field, value in _texts_of("data", config.data, "model", config.model, "eval.sets", config.eval.sets):
        is_path = os.sep in value or re.search("path|dir|file|folder|root", field.rpartition(".")[2])
        if is_path and not os.path.isabs(value) and _exists(cwd / value) and not _exists(workdir / value):
            yield (
                f"{field}={value} is not in the snapshot that the job runs{', since git ignores it' if source.git else ''}; "
                f"name it by its absolute path: {absolute(value, cwd)}"
            )


def _texts_of(*named: Any) -> Iterator[tuple[str, str]]:
    """Yield name and value of all texts in config groups, given as NAME, GROUP, NAME, GROUP, ..."""
    for name, value in zip(named[::2], named[1::2], strict=True):
        if isinstance(value, str) and not name.endswith("._target_"):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _texts_of(*(part for key, inner in value.items() for part in (f"{name}.{key}", inner)))
        elif isinstance(value, list):
            yield from _texts_of(*(part for inner in value for part in (name, inner)))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # words that are no paths: too long, or with a null byte
        return False


def _command(config: Config) -> str:
    """Return the program's command; without its launcher, and with the ranks' Python where a launcher's command names none."""
    if config.job.kind != JobKind.COMMAND:
        return ""
    return program_of(config, interpreter_of(config.cluster) or "python")


def _interpreter(config: Config) -> str | None:
    """Return the Python that runs the script, as this machine sees it; None if set-up lines or a container decide it."""
    cluster, word = config.cluster, shlex.split(_command(config))[0]
    if not PYTHON.match(os.path.basename(word)) or cluster.container.kind or cluster.modules or cluster.setup:
        return None
    if os.path.isabs(word):
        return shutil.which(word)
    if cluster.venv or cluster.conda_env:
        return interpreter_of(cluster)
    return shutil.which(word) if "PYTHONPATH" not in cluster.env and "PATH" not in cluster.env else None


def imports_of(script: Path) -> Iterator[str]:
    """Yield the top-level packages that a script imports whenever it runs: not those within `try` or `if`, or of itself."""
    try:
        text = script.read_text()
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    if "sys.path" in text or "site.addsitedir" in text:  # it looks elsewhere, too
        return
    for node in tree.body:
        names: Sequence[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name.partition(".")[0] for name in names)


def _missing(interpreter: str, names: list[str], *folders: Path) -> list[str]:
    """Return the packages that an interpreter does not find; none when it cannot be asked."""
    names = [name for name in dict.fromkeys(names) if name not in sys.stdlib_module_names and name != "slurmtrain"]
    own = [
        name
        for name in names
        if any((folder / name).is_dir() or (folder / f"{name}.py").is_file() for folder in folders)
    ]
    wanted = [name for name in names if name not in own]
    if not wanted:
        return []
    try:
        answer = subprocess.run(
            [interpreter, "-c", QUESTION, *wanted],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
            cwd="/",
            env=with_absolute_pythonpath(folders[-1]),
        )
        found: list[str] = json.loads(answer.stdout.splitlines()[-1])
        return found
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []


def with_absolute_pythonpath(cwd: Path) -> dict[str, str]:
    """Return this shell's environment with the folders in PYTHONPATH made absolute.

    The job gets PYTHONPATH unchanged.
    """
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    return {**os.environ, "PYTHONPATH": ":".join(str(absolute(entry, cwd)) for entry in entries)}
