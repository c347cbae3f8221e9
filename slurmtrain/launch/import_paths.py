"""The places from which the ranks' interpreter imports a work tree, so that a job imports the same files from its snapshot.

An editable install makes Python look into the live work tree: by a line in a .pth file, before which PYTHONPATH is
searched, or by an import hook. The interpreter is asked for both here; `snapshot` maps what they name into the
snapshot, or refuses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import ConfigError

ASK_S = 30  # an interpreter on a slow file system takes seconds to start
# Run by the ranks' interpreter, of any version: prints its search path, and the names that its import hooks map.
# setuptools keeps the mapping beside its hook, `editables` in its class, scikit-build-core in its instance.
QUESTION = """
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
print(json.dumps({"path": [each for each in sys.path if isinstance(each, str)], "hooks": hooks}))
"""


@dataclass(frozen=True)
class Hook:
    """A name that an import hook maps to a place.

    Attributes:
        before: the hook is asked before PYTHONPATH is searched.
        module: module of the hook.
        name: dotted name of the package or module.
        path: its folder or file.
    """

    before: bool
    module: str
    name: str
    path: str


@dataclass(frozen=True)
class ImportPaths:
    """The search path of an interpreter, and what its import hooks map."""

    path: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] = ()


def interpreter_of(cluster: ClusterConfig) -> str | None:
    """Return the path of the ranks' interpreter as this machine sees it; None for one that cannot be asked here."""
    if cluster.container.kind:
        return None
    if cluster.python:
        return shutil.which(os.path.expanduser(cluster.python))
    if cluster.venv:
        return shutil.which(os.path.join(os.path.expanduser(cluster.venv), "bin", "python"))
    if cluster.conda_env:
        return _of_conda(os.path.expanduser(cluster.conda_env))
    return sys.executable


def _of_conda(name: str) -> str | None:
    if os.sep in name:
        return shutil.which(os.path.join(name, "bin", "python"))
    base = os.path.dirname(os.path.dirname(os.environ.get("CONDA_EXE", "")))
    folders = [*os.environ.get("CONDA_ENVS_PATH", "").split(":"), os.path.join(base, "envs") if base else ""]
    folders.append(os.path.expanduser("~/.conda/envs"))
    found = (shutil.which(os.path.join(folder, name, "bin", "python")) for folder in folders if folder)
    return next((each for each in found if each), None)


def ask(interpreter: str) -> ImportPaths:
    """Ask an interpreter where it looks for modules; the result is empty if it does not answer."""
    try:
        # In "/", so that no entry is relative to where this is asked.
        answer = subprocess.run(
            [interpreter, "-c", QUESTION], cwd="/", capture_output=True, text=True, timeout=ASK_S, check=True
        )
        found = json.loads(answer.stdout.splitlines()[-1])
        return ImportPaths(tuple(found["path"]), tuple(Hook(*each) for each in found["hooks"]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ImportPaths()


def roots_below(root: Path, paths: ImportPaths) -> tuple[str, ...]:
    """Return the folders below `root` that modules are imported from, relative to it, in the interpreter's order.

    Raises:
        ConfigError: an import hook takes a module from there in a way that PYTHONPATH cannot stand in for.
    """
    found: list[PurePath] = []
    for entry in paths.path:
        below = _below(root, entry)
        if below is None or _is_installation(below) or not os.path.isdir(entry):
            continue
        if below.name.startswith("__editable__."):  # links to the work tree's files, which git does not track
            raise _cannot_be_mapped(root, entry, "setuptools' editable_mode=strict")
        found.append(below)
    for hook in paths.hooks:
        below = _below(root, hook.path)
        if below is None or _is_installation(below):
            continue
        parent = _parent_of(below, hook.name)
        if hook.before or parent is None:
            raise _cannot_be_mapped(root, hook.path, f"the import hook {hook.module}")
        found.append(parent)
    return tuple(dict.fromkeys(str(each) for each in found if each != PurePath(".")))


def _below(root: Path, path: str) -> PurePath | None:
    """Return the path relative to `root`, with links resolved; None when it lies elsewhere."""
    if not os.path.isabs(path):
        return None
    try:
        return Path(os.path.realpath(path)).relative_to(os.path.realpath(root))
    except ValueError:
        return None


def _is_installation(below: PurePath) -> bool:
    """Return whether a path is in an environment inside the work tree.

    An environment holds copies of packages, not the project's own code.
    """
    standard = os.path.basename(sysconfig.get_path("stdlib"))
    return any(part in ("site-packages", "dist-packages") for part in below.parts) or standard in below.parts


def _parent_of(below: PurePath, name: str) -> PurePath | None:
    """Return the folder from which `name` would be imported as the file `below`; None when its files have other names."""
    file = below.parent if below.name == "__init__.py" else below.with_suffix("") if below.suffix == ".py" else below
    parts = tuple(name.split("."))
    return PurePath(*file.parts[: -len(parts)]) if file.parts[-len(parts) :] == parts else None


def _cannot_be_mapped(root: Path, path: str, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is imported by {what}, so a job would run the work tree {root} at that time, not its snapshot",
        hint="install it so that a .pth file names its folder (`pip install -e . --config-settings editable_mode=compat` "
        "with setuptools), or run in place with job.snapshot=none",
    )


def pythonpath_folders(workdir: str, roots: Sequence[str]) -> Iterator[str]:
    """Yield the folders of a snapshot for PYTHONPATH, relative to the run directory, or absolute for a run in place."""
    yield from dict.fromkeys([workdir, "code", *(f"code/{root}" for root in roots)])
