"""Who may read what a run writes: its owner alone, or also the group of a team's folder.

A team's folder has the setgid bit, and its group may read it (mode 2770 or 2750). What is made below inherits group and bit
from the kernel, and its mode from here. So a run that was private when it was made stays so, and of a shared one everything
can be read, the files of later attempts, too. A umask of 077 keeps all of it private. Nobody but the owner may write what a run
is started from, whatever the umask: its script, config and code would be run as the owner. What a program of the user's own
makes follows the umask, as elsewhere.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OF_A_TEAM = stat.S_ISGID | stat.S_IRGRP | stat.S_IXGRP


def folder_mode(parent: Path) -> int:
    """Return the mode with which to make a folder in `parent`, before the umask: 0750 in a team's folder, else 0700."""
    return 0o750 if _is_of_a_team(parent) else 0o700


def file_mode(parent: Path) -> int:
    """Return the mode with which to make a file in `parent`, before the umask: 0640 in a team's folder, else 0600."""
    return 0o640 if _is_of_a_team(parent) else 0o600


def make_own_folder(path: Path, *, closed: int) -> bool:
    """Make a folder that only this user may enter, and return whether the one that is there now is this user's own.

    In a folder such as /tmp anybody may have made one of that name before, or a link.

    Args:
        closed: bits of the mode that must not be set, as 0o022: nobody else may write there.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & closed


def forbid_others_to_write(folder: Path) -> None:
    """Take the right to write from all but the owner, of a folder and all below it. Links are not followed."""
    for path, _, names in os.walk(folder):
        for each in (path, *(os.path.join(path, name) for name in names)):
            found = os.lstat(each)
            if found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode):
                os.chmod(each, stat.S_IMODE(found.st_mode) & ~0o022)


def inherit_group(folder: Path) -> None:
    """Give what was copied into a team's folder its group and setgid bit, as what is made there has them from the kernel.

    A copied folder has the mode of the original, without that bit, and so what is made in it afterwards would be of the
    user's own group. What the original lets nobody else read stays so.
    """
    if not _is_of_a_team(folder):
        return
    group = os.stat(folder).st_gid
    for path, _, names in os.walk(folder):
        for each in (path, *(os.path.join(path, name) for name in names)):
            if os.lstat(each).st_gid != group:
                os.chown(each, -1, group, follow_symlinks=False)
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & stat.S_IRGRP and not mode & stat.S_ISGID:
            os.chmod(path, mode | stat.S_ISGID)


def _is_of_a_team(folder: Path) -> bool:
    try:
        return os.stat(folder).st_mode & OF_A_TEAM == OF_A_TEAM
    except OSError:
        return False
