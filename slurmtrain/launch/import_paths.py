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
from pathlib import Path, PurePath
from typing import NamedTuple

from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import ConfigError

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


class Hook(NamedTuple):
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
    return path, [Hook(*each) for each in hooks]


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
    for hook in hooks:
        below = _below(root, hook.path)
        if below is None:
            continue
        # The folder from which the name would be imported as this file; None when its files have other names.
        file = (
            below.parent if below.name == "__init__.py" else below.with_suffix("") if below.suffix == ".py" else below
        )
        parts = tuple(hook.name.split("."))
        if hook.before or file.parts[-len(parts) :] != parts:
            raise _cannot_be_mapped(root, hook.path, f"the import hook {hook.module}")
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
