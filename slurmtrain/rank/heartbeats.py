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
from typing import TYPE_CHECKING

import msgspec

from slurmtrain.hangs.beats import Beat, parse_beat

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger(__name__)

RANKS_PER_S = 200  # heartbeats a second of all ranks together, which rank 0's process has to take
STORE_TIMEOUT_S = 5.0
ALERT = "watchdog/alert"


class Exchange:
    """Sends this rank's beats, and reads those of some others.

    Attributes:
        alert: a rank has found that some rank hangs; the one that sets it tells all others.
        heard: the newest beats of the ranks that this one reads, as far as they beat.
        every_s: seconds between two beats.

    Args:
        connect: makes a connection to the store that no other thread uses; None: there is no store, and nothing is exchanged.
        newest: returns this rank's newest beat.
        read: the ranks whose beats are read.
    """

    def __init__(
        self, connect: Callable[[], dist.Store] | None, newest: Callable[[], Beat], read: Iterable[int], world_size: int
    ):
        self._newest, self._keys = newest, [_key(rank) for rank in read]
        self.every_s = max(1.0, world_size / RANKS_PER_S)
        self.alert = False
        self.heard: dict[int, Beat] = {}
        self._answered = time.monotonic()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if connect is not None:
            self._thread = threading.Thread(target=self._run, args=(connect,), name="heartbeats", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop, and wait a moment for the thread, which the interpreter must not meet when it ends."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=STORE_TIMEOUT_S)

    @property
    def silent_s(self) -> float:
        """The seconds for which the store has not answered."""
        return time.monotonic() - self._answered

    def _run(self, connect: Callable[[], dist.Store]) -> None:
        store: dist.Store | None = None
        while not self._closed.is_set():
            try:
                if store is None:
                    store = connect()
                    store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
                self._exchange(store)
                self._answered = time.monotonic()
            except ConnectionRefusedError:  # rank 0's process has ended: it is not silent
                store, self.heard = None, {}
            except Exception as error:  # torch's errors of a store have several classes, over its versions
                log.debug("the store did not answer: %s", error)
                store = None
            self._closed.wait(self.every_s)
        if store is not None:
            with contextlib.suppress(Exception):
                store.delete_key(_key(self._newest().rank))  # it is not silent, but has left

    def _exchange(self, store: dist.Store) -> None:
        beat = self._newest()
        store.set(_key(beat.rank), msgspec.json.encode(beat).decode())
        if self.alert:
            store.set(ALERT, "")
        elif store.check([ALERT]):
            self.alert = True
        keys = self._keys if store.check(self._keys) else [key for key in self._keys if store.check([key])]
        beats = map(parse_beat, store.multi_get(keys)) if keys else ()
        self.heard = {beat.rank: beat for beat in beats if beat is not None}


def _key(rank: int) -> str:
    return f"watchdog/beat/{rank}"
