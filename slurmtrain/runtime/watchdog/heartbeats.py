"""The exchange of heartbeats: each rank's thread says over the store what its main thread is doing.

It has a connection of its own, since a connection to the store must not be used by two threads, and a thread of its
own, since a store whose process was stopped does not answer, and may hold its caller for ever. The store lives in rank
0, so a store that does not answer says that rank 0 is stopped or gone; a Python thread that holds the interpreter does not
keep it from answering.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger(__name__)

RANKS_PER_S = (
    200  # heartbeats per second of all ranks together, which rank 0's process has to take; and looks at a folder
)
RANKS_OF_FIRST_TURN = 16
TURN_S = 30.0
STORE_TIMEOUT_S = 5.0
STORE_SILENT_S = 10.0
PREFIX = "watchdog"


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        number: counts up, so that a reader sees whether the rank still beats.
        time: unix seconds.
        node: the rank's node, as SLURM names it.
        pid, born: its process; with the start time a pid is never used twice.
        step: optimiser steps done; None where nobody counts them.
        phase: what its main thread is doing.
        waits: it waits for other ranks.
        idle_s: seconds in which it has not got on.
        limit_s: seconds after which it counts as hung at what it is doing.
    """

    rank: int
    number: int
    time: float
    node: str
    pid: int
    born: str | None
    step: int | None
    phase: str
    waits: bool
    where: str
    idle_s: float
    limit_s: float

    @staticmethod
    def parse(text: bytes | str) -> Beat | None:
        """Return the beat in this text; None if it is none."""
        try:
            return Beat(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Alert:
    """What one rank tells all others at once.

    Attributes:
        kind: "failed": it has recorded a failure and leaves; "hang": it has found that some rank hangs.
    """

    kind: str
    rank: int

    @staticmethod
    def parse(text: bytes | str) -> Alert | None:
        try:
            return Alert(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def text(self) -> str:
        return json.dumps(asdict(self))


class Heartbeats:
    """Sends this rank's beats, and reads those of the others, on a thread of its own.

    Attributes:
        alert: what another rank has told all; None: nothing.
        heard: the newest beats that this rank has read: rank 0 reads those of all ranks, the others that of rank 0.
        local_beats: the newest known beats of the other ranks of this node, which name their processes.

    Args:
        connect: makes a connection to the store that no other thread uses.
        make_beat: returns this rank's beat.
        local_ranks: ranks of this node.
        on_alert: called once, on this thread, when another rank has told all something.
        gone_means_failed: take a store whose port is closed for rank 0's word that it has failed.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        make_beat: Callable[[int], Beat],
        *,
        rank: int,
        world_size: int,
        local_ranks: Iterable[int],
        on_alert: Callable[[Alert], None],
        gone_means_failed: bool = False,
    ):
        self._connect, self._make_beat, self._on_alert = connect, make_beat, on_alert
        self._rank, self._world_size, self._gone_means_failed = rank, world_size, gone_means_failed
        self._local_missing = [local for local in local_ranks if local != rank]
        self.every_s = max(1.0, world_size / RANKS_PER_S)
        self.alert: Alert | None = None
        self.heard: dict[int, Beat] = {}
        self.local_beats: dict[int, Beat] = {}
        self.answered = time.monotonic()
        self._store: dist.Store | None = None
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._to_tell: Alert | None = None
        self._told = threading.Event()
        self._looks_wanted = 0
        self._look: dict[int, Beat] | None = None
        self._looked = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait a moment for the thread, which the interpreter must not meet when it ends."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=STORE_TIMEOUT_S)

    @property
    def silent(self) -> bool:
        """Whether the store has not answered for a long time."""
        return time.monotonic() - self.answered >= STORE_SILENT_S + 2 * self.every_s

    def tell(self, kind: str, timeout_s: float) -> bool:
        """Tell all other ranks; return False if the store has not taken it after `timeout_s` seconds."""
        with self._lock:
            self._to_tell = Alert(kind, self._rank)
        self._wake.set()
        return self._told.wait(timeout_s)

    def read_alert(self, timeout_s: float) -> None:
        """Read now, and not at the next beat, whether another rank has told all something."""
        self.look(timeout_s)

    def look(self, timeout_s: float) -> Mapping[int, Beat] | None:
        """Return the newest beat of every rank that has ever beaten; None if the store does not answer in time."""
        self._looked.clear()
        with self._lock:
            self._look, self._looks_wanted = None, self._looks_wanted + 1
        self._wake.set()
        until = time.monotonic() + timeout_s
        while not self._looked.wait(min(0.5, timeout_s)):
            if self.silent or time.monotonic() >= until:
                return None
        return self._look

    def _run(self) -> None:
        number = 0
        while not self._closed:
            number += 1
            try:
                self._exchange(number)
                self.answered = time.monotonic()
            except ConnectionRefusedError:
                self._store, self.heard = None, {}
                if self._gone_means_failed and self.alert is None and not self._closed:
                    self.alert = Alert("failed", 0)
                    self._on_alert(self.alert)
            except Exception as error:  # torch's errors of a store have several classes, over its versions
                log.debug("the store did not answer: %s", error)
                self._store = None
            self._wake.wait(self.every_s)
            self._wake.clear()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.delete_key(_key(self._rank))  # it is not silent, but has left

    def _exchange(self, number: int) -> None:
        if self._store is None:
            self._store = self._connect()
            self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        store = self._store
        store.set(_key(self._rank), self._make_beat(number).text())
        with self._lock:
            telling, looks = self._to_tell, self._looks_wanted
        if telling is not None and not self._told.is_set():
            store.compare_set(f"{PREFIX}/alert", "", telling.text())  # only the first alert counts
            self._told.set()
        if self._local_missing:
            self._local_missing = [rank for rank in self._local_missing if not self._read_local_beat(store, rank)]
        if store.check([f"{PREFIX}/alert"]):
            found = Alert.parse(store.get(f"{PREFIX}/alert"))
            if found is not None and self.alert is None and found.rank != self._rank:
                self.alert = found
                self._on_alert(found)
        beats = self._beats(store, range(self._world_size) if looks or self._rank == 0 else (0,))
        self.heard = beats
        if looks:
            with self._lock:
                self._look, self._looks_wanted = beats, 0
            self._looked.set()

    def _read_local_beat(self, store: dist.Store, rank: int) -> bool:
        if not store.check([_key(rank)]):
            return False
        beat = Beat.parse(store.get(_key(rank)))
        if beat is not None:
            self.local_beats[rank] = beat
        return True

    def _beats(self, store: dist.Store, ranks: Iterable[int]) -> dict[int, Beat]:
        keys = {rank: _key(rank) for rank in ranks}
        if not store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        found = map(Beat.parse, store.multi_get(list(keys.values()))) if keys else ()
        return {beat.rank: beat for beat in found if beat is not None}


def pause_between_looks(world_size: int) -> float:
    """Return the seconds between two looks of one rank at the attempt's folder, at which all ranks look at the same time."""
    return max(0.1, world_size / RANKS_PER_S)


def turn_s(rank: int) -> float:
    """Return how many seconds later than the first ranks an overdue rank looks at the beats of all.

    Rank 0's process sends them to each that looks, so thousands of ranks must not look at once. Each turn has four times the
    ranks of those before it; what one rank finds it tells all others.
    """
    turn, ranks = 0, RANKS_OF_FIRST_TURN
    while rank >= ranks:
        turn, ranks = turn + 1, 4 * ranks
    return turn * TURN_S


def _key(rank: int) -> str:
    return f"{PREFIX}/beat/{rank}"


def silent_between(one: Mapping[int, Beat], other: Mapping[int, Beat], world_size: int) -> set[int]:
    """Return the ranks that have not beaten between two looks, or never."""
    return {rank for rank in range(world_size) if rank not in other or _number(one, rank) == other[rank].number}


def _number(beats: Mapping[int, Beat], rank: int) -> int | None:
    return beats[rank].number if rank in beats else None


def still_allowed(beats: Mapping[int, Beat], silent: set[int], own: Beat, silent_s: float) -> list[Beat]:
    """Return the ranks that may be at work for longer: no rank hangs as long as there is one.

    A rank that waits for others is not at work. One that is silent, as it is in a long call that holds the interpreter, has
    been idle for as long as it said, and since; by this rank's clock, which may differ, at most for as long as this one. It
    may be silent for `silent_s`, whatever it was doing at its last beat: it may have left that right after it. What it said
    before this rank's newest step says nothing of this one.

    Args:
        beats: the newest of each rank.
        silent: ranks that do not beat any more.
        own: this rank's, which is overdue.
        silent_s: see `watchdog.silent_s`.
    """
    found = []
    for rank, beat in beats.items():
        if rank == own.rank or (rank in silent and is_older(beat, own)):
            continue
        since_s = min(max(0.0, own.time - beat.time), own.idle_s) if rank in silent else 0.0
        at_most_s = min(beat.limit_s, beat.idle_s + silent_s) if rank in silent else beat.limit_s
        if beat.idle_s + since_s < at_most_s and (rank in silent or not beat.waits):
            found.append(beat)
    return found


def is_older(beat: Beat, own: Beat) -> bool:
    """Return whether a beat is from before this rank's newest step, which the other rank has begun by now, too."""
    return own.step is not None and (beat.step is None or beat.step < own.step)
