"""Paths as a person writes them: relative to the folder where the command was typed, with links unresolved.

A home or a scratch folder is often a link, or mounted elsewhere on the login node than on the compute nodes. So a job
is given the path that the person's shell uses, not what links on this machine resolve to.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def current_folder() -> Path:
    """Return the current folder by the name that the shell knows it by ($PWD), if that is the same folder."""
    named = os.environ.get("PWD", "")
    try:
        if os.path.isabs(named) and os.path.samefile(named, os.curdir):
            return Path(os.path.normpath(named)) if ".." not in Path(named).parts else Path(named)
    except OSError:
        pass
    return Path.cwd()


def absolute(path: str | Path, folder: Path | None = None) -> Path:
    """Return `path` as seen from `folder`, or from the current one, without resolving links. `~` is the home folder."""
    joined = os.path.join(folder if folder is not None else current_folder(), Path(path).expanduser())
    # `link/..` is not where the link lies, but the parent of what it points to: such a path stays as it is.
    plain = os.path.normpath(joined)
    same = ".." not in Path(joined).parts or os.path.realpath(plain) == os.path.realpath(joined)
    return Path(plain if same else joined)


def located(path: Path) -> Path:
    """Return the absolute path of a run's or sweep's folder; if that is a link itself, what it points to."""
    found = absolute(path)
    return found.resolve() if found.is_symlink() or found.parent.is_symlink() else found


def runs_root() -> Path:
    """Return where `submit` puts runs unless job.runs_dir says otherwise, and where verbs look.

    It is SLURMTRAIN_RUNS, else ./runs.
    """
    return Path(os.environ.get("SLURMTRAIN_RUNS") or "runs").expanduser()
