"""The program of job.command, looked at on the login node: is it there, and is what it imports?"""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.paths import absolute
from slurmtrain.runtime.program import PYTHON, script_of

ASK_S = 60
# Finds without importing: names as arguments, those that are not there as the answer.
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
    """Look for the script of job.command, and for the packages that it imports at its top.

    Raises:
        ConfigError: something is missing that this machine would see.
    """
    script = script_of(config.job.command or "") if config.job.kind == "command" else None
    if script is None:
        return
    path = absolute(script, cwd)
    if not path.exists() and (not os.path.isabs(script) or path.parent.is_dir()):
        raise ConfigError(
            f"job.command: there is no {script} in {path.parent if os.path.isabs(script) else cwd}",
            hint="paths in it are relative to the folder of the command, of which the job gets a snapshot",
        )
    if script == shlex.split(config.job.command or "")[0] and path.is_file() and not os.access(path, os.X_OK):
        raise ConfigError(
            f"job.command: {script} cannot be executed", hint=f"chmod +x {script}, or name what runs it: bash {script}"
        )
    interpreter = _interpreter(config)
    if interpreter is not None and path.suffix == ".py" and path.is_file():
        missing = _missing(interpreter, list(imports_of(path)), path.parent, cwd)
        if missing:
            raise ConfigError(
                f"job.command: {script} imports {' and '.join(missing)}, which {interpreter} does not find",
                hint=f"{interpreter} -m pip install ..., or name the environment of the job: cluster.venv, cluster.conda_env",
            )


def check_in_snapshot(config: Config, workdir: Path) -> None:
    """Look for the script of job.command in the snapshot.

    Args:
        workdir: where the ranks run.

    Raises:
        ConfigError: it is not there: git ignores it.
    """
    script = script_of(config.job.command or "") if config.job.kind == "command" else None
    if script is not None and not os.path.isabs(script) and not (workdir / script).exists():
        raise ConfigError(
            f"job.command: {script} is not in the snapshot that the job would run, because git ignores it",
            hint="take it out of .gitignore, copy the whole folder with job.snapshot=cwd, or run in place: job.snapshot=none",
        )


def _interpreter(config: Config) -> str | None:
    """The Python that runs the script, as this machine sees it; None where set-up lines or a container decide."""
    cluster, word = config.cluster, shlex.split(config.job.command or "")[0]
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
    """Those of the packages that an interpreter does not find; none when it cannot be asked."""
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
            [interpreter, "-c", QUESTION, *wanted], capture_output=True, text=True, timeout=ASK_S, check=True, cwd="/"
        )
        found: list[str] = json.loads(answer.stdout.splitlines()[-1])
        return found
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
