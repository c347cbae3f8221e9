"""Whose a file is, and who else may have written it; who this process is."""

from __future__ import annotations

import functools
import os
import pwd
import stat
from pathlib import Path


def is_mine(path: Path) -> bool:
    """Return whether this user owns the file at `path` itself, even if it is a link; False if there is nothing."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def why_distrusted(path: str | Path, known: dict[str, str | None] | None = None) -> str | None:
    """Say why somebody else may have written a file; return None when only this user and root can have.

    This concerns the file, all folders above it and the targets of links: a user who may rename a folder may put
    another there. A sticky folder, as /tmp is, keeps others from renaming what is not theirs.

    Args:
        known: earlier results, by path, for a caller that looks at many files of the same folders.
    """
    return _why_distrusted(os.path.realpath(path), {} if known is None else known)


def _why_distrusted(real: str, known: dict[str, str | None]) -> str | None:
    if real not in known:
        above = os.path.dirname(real)
        known[real] = _why_distrusted_itself(real) or (_why_distrusted(above, known) if above != real else None)
    return known[real]


def _why_distrusted_itself(real: str) -> str | None:
    try:
        found = os.lstat(real)
    except OSError as error:
        return f"{real} cannot be looked at ({error.strerror})"
    if found.st_uid not in (os.geteuid(), 0):
        return f"{real} belongs to {user_in_words(found.st_uid)}"
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if others_may_write(found) and not sticky:
        return f"{real} can be changed by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def only_mine(path: Path) -> bool:
    """Return whether a file and its folder belong to this user, are no links, and nobody else may write into either.

    Then this user has written it, even if others may rename the folders above, as in a team's folder.
    """
    try:
        file, folder = os.lstat(path), os.lstat(path.parent)
    except OSError:
        return False
    kinds = stat.S_ISREG(file.st_mode) and stat.S_ISDIR(folder.st_mode)
    return kinds and all(each.st_uid == os.geteuid() and not others_may_write(each) for each in (file, folder))


def others_may_write(found: os.stat_result) -> bool:
    """Return whether mode and group let somebody else write.

    A group with the user's own number counts as theirs alone.
    """
    own_group = found.st_gid == os.geteuid()
    return bool(found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not own_group))


@functools.cache
def name_of(uid: int) -> str | None:
    """Return the name of a user; None where there is none, as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def user_in_words(uid: int) -> str:
    """Return a user as a message names them: "user jane", or "user 1004" where there is no name."""
    return f"user {name_of(uid) or uid}"


def own_user() -> str:
    """Return the name of this process's user, or its number where it has no name: SLURM's commands take both.

    By the user id: LOGNAME and USER of a shell may name another (`sudo -u`, `su`).
    """
    return name_of(os.getuid()) or str(os.getuid())
