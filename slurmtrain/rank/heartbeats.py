"""The exchange of heartbeats over the store, which lives in rank 0's process.

It has a connection of its own, since a connection to the store must not be used by two threads, and a thread of its own,
since a store whose process was stopped does not answer, and may hold its caller for ever. A Python thread that holds the
interpreter of rank 0 does not keep the store from answering.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from slurmtrain.hangs.beats import Beat, parse_beat

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger(__name__)

RANKS_PER_S = 200  # heartbeats a second of all ranks together, which rank 0's process has to take
STORE_TIMEOUT_S = 5.0
ALERT = "watchdog/alert"
FAILED, HANG = "failed", "hang"


class Alert(NamedTuple):
    """What one rank tells all others at once.

    Attributes:
        kind: FAILED: it has recorded a failure and leaves; HANG: it has found that some rank hangs.
    """

    kind: str
    rank: int


class Exchange:
    """Sends this rank's beats, and reads those of some others.

    Attributes:
        alert: what another rank has told all; None: nothing.
        heard: the newest beats of the ranks that this one reads, as far as they beat.
        every_s: seconds between two beats.

    Args:
        connect: makes a connection to the store that no other thread uses; None: there is no store, and nothing is exchanged.
        make_beat: returns this rank's beat, given its number.
        read: the ranks whose beats are read.
        gone_means_failed: take a store whose port is closed for rank 0's word that it has failed.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store] | None,
        make_beat: Callable[[int], Beat],
        *,
        rank: int,
        world_size: int,
        read: Iterable[int],
        gone_means_failed: bool,
    ):
        self._make_beat, self._rank = make_beat, rank
        self._read, self._gone_means_failed = tuple(read), gone_means_failed
        self.every_s = max(1.0, world_size / RANKS_PER_S)
        self.alert: Alert | None = None
        self.heard: dict[int, Beat] = {}
        self._answered = time.monotonic()
        self._store: dist.Store | None = None
        self._wake, self._told = threading.Event(), threading.Event()
        self._to_tell: str | None = None
        self._number = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        if connect is not None:
            self._thread = threading.Thread(target=self._run, args=(connect,), name="heartbeats", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop, and wait a moment for the thread, which the interpreter must not meet when it ends."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=STORE_TIMEOUT_S)

    @property
    def silent_s(self) -> float:
        """The seconds for which the store has not answered."""
        return time.monotonic() - self._answered

    def tell(self, kind: str, timeout_s: float) -> None:
        """Tell all other ranks, unless one has told something before; wait at most `timeout_s` seconds for the store."""
        self._to_tell = kind
        self._wake.set()
        if self._thread is not None:
            self._told.wait(timeout_s)

    def refresh(self, timeout_s: float) -> None:
        """Read anew now, and not only at the next beat."""
        wanted, until = self._number + 2, time.monotonic() + timeout_s
        while self._thread is not None and self._number < wanted and time.monotonic() < until:
            self._wake.set()
            time.sleep(0.02)

    def _run(self, connect: Callable[[], dist.Store]) -> None:
        while not self._closed:
            try:
                if self._store is None:
                    self._store = connect()
                    self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
                self._exchange(self._store)
                self._answered = time.monotonic()
            except ConnectionRefusedError:
                self._store, self.heard = None, {}
                if self._gone_means_failed and self.alert is None and not self._closed:
                    self.alert = Alert(FAILED, 0)
            except Exception as error:  # torch's errors of a store have several classes, over its versions
                log.debug("the store did not answer: %s", error)
                self._store = None
            self._wake.wait(self.every_s)
            self._wake.clear()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.delete_key(_key(self._rank))  # it is not silent, but has left

    def _exchange(self, store: dist.Store) -> None:
        self._number += 1
        store.set(_key(self._rank), msgspec.json.encode(self._make_beat(self._number)).decode())
        if self._to_tell is not None and not self._told.is_set():
            store.compare_set(ALERT, "", f"{self._to_tell} {self._rank}")  # only the first alert counts
            self._told.set()
        if self.alert is None and store.check([ALERT]):
            kind, rank = store.get(ALERT).decode().split()
            if int(rank) != self._rank:
                self.alert = Alert(kind, int(rank))
        keys = [_key(rank) for rank in self._read]
        if not store.check(keys):
            keys = [key for key in keys if store.check([key])]
        beats = map(parse_beat, store.multi_get(keys)) if keys else ()
        self.heard = {beat.rank: beat for beat in beats if beat is not None}


def _key(rank: int) -> str:
    return f"watchdog/beat/{rank}"
