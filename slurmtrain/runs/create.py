"""Create run directories, and the folders in which the runs of several people lie."""

from __future__ import annotations

import os
import secrets
import stat
import time
from pathlib import Path

from slurmtrain.errors import ConfigError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import user
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.paths import located


def new_run_id() -> str:
    """Return an id that sorts by time, to the millisecond; its random part distinguishes two of the same moment."""
    now = time.time()
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}{secrets.token_hex(1)}"


def create_run_dir(runs_dir: Path, name: str) -> RunDir:
    """Create a run directory that did not exist before, mode 0700, or 0750 in a team's folder.

    Raises:
        ConfigError: the folder cannot be created.
    """
    try:
        make_folder(runs_dir, name)
        while True:
            path = runs_dir / name / new_run_id()
            try:
                path.mkdir(mode=folder_mode(path.parent))
                break
            except FileExistsError:
                continue
    except OSError as error:
        raise ConfigError(
            f"cannot create a run directory under {runs_dir}: {error.strerror}",
            hint="set job.runs_dir to a folder that you can write to and that the compute nodes can see",
        ) from None
    run_dir = RunDir(located(path))
    for folder in (run_dir.attempts, run_dir.checkpoints):
        folder.mkdir(mode=folder_mode(run_dir.path))
    return run_dir


def make_folder(runs_dir: Path, *names: str) -> None:
    """Make the folders in which runs of several people may lie, and check that nobody else can replace what is in them.

    A user who may rename a run's directory can put another in its place, and the next attempt runs that. In a team's
    folder (of a group, with the setgid bit) the folders made here are the group's, too, and sticky: each member can add
    runs, and rename none but their own.

    Raises:
        OSError: a folder cannot be made.
        ConfigError: everybody, or the owner of a folder, can replace what is in it.
    """
    runs_dir.parent.mkdir(parents=True, exist_ok=True)
    above, folder = runs_dir.parent, runs_dir
    for folder in (runs_dir, *(runs_dir.joinpath(*names[:depth]) for depth in range(1, len(names) + 1))):
        try:
            os.mkdir(folder, 0o775)
        except FileExistsError:
            pass
        else:
            team = os.stat(above)
            if team.st_mode & stat.S_ISGID and team.st_mode & stat.S_IWGRP:
                os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | stat.S_IRWXG | stat.S_ISGID | stat.S_ISVTX)
        _check_folder(folder)
        above = folder


def _check_folder(folder: Path) -> None:
    """Raise ConfigError if a user who is in no group with this user can replace what is in a folder."""
    found = os.stat(folder)
    hint = "set job.runs_dir or job.name to a folder of your own, or of your group"
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"everybody can replace files in {folder} (mode {stat.S_IMODE(found.st_mode):04o}), and a job would run them",
            hint=f"chmod o-w {folder}, or chmod +t",
        )
    own = found.st_uid in (os.geteuid(), 0)
    ours = found.st_mode & stat.S_IWGRP and found.st_gid in (os.getegid(), *os.getgroups())
    if not own and not ours and os.access(folder, os.W_OK):
        raise ConfigError(
            f"{folder} belongs to {user.in_words(found.st_uid)}, who can replace files in it that a job would run",
            hint=hint,
        )
