"""Decide whose a run is, and whom this user trusts: links, owners and modes of its parts."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.errors import UnavailableRecordError, UnreadableRecordError, UsageError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import is_mine, user_in_words

if TYPE_CHECKING:
    from slurmtrain.runs.sweep_dir import Sweep


def foreign_link(path: Path | os.DirEntry[str]) -> bool:
    """Return whether this is a link that neither this user nor root has made: it may lead anywhere."""
    if isinstance(path, os.DirEntry) and not path.is_symlink():
        return False
    found = os.lstat(path)
    return stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0)


def is_own(found: RunDir | Sweep) -> bool:
    """Return whether the folder of a run or sweep, and its run.json or sweep.json, belong to this user."""
    return all(is_mine(path) for path in (found.path, found.info_file))


def check_parts(run_dir: RunDir) -> None:
    """Check that the run has the parts that `submit` makes: folders and files of one user, and no links to elsewhere.

    Links that the reader has made, for instance to move a folder to a larger disk, are accepted.

    Raises:
        UnreadableRecordError: it has others.
    """
    try:
        owner = os.stat(run_dir.path).st_uid
        me, info_file = os.geteuid(), run_dir.info_file
        for path in (info_file, run_dir.attempts, run_dir.checkpoints, run_dir.evaluations):
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                continue
            if stat.S_ISLNK(found.st_mode) and (path is info_file or found.st_uid not in (me, 0)):
                raise UnreadableRecordError(f"{path} is a link, and links in a run are not followed")
            if found.st_uid not in (owner, me, 0):
                raise UnreadableRecordError(
                    f"{path} belongs to {user_in_words(found.st_uid)}, and the run to {user_in_words(owner)}"
                )
    except OSError as error:
        raise UnavailableRecordError(f"{run_dir.path} cannot be read: {error.strerror}", error) from None


def require_own(run_dir: RunDir) -> None:
    """Check that the run belongs to this user in all its parts, before anything of it is started, changed or removed.

    The contents of a run are executed: its script by SLURM, its config by the trainer. Root is no exception.

    Raises:
        UsageError: it belongs to somebody else, or a part of it does.
    """
    run = run_dir.evaluated_run or run_dir
    for each in dict.fromkeys((run, run_dir)):
        parts = (each.info_file, each.config_file, each.script, each.events_file, each.metrics_file, each.request_file)
        folders = (each.attempts, each.checkpoints, each.evaluations, each.code)
        for path in (each.path, *parts, *folders):
            if os.path.lexists(path) and not is_mine(path):
                whose = user_in_words(os.lstat(path).st_uid)
                raise UsageError(
                    f"{path} belongs to {whose}: only the user who submitted a run may change or restart it",
                    hint="`status` and `logs` show it; to continue from it: checkpoint.restore_from with your own run",
                )
        check_parts(each)


def check_not_linked(run_dir: RunDir) -> None:
    """Check that the folders of a run are in it, before something in them is removed.

    Raises:
        UsageError: one is a link to elsewhere.
    """
    for path in (run_dir.attempts, run_dir.checkpoints, run_dir.evaluations):
        if path.is_symlink():
            raise UsageError(
                f"{path} is a link to {os.path.realpath(path)}, and slurmtrain removes nothing through a link",
                hint="to prune that folder, name it directly",
            )
