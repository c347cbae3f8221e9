"""A run's time by cause, and the sums over attempts and runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple


class Cause(StrEnum):
    """What a second of a run went into. Each second has one cause."""

    QUEUE = "queue"  # SLURM had not started its job yet
    STOPPED = "stopped"  # it had ended, died or was cancelled, until a person resumed it
    STARTUP = "startup"  # batch script, interpreter, rendezvous, restore, and the excess of the first step (compile)
    PRODUCTIVE = "productive"  # steps that were done for the first time
    REDONE = "redone"  # steps that an earlier attempt had done already, and that no checkpoint had
    CHECKPOINT = "checkpoint"  # training waited for a save
    EVALUATION = "evaluation"  # training waited for an evaluation
    HUNG = "hung"  # no rank got on, until the watchdog ended the attempt
    LOST = "lost"  # steps after the last checkpoint of a run that has ended: nobody has them
    IDLE_END = "idle_end"  # after the last step: ranks that leave, and what a failure left standing
    BETWEEN = "between"  # between two attempts in the same job, which keeps its GPUs
    UNKNOWN = "unknown"  # a program of the user's own that reports no progress


HOLDS_NO_GPUS = frozenset({Cause.QUEUE, Cause.STOPPED})


class Piece(NamedTuple):
    """What an attempt, or a wait after it, adds to the sums of its run: its time with one cause, for one reason.

    Attributes:
        attempt, cause, gpus, because: as of a `Segment`.
        seconds: sum over the segments.
    """

    attempt: int
    cause: Cause
    seconds: float
    gpus: float = 0.0
    because: str = ""


class Segment(NamedTuple):
    """A stretch of a run's time with one cause.

    Attributes:
        attempt: number of the attempt; of a wait, that of the attempt before it, 0 before the first one.
        start, end: unix seconds.
        gpus: GPUs that the run held then; a share of them where several runs shared the job, so that it may be a fraction.
        because: why this time was lost: the reason for which an attempt ended, or "rolled back". "" if it was not.
    """

    attempt: int
    start: float
    end: float
    cause: Cause
    gpus: float = 0.0
    because: str = ""

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Goodput:
    """The time of a run by cause.

    Attributes:
        seconds: wall-clock seconds by cause; causes without any time are left out. They add up to `wall_s`.
        gpu_count: GPUs of its newest attempt; 0 on CPUs. A share of them where several runs shared the job.
        gpu_seconds: GPUs x seconds by cause. No GPU is held in the queue, so waits are not in it.
        segments: the same in the order of time, without gaps and overlaps.
        pieces: the same by attempt, without the order: a few of them where there are thousands of segments.
        startup_s: wall-clock seconds of the start-ups by stage, over all attempts: "batch script", "interpreter", ...
        lost_gpu_seconds: GPUs x seconds lost, by why an attempt ended ("crash", "hang", "preempted", "node failure",
            "requeued", ...) or "rolled back": what stood still until it had ended, and all until the run was where it had been.
        lost_s: wall-clock seconds of the same, the queue included.
        interruptions: number of attempts that ended before the run had finished, by why.
        nodes: the nodes of each attempt, by its number.
        running: it has not ended, and its last segment ends now.
        begin, end: of its first and of its last segment, in unix seconds; 0 if there is none.
    """

    seconds: Mapping[Cause, float] = field(default_factory=dict)
    gpu_count: float = 0.0
    gpu_seconds: Mapping[Cause, float] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    pieces: tuple[Piece, ...] = ()
    startup_s: Mapping[str, float] = field(default_factory=dict)
    lost_gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    lost_s: Mapping[str, float] = field(default_factory=dict)
    interruptions: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    running: bool = False
    begin: float = 0.0
    end: float = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds from the submission to the end of the last attempt, or until now."""
        return math.fsum(self.seconds.values())

    @property
    def held_s(self) -> float:
        """Seconds in which the run held its nodes."""
        return math.fsum(seconds for cause, seconds in self.seconds.items() if cause not in HOLDS_NO_GPUS)

    @property
    def gpu_hours(self) -> float:
        """GPU hours over all attempts."""
        return math.fsum(self.gpu_seconds.values()) / 3600

    @property
    def lost_gpu_hours(self) -> float:
        """GPU hours that interruptions have cost."""
        return math.fsum(self.lost_gpu_seconds.values()) / 3600

    @property
    def shares(self) -> dict[Cause, float]:
        """The shares of the held time by cause: of the GPU time if GPUs were held, so that a large run counts for more."""
        amounts = self._held()
        total = math.fsum(amounts.values())
        return {cause: value / total for cause, value in amounts.items()} if total > 0 else {}

    @property
    def share(self) -> float | None:
        """The goodput: the productive part of the time in which nodes were held, of their GPU time if they have GPUs.

        Time of which nobody knows what it went into is left out of both. None if nothing is known but the start-up.
        """
        return _productive_of(self._held())

    @property
    def effective_share(self) -> float | None:
        """The effective training time ratio: productive seconds / seconds held or queued.

        The time in which the run had ended, until a person resumed it, is left out, and so is what nobody knows.
        """
        seconds: dict[Cause, float] = dict(self.seconds)
        seconds.pop(Cause.STOPPED, None)
        return _productive_of(seconds) if self.held_s > 0 else None

    def _held(self) -> Mapping[Cause, float]:
        """Return the time in which nodes were held, by cause."""
        return self.gpu_seconds or {cause: value for cause, value in self.seconds.items() if cause not in HOLDS_NO_GPUS}

    def since(self, moment: float) -> Goodput:
        """Return the part from `moment`, in unix seconds, on.

        Interruptions and stages of start-ups stay those of the whole run.
        """
        if self.begin >= moment:
            return self
        cut = tuple(each._replace(start=max(each.start, moment)) for each in self.segments if each.end > moment)
        pieces = tuple(Piece(each.attempt, each.cause, each.seconds, each.gpus, each.because) for each in cut)
        sums = Sums()
        for piece in pieces:
            sums.add(piece)
        begin, end = (cut[0].start, cut[-1].end) if cut else (0.0, 0.0)
        return replace(self, **sums.fields(), segments=cut, pieces=pieces, begin=begin, end=end)


def _productive_of(amounts: Mapping[Cause, float]) -> float | None:
    """Return the productive part of amounts of time by cause."""
    productive, unknown = amounts.get(Cause.PRODUCTIVE, 0.0), amounts.get(Cause.UNKNOWN, 0.0)
    known = math.fsum(amounts.values()) - unknown
    return productive / known if known > 0 and (productive or not unknown) else None


class Sums:
    """Adds up pieces to those fields of a `Goodput` that are sums."""

    def __init__(self) -> None:
        self._seconds: dict[Cause, float] = {}
        self._gpu_seconds: dict[Cause, float] = {}
        self._lost: dict[str, float] = {}
        self._lost_gpus: dict[str, float] = {}

    def add(self, piece: Piece, shared_by: int = 1) -> None:
        """Add a piece; of its GPUs only a part, if nodes share them.

        Args:
            shared_by: number of those nodes.
        """
        _, cause, seconds, gpus, because = piece
        if seconds <= 0:
            return
        gpus /= shared_by
        self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds
        if because:
            self._lost[because] = self._lost.get(because, 0.0) + seconds
        if gpus:
            self._gpu_seconds[cause] = self._gpu_seconds.get(cause, 0.0) + seconds * gpus
            if because:
                self._lost_gpus[because] = self._lost_gpus.get(because, 0.0) + seconds * gpus

    def fields(self) -> dict[str, Any]:
        """Return the fields."""
        return {
            "seconds": self._seconds,
            "gpu_seconds": self._gpu_seconds,
            "lost_s": self._lost,
            "lost_gpu_seconds": self._lost_gpus,
        }


def over_all(found: Iterable[Goodput]) -> Goodput:
    """Return the sum over several runs: of a sweep, or of a person. It has no segments."""
    found = list(found)
    if len(found) == 1:
        (one,) = found
        sums = {name: getattr(one, name) for name in _SUMMED}
        return Goodput(**sums, gpu_count=one.gpu_count, running=one.running)
    total = _Sum()
    for each in found:
        total.add(each)
    return total.result()


_SUMMED = ("seconds", "gpu_seconds", "startup_s", "lost_gpu_seconds", "lost_s", "interruptions")


class _Sum:
    def __init__(self) -> None:
        self._values: dict[str, dict[Any, float]] = {name: {} for name in _SUMMED}
        self._gpus, self._running = 0.0, False

    def add(self, goodput: Goodput) -> None:
        for name, total in self._values.items():
            for key, value in getattr(goodput, name).items():
                total[key] = total.get(key, 0) + value
        self._gpus, self._running = self._gpus + goodput.gpu_count, self._running or goodput.running

    def result(self) -> Goodput:
        return Goodput(**self._values, gpu_count=self._gpus, running=self._running)  # type: ignore[arg-type]
