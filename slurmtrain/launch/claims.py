"""Who does what only one process may do at a time: claims as files, for several shells on several hosts.

Claims of a folder are numbered and never taken away: the next one can be made when the last one's owner has given up or
is dead, and of several that see that, one makes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slurmtrain import process
from slurmtrain.rundir import read_json, write_json

CLAIM_LASTS_S = 3600.0  # unless renewed, of a shell on another host, whose life cannot be seen from here
POLL_S = 0.2  # of a claim on a shared file system: there is no event to await

Owner = dict[str, Any]
"""host, pid and born (see `process.born`) of whoever made a claim."""


def claims(folder: Path) -> list[Path]:
    """Those that were made, in their order. Only the owner of the last may be at it."""
    return sorted(folder.glob("claim-*.json"))


@contextlib.contextmanager
def claimed(folder: Path, busy: Callable[[Owner], None]) -> Iterator[bool]:
    """Be the one. Another process that is at it is waited for.

    Args:
        busy: told once of another one that lives; what it raises ends the wait.

    Yields:
        Whether somebody has had it before, and may have been cut short.
    """
    somebody_before = told = False
    while True:
        made = claims(folder)
        owner = read_json(made[-1]) if made else None
        if made and not _given_up(made[-1]):
            somebody_before = True
            if owner is None or _lives(made[-1], owner):
                if not told and owner is not None:
                    busy(owner)
                    told = True
                time.sleep(POLL_S)
                continue
        somebody_before = somebody_before or bool(made)
        claim = folder / f"claim-{len(made) + 1:04d}.json"
        if _make(claim):
            break
    try:
        yield somebody_before
    finally:
        claim.with_suffix(".over").touch()


def _given_up(claim: Path) -> bool:
    return claim.with_suffix(".over").exists()


def _make(claim: Path) -> bool:
    """Whole or not at all, and by one only (link(2))."""
    temporary = claim.with_name(f".{claim.name}.{os.getpid()}.{secrets.token_hex(3)}")
    me = {"host": socket.gethostname(), "pid": os.getpid(), "born": process.born(os.getpid())}
    write_json(temporary, me)
    try:
        os.link(temporary, claim)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)


def renew(folder: Path) -> None:
    """Say that the owner of the last claim lives, to those who cannot see its process."""
    claims(folder)[-1].touch()


def is_claimed(folder: Path) -> bool:
    """Somebody is at it, for all that can be seen from here."""
    made = claims(folder)
    owner = read_json(made[-1]) if made and not _given_up(made[-1]) else None
    return owner is not None and _lives(made[-1], owner)


def _lives(claim: Path, owner: Owner) -> bool:
    if owner["host"] != socket.gethostname():
        return time.time() - claim.stat().st_mtime < CLAIM_LASTS_S
    return owner["born"] is not None and process.born(int(owner["pid"])) == owner["born"]
