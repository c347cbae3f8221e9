"""Claims: files by which only one process at a time does something, for several shells on several hosts.

Claims of a folder are numbered and never removed: the next one can be made when the last one's owner has given it up or
is dead, and of several processes that see that, one makes it (`files.give_name`).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmtrain.system.files import give_name, read_json, temporary_beside, write_json
from slurmtrain.system.process import ProcessMark

HEARTBEAT_S = 10.0
CLAIM_LASTS_S = 60.0  # without a heartbeat, of a shell whose life cannot be seen from here
POLL_S = 0.2  # seconds between looks at a claim: a shared file system has no event to await


def claims(folder: Path) -> list[Path]:
    """Return the claims that were made, in order. Only the owner of the last one may be at work."""
    return sorted((path for path in folder.glob("claim-*.json") if _number(path)), key=_number)


def _number(claim: Path) -> int:
    found = re.fullmatch(r"claim-(\d+)", claim.stem)
    return int(found[1]) if found else 0


@contextlib.contextmanager
def claimed(folder: Path, busy: Callable[[ProcessMark], None]) -> Iterator[bool]:
    """Hold the claim of a folder; wait for another process that holds it.

    Args:
        busy: called once with another owner that is alive; an error that it raises ends the wait.

    Yields:
        Whether another process held the claim before, and may have been cut short.
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
        claim = folder / f"claim-{_number(made[-1]) + 1 if made else 1:04d}.json"
        if _make(claim):
            break
    over = threading.Event()
    threading.Thread(target=_beat, args=(claim, over), daemon=True).start()
    try:
        yield somebody_before
    finally:
        over.set()
        with contextlib.suppress(FileNotFoundError):  # the folder was removed within the claim
            claim.with_suffix(".over").touch()


class _Watched:
    """The observation of a claim's owner.

    If it cannot be seen from here, or is not named, its heartbeats are the only evidence.
    """

    def __init__(self) -> None:
        self._last: tuple[Path, int] | None = None
        self._beats = 0
        self._since = time.monotonic()

    def lives(self, claim: Path, owner: ProcessMark | None) -> bool | None:
        """Return whether the owner is alive; None: not known yet.

        A clock that is ahead makes a new claim look old, so an old one is observed for a while.
        """
        seen = owner.lives() if owner is not None else None
        if seen is not None:
            return seen
        heard = (claim, _beaten(claim))
        if heard != self._last:
            self._beats = self._beats + 1 if self._last is not None and self._last[0] == claim else 0
            self._last, self._since = heard, time.monotonic()
        silent_s = time.monotonic() - self._since
        if self._beats or _age_s(claim) < CLAIM_LASTS_S:
            return silent_s < CLAIM_LASTS_S
        return None if silent_s < 2.5 * HEARTBEAT_S else False


def _beaten(claim: Path) -> int:
    """Return when the owner's last heartbeat was, in nanoseconds.

    The file is opened, since NFS would answer from its cache.
    """
    with claim.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _beat(claim: Path, over: threading.Event) -> None:
    """Touch the claim at intervals until `over`, for processes that cannot see the owner's process."""
    while not over.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):  # the file system may be away for a while
            os.utime(claim)


def _given_up(claim: Path) -> bool:
    return claim.with_suffix(".over").exists()


def _make(claim: Path) -> bool:
    """Make a claim, and return whether this process has made it, of all that tried."""
    temporary = temporary_beside(claim)
    write_json(temporary, ProcessMark.own().to_json())
    try:
        give_name(temporary, claim)
        return True
    except FileExistsError:
        return False


def is_claimed(folder: Path) -> bool:
    """Return whether some process holds the claim, as far as can be seen from here."""
    made = claims(folder)
    if not made or _given_up(made[-1]):
        return False
    owner = _owner(made[-1])
    seen = owner.lives() if owner is not None else None
    return _age_s(made[-1]) < CLAIM_LASTS_S if seen is None else seen


def holder_here(folder: Path) -> int | None:
    """Return the id of the process of this machine that holds the claim; None if there is none."""
    made = claims(folder)
    owner = _owner(made[-1]) if made and not _given_up(made[-1]) else None
    return owner.pid if owner is not None and owner.lives() else None


def _owner(claim: Path) -> ProcessMark | None:
    """Return the owner of a claim; None if its file is not complete, as after a power cut."""
    return ProcessMark.from_json(read_json(claim))


def _age_s(claim: Path) -> float:
    return time.time() - _beaten(claim) / 1e9
