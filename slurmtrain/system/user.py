"""Who this process is, by its user id: LOGNAME and USER of a shell may name another (`sudo -u`, `su`)."""

from __future__ import annotations

import functools
import os
import pwd


@functools.cache
def name_of(uid: int) -> str | None:
    """Return the name of a user; None where there is none, as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def in_words(uid: int) -> str:
    """Return a user as a message names them: "user jane", or "user 1004" where there is no name."""
    return f"user {name_of(uid) or uid}"


def own_user() -> str:
    """Return the name of this process's user, or its number where it has no name: SLURM's commands take both."""
    return name_of(os.getuid()) or str(os.getuid())
