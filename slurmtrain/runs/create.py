"""Create run directories, and the folders in which the runs of several people lie."""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import ConfigError
from slurmtrain.system.files import folder_mode, is_mine, others_may_write, own_user, user_in_words
from slurmtrain.system.paths import located

if TYPE_CHECKING:  # a dry run needs only the names of folders
    from slurmtrain.runs.run_dir import RunDir

PREPARING = ".preparing"  # below runs/: sweeps in the making; deep enough that no verb takes what is in it for runs


def new_run_id() -> str:
    """Return an id that sorts by time in UTC, to the millisecond; its random part distinguishes two of the same moment."""
    return f"{run_id_at(time.time())}{secrets.token_hex(1)}"


def run_id_at(moment: float) -> str:
    """Return the first part of the ids of runs of a moment in unix seconds. In UTC: clocks on the wall go back each autumn."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(moment))}-{int(moment * 1000) % 1000:03d}"


def create_run_dir(runs_dir: Path, name: str) -> RunDir:
    """Create a run directory that did not exist before, mode 0700, or 0750 in a team's folder.

    Raises:
        ConfigError: the folder cannot be created.
    """
    from slurmtrain.runs.run_dir import RunDir

    try:
        folder = make_folder(runs_dir, name)
        while True:
            path = folder / new_run_id()
            try:
                path.mkdir(mode=folder_mode(folder))
                break
            except FileExistsError:
                continue
    except OSError as error:
        raise ConfigError(
            f"cannot create a run directory under {runs_dir}: {error.strerror}",
            hint="set job.runs_dir to a folder that you can write to and that the compute nodes can see",
        ) from None
    run_dir = RunDir(located(path))
    for part in (run_dir.attempts, run_dir.checkpoints):
        part.mkdir(mode=folder_mode(run_dir.path))
    return run_dir


def folder_of(runs_dir: Path, name: str) -> Path:
    """Return this user's folder of a name in a folder of runs: `name`, or `name-USER` if somebody else has made that one.

    The owner of a folder may rename whatever is in it, in spite of its sticky bit. So whoever had a name first could
    replace the waiting runs of all others of that name.
    """
    folder = runs_dir / name
    if not os.path.lexists(folder) or is_mine(folder):
        return folder
    return runs_dir / f"{name}-{re.sub(r'[^A-Za-z0-9._+-]', '_', own_user())}"


def make_folder(runs_dir: Path, name: str, *below: str) -> Path:
    """Make this user's folder of a name (see `folder_of`), and those below it, in a folder of runs; return the last.

    A user who may rename a run's directory can put another in its place, and the next attempt runs that. So the folder
    of a name belongs to this user alone. The folder of runs, made in a team's folder (of a group, with the setgid bit), is
    the group's, too, and sticky: each member can add to it, and rename only what is theirs.

    Raises:
        OSError: a folder cannot be made.
        ConfigError: somebody else can replace what is in it. The owner of a team's folder is trusted.
    """
    runs_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(runs_dir, 0o755)
    except FileExistsError:
        pass
    else:
        team = os.stat(runs_dir.parent)
        if team.st_mode & stat.S_ISGID and team.st_mode & stat.S_IWGRP:
            os.chmod(runs_dir, stat.S_IMODE(os.stat(runs_dir).st_mode) | stat.S_IRWXG | stat.S_ISGID | stat.S_ISVTX)
    found = _check_mode(runs_dir)
    of_a_team = found.st_mode & stat.S_IWGRP and found.st_gid in (os.getegid(), *os.getgroups())
    if found.st_uid not in (os.geteuid(), 0) and not of_a_team and os.access(runs_dir, os.W_OK):
        raise _replaceable(runs_dir, found)
    folder = folder_of(runs_dir, name)
    for path in (folder, *(folder.joinpath(*below[:depth]) for depth in range(1, len(below) + 1))):
        path.mkdir(mode=0o755, exist_ok=True)
        found = _check_mode(path)
        if found.st_uid != os.geteuid():
            raise _replaceable(path, found)
    return folder.joinpath(*below)


def _check_mode(folder: Path) -> os.stat_result:
    """Return the facts of a folder. Raise ConfigError if its mode lets others rename what is not theirs."""
    found = os.stat(folder)
    if others_may_write(found) and not found.st_mode & stat.S_ISVTX:
        who = "everybody" if found.st_mode & stat.S_IWOTH else "every member of its group"
        its_owner = "" if found.st_uid == os.geteuid() else f" by {user_in_words(found.st_uid)}"
        raise ConfigError(
            f"{who} can replace files in {folder} (mode {stat.S_IMODE(found.st_mode):04o}), and a job would run them",
            hint=f"chmod +t {folder}{its_owner}, or set job.runs_dir to a folder of your own",
        )
    return found


def _replaceable(folder: Path, found: os.stat_result) -> ConfigError:
    return ConfigError(
        f"{folder} belongs to {user_in_words(found.st_uid)}, who can replace files in it that a job would run",
        hint="set job.runs_dir or job.name to a folder of your own, or job.runs_dir to one of your group",
    )
