"""Which code a job runs, and from where its ranks import it: found without copying. `snapshot` makes the copy.

An editable install makes Python look into the live work tree: by a line in a .pth file, before which PYTHONPATH is
searched, or by an import hook. The ranks' interpreter is asked for both; what they name is mapped into the snapshot, so that a
job imports the same files from there, or refused.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from slurmtrain.choices import SnapshotMode
from slurmtrain.config.schema import ClusterConfig, JobConfig
from slurmtrain.errors import ConfigError

if TYPE_CHECKING:
    from slurmtrain.runs.software import CodeRecord

# Of an import hook: is it asked before PYTHONPATH; its module; a name that it maps; the folder or file of that.
Hook = tuple[bool, str, str, str]
# Variables of git that do not say which repository is meant. All others are set within a hook or `git rebase --exec`.
KEPT_FOR_GIT = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_EXEC_PATH")
TIMED_OUT = 124
ASK_S = 60  # an interpreter on a slow file system takes seconds to start
# The search path of an interpreter, and the names that its import hooks map.
# setuptools keeps the mapping beside its hook, `editables` in its class, scikit-build-core in its instance.
IMPORTS = """
import json, sys
hooks, before = [], True
for finder in sys.meta_path:
    kind = finder if isinstance(finder, type) else type(finder)
    if kind.__name__ == "PathFinder":
        before = False
    if kind.__module__.startswith("_frozen_importlib"):
        continue
    places = [vars(sys.modules.get(kind.__module__)) if kind.__module__ in sys.modules else {}, vars(kind)]
    places.append(getattr(finder, "__dict__", {}))
    for place in places:
        for mapping in list(place.values()):
            if isinstance(mapping, dict):
                hooks += [
                    [before, kind.__module__, name, path]
                    for name, path in mapping.items()
                    if isinstance(name, str) and isinstance(path, str)
                ]
print(json.dumps([[each for each in sys.path if isinstance(each, str)], hooks]))
"""


class CodeSource(Struct, frozen=True):
    """The folders that would be copied, found without copying: a dry run shows the same paths.

    Attributes:
        root: the folder that is copied; None: run in place.
        workdir: working directory of the ranks: "code", "code/sub" below the run directory, or an absolute path when
            run in place.
        roots: folders of the copy that the ranks import from, besides the working directory, relative to the copy.
        git: the files are those that git knows, or would.
        record: what is known of code that was a snapshot before, and which files it has; None: git is asked.
    """

    root: Path | None
    workdir: str
    git: bool = False
    roots: tuple[str, ...] = ()
    record: CodeRecord | None = None


def find_source(job: JobConfig, cwd: Path, cluster: ClusterConfig | None = None) -> CodeSource:
    """Decide what the snapshot is made of: the git work tree around `cwd`, `cwd` itself, or nothing.

    Args:
        cluster: has the ranks' interpreter, which is asked where it imports the work tree from; None: none is asked.

    Raises:
        ConfigError: there is a `.git`, but git cannot read it; or code of the work tree is imported in a way that no
            snapshot can replace. Running in place instead would silently break the promise that later edits change
            nothing.
    """
    source = CodeSource(None, str(cwd)) if job.snapshot != SnapshotMode.CWD else CodeSource(cwd, "code")
    if job.snapshot == SnapshotMode.AUTO:
        found, here = run_git(cwd, "rev-parse", "--show-toplevel"), cwd.resolve()
        if found.returncode == 0 and found.stdout.strip():
            root = Path(found.stdout.rstrip("\n"))
            source = CodeSource(root, str("code" / here.relative_to(root.resolve())), git=True)
        elif any((folder / ".git").exists() for folder in (here, *here.parents)):
            raise git_failed(here, found)
    interpreter = interpreter_of(cluster) if source.root is not None and cluster is not None else None
    if source.root is None or interpreter is None:
        return source
    return replace(source, roots=roots_below(source.root, *ask(interpreter)))


def interpreter_of(cluster: ClusterConfig) -> str | None:
    """Return the path of the ranks' interpreter as this machine sees it; None for one that cannot be asked here."""
    if cluster.container.kind:
        return None
    if cluster.python:
        return shutil.which(os.path.expanduser(cluster.python))
    environment = os.path.expanduser(cluster.venv or cluster.conda_env or "")
    if not environment:
        return sys.executable
    if cluster.venv or os.sep in environment:
        return shutil.which(os.path.join(environment, "bin", "python"))
    base = os.path.dirname(os.path.dirname(os.environ.get("CONDA_EXE", "")))
    folders = [*os.environ.get("CONDA_ENVS_PATH", "").split(":"), os.path.join(base, "envs") if base else ""]
    folders.append(os.path.expanduser("~/.conda/envs"))
    found = (shutil.which(os.path.join(folder, environment, "bin", "python")) for folder in folders if folder)
    return next((each for each in found if each), None)


def ask(interpreter: str) -> tuple[Sequence[str], Sequence[Hook]]:
    """Ask an interpreter, of any version, for its search path, and what its import hooks map; nothing if it does not answer."""
    try:
        # From the root, so that no entry of its path is relative to where it is asked.
        done = subprocess.run(
            [interpreter, "-c", IMPORTS], cwd="/", capture_output=True, text=True, timeout=ASK_S, check=True
        )
        path, hooks = json.loads(done.stdout.splitlines()[-1])  # a .pth file may have printed before
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return (), ()
    return path, [tuple(each) for each in hooks]


def roots_below(root: Path, path: Sequence[str], hooks: Sequence[Hook]) -> tuple[str, ...]:
    """Return the folders below `root` that modules are imported from, relative to it, in the interpreter's order.

    Raises:
        ConfigError: an import hook takes a module from there in a way that PYTHONPATH cannot stand in for.
    """
    found: list[PurePath] = []
    for entry in path:
        below = _below(root, entry)
        if below is None or not os.path.isdir(entry):
            continue
        if below.name.startswith("__editable__."):  # links to the work tree's files, which git does not track
            raise _cannot_be_mapped(root, entry, "setuptools' editable_mode=strict")
        found.append(below)
    for before, module, name, place in hooks:
        below = _below(root, place)
        if below is None:
            continue
        # The folder from which the name would be imported as this file; None when its files have other names.
        file = (
            below.parent if below.name == "__init__.py" else below.with_suffix("") if below.suffix == ".py" else below
        )
        parts = tuple(name.split("."))
        if before or file.parts[-len(parts) :] != parts:
            raise _cannot_be_mapped(root, place, f"the import hook {module}")
        found.append(PurePath(*file.parts[: -len(parts)]))
    return tuple(dict.fromkeys(str(each) for each in found if each != PurePath(".")))


def _below(root: Path, path: str) -> PurePath | None:
    """Return the path relative to `root`, with links resolved; None when it lies elsewhere, or in an environment."""
    real, top = os.path.realpath(path), os.path.realpath(root)
    if not os.path.isabs(path) or not Path(real).is_relative_to(top):
        return None
    below = Path(real).relative_to(top)
    # An environment inside the work tree holds copies of packages, not the project's own code.
    installed = {"site-packages", "dist-packages", os.path.basename(sysconfig.get_path("stdlib"))}
    return None if installed & {*below.parts} else below


def _cannot_be_mapped(root: Path, path: str, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is imported by {what}, so a job would run the work tree {root} at that time, not its snapshot",
        hint="install it so that a .pth file names its folder (`pip install -e . --config-settings editable_mode=compat` "
        "with setuptools), or run in place with job.snapshot=none",
    )


def pythonpath_folders(workdir: str, roots: Sequence[str]) -> Iterator[str]:
    """Yield the folders of a snapshot for PYTHONPATH, relative to the run directory, or absolute for a run in place."""
    yield from dict.fromkeys([workdir, "code", *(f"code/{root}" for root in roots)])


def run_git(folder: Path, *arguments: str, patience_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Ask git about a folder. The answer never raises: its exit code is `TIMED_OUT` if git took longer."""
    command = ["git", *arguments]
    try:
        # surrogateescape: a file name need not be UTF-8, and os functions take it back as it was.
        return subprocess.run(
            command,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name in KEPT_FOR_GIT or name[:4] != "GIT_"},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=patience_s,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", "git is not installed, or not in PATH")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, TIMED_OUT, "", f"git took longer than {patience_s} s")


def git_failed(folder: Path, answer: subprocess.CompletedProcess[str]) -> ConfigError:
    """Return the error for code that git does not let us copy."""
    words = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
    return ConfigError(
        f"the code in {folder} cannot be copied, because git failed: {words[0].removeprefix('fatal: ')}",
        hint=f"make `git -C {folder} status` work, or run in place with job.snapshot=none",
    )
