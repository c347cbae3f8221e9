"""What is done when a storage fails: it is asked again, or what it cannot take is left out.

Which of the two is right depends on what is lost by giving up: `RESTORE` where the work of hours would be, `STEP` where a
step of training waits, and a run goes on from its last checkpoint. Polls, which look again anyway, need neither: they
take an error that `may_pass` for "not there yet". What the work does not depend on (numbers and events of a run) is
written by `BestEffort`.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.system.files import refresh

log = logging.getLogger(__name__)

T = TypeVar("T")

# How long a file may be missing that another node has written: an NFS client believes what it has cached.
LATE_S = 2.0
# Errors of the file, and of this process. All others (EIO, ETIMEDOUT, ESTALE, ESHUTDOWN, ...) are of the storage.
_OF_THE_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)
_OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Patience:
    """A policy.

    Attributes:
        pauses_s: seconds between two attempts.
        within_s: the last pause is repeated until so many seconds have passed since the first attempt; None: there are no
            more attempts after it.
    """

    pauses_s: tuple[float, ...]
    within_s: float | None = None


RESTORE = Patience((0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0), within_s=60.0)  # a server that is started anew
STEP = Patience((0.1, 0.5, 2.5))  # long enough for a file server to change over, short for a step


def may_pass(error: OSError) -> bool:
    """Return whether an error is of the storage, and says nothing about the file or this process."""
    return error.errno not in (*_OF_THE_FILE, *_OF_THIS_PROCESS)


def is_of_this_process(error: OSError) -> bool:
    """Return whether an error says something about this process alone: its memory, its descriptors, its rights."""
    return error.errno in _OF_THIS_PROCESS


def patiently(
    work: Callable[[], T],
    patience: Patience,
    *,
    late: Path | None = None,
    late_s: float = LATE_S,
    told: Callable[[OSError], None] = lambda error: None,
) -> T:
    """Run `work`, which reads, again and again while the storage fails.

    Args:
        late: a file that may be missing for `late_s` seconds; None: a missing file is an error at once.
        told: called with each error before the pause.

    Raises:
        OSError: one that does not pass, or the last one before patience was over.
    """
    begun, pauses = time.monotonic(), iter(patience.pauses_s)
    while True:
        try:
            return work()
        except OSError as error:
            missing = late is not None and error.errno == errno.ENOENT
            if not missing and not may_pass(error):
                raise
            within_s = late_s if missing else patience.within_s
            pause_s = next(pauses, None if within_s is None else patience.pauses_s[-1])
            if pause_s is None or (within_s is not None and time.monotonic() + pause_s > begun + within_s):
                raise
            told(error)
        time.sleep(pause_s)
        if missing and late is not None:
            with suppress(OSError):  # read-only
                refresh(late.parent)


def begin(function: Callable[[], T]) -> Future[T]:
    """Call what may never return, such as a file system whose server is gone, in a thread that nobody has to wait for.

    Not even the end of this process waits for it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="patience", daemon=True).start()
    return future


class BestEffort:
    """Writing of one kind: an error of the storage is told once, the work goes on, and it is told when writing works again.

    Args:
        what: what is written, for a person: "events of this run".
        meanwhile: what becomes of what cannot be written: "are left out".
    """

    def __init__(self, what: str, meanwhile: str = "are left out"):
        self._what, self._meanwhile = what, meanwhile
        self._failures = 0

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write`, and return whether the storage has let it through. Errors other than of the storage are raised."""
        try:
            write()
        except (OSError, UnreadableRecordError) as error:
            if not self._failures:
                log.warning("%s cannot be written now, and %s: %s", self._what, self._meanwhile, error)
            self._failures += 1
            return False
        if self._failures:
            log.warning("%s can be written again; that had failed %d times", self._what, self._failures)
            self._failures = 0
        return True
