"""Who does what only one process may do at a time: claims as files, for several shells on several hosts.

Claims of a folder are numbered and never taken away: the next one can be made when the last one's owner has given up or
is dead, and of several that see that, one makes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slurmtrain import process
from slurmtrain.records import is_count
from slurmtrain.rundir import read_json, write_json

HEARTBEAT_S = 10.0
CLAIM_LASTS_S = 60.0  # without a heartbeat, of a shell on another host, whose life cannot be seen from here
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
    watched = _Watched()
    while True:
        made = claims(folder)
        if made and not _given_up(made[-1]):
            somebody_before = True
            owner = _owner(made[-1])
            lives = watched.lives(made[-1], owner)
            if lives is not False:
                if lives and owner is not None and not told:
                    busy(owner)
                    told = True
                time.sleep(POLL_S)
                continue
        somebody_before = somebody_before or bool(made)
        claim = folder / f"claim-{len(made) + 1:04d}.json"
        if _make(claim):
            break
    over = threading.Event()
    threading.Thread(target=_beat, args=(claim, over), daemon=True).start()
    try:
        yield somebody_before
    finally:
        over.set()
        claim.with_suffix(".over").touch()


class _Watched:
    """Whether the owner of a claim lives. Where it is on another host, or not named, its heartbeats are all there is to see."""

    def __init__(self) -> None:
        self._last: tuple[Path, int] | None = None
        self._beats = 0
        self._since = time.monotonic()

    def lives(self, claim: Path, owner: Owner | None) -> bool | None:
        """None: that cannot be said yet. A clock that is ahead makes a fresh claim look old, so an old one is watched."""
        if owner is not None and owner["host"] == socket.gethostname():
            return _lives_here(owner)
        heard = (claim, _beaten(claim))
        if heard != self._last:
            self._beats = self._beats + 1 if self._last is not None and self._last[0] == claim else 0
            self._last, self._since = heard, time.monotonic()
        silent_s = time.monotonic() - self._since
        if self._beats or _age_s(claim) < CLAIM_LASTS_S:
            return silent_s < CLAIM_LASTS_S
        return None if silent_s < 2.5 * HEARTBEAT_S else False


def _beaten(claim: Path) -> int:
    """When its owner last gave a sign, in nanoseconds. Opened first: NFS would answer from its cache for a minute."""
    with claim.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _beat(claim: Path, over: threading.Event) -> None:
    """Say that the owner lives, to those who cannot see its process."""
    while not over.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):  # the file system may be away for a while
            os.utime(claim)


def _given_up(claim: Path) -> bool:
    return claim.with_suffix(".over").exists()


def _make(claim: Path) -> bool:
    """Whole or not at all, and by one only (link(2)). Returns whether it was this one."""
    temporary = claim.with_name(f".{claim.name}.{os.getpid()}.{secrets.token_hex(3)}")
    me = {"host": socket.gethostname(), "pid": os.getpid(), "born": process.born(os.getpid())}
    write_json(temporary, me)
    try:
        os.link(temporary, claim)
        return True
    except FileExistsError:
        # NFS asks once more when the answer to a link that it has made is lost, and is told that it is there.
        with temporary.open("rb") as file:  # opened, since NFS would answer from its cache
            return os.fstat(file.fileno()).st_nlink == 2
    finally:
        temporary.unlink(missing_ok=True)


def is_claimed(folder: Path) -> bool:
    """Somebody is at it, for all that can be seen from here."""
    made = claims(folder)
    if not made or _given_up(made[-1]):
        return False
    owner = _owner(made[-1])
    here = owner is not None and owner["host"] == socket.gethostname()
    return _lives_here(owner) if owner is not None and here else _age_s(made[-1]) < CLAIM_LASTS_S


def _owner(claim: Path) -> Owner | None:
    """Who has made a claim; None where it is torn, as a power cut can leave it."""
    values = read_json(claim) or {}
    known = isinstance(values.get("host"), str) and is_count(values.get("pid")) and "born" in values
    return values if known else None


def _age_s(claim: Path) -> float:
    return time.time() - _beaten(claim) / 1e9


def _lives_here(owner: Owner) -> bool:
    return owner["born"] is not None and process.born(int(owner["pid"])) == owner["born"]
