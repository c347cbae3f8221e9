"""A run's time by cause, and the sums over attempts and runs."""

from __future__ import annotations

import math
from collections import defaultdict
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
        segments: the same in the order of time, without gaps and overlaps. Sums over several runs have none.
        lost_gpu_seconds: GPUs x seconds lost, by why an attempt ended ("crash", "hang", "preempted", "node failure",
            "requeued", ...) or "rolled back": what stood still until it had ended, and all until the run was where it had been.
        lost_s: wall-clock seconds of the same, the queue included.
        interruptions: number of attempts that ended before the run had finished, by why.
        running: it has not ended, and its last segment ends now.
    """

    seconds: Mapping[Cause, float] = field(default_factory=dict)
    gpu_count: float = 0.0
    gpu_seconds: Mapping[Cause, float] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    lost_gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    lost_s: Mapping[str, float] = field(default_factory=dict)
    interruptions: Mapping[str, int] = field(default_factory=dict)
    running: bool = False

    @property
    def end(self) -> float:
        """When its last segment ends, in unix seconds; 0 if there is none."""
        return self.segments[-1].end if self.segments else 0.0

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
    def shares(self) -> dict[Cause, float]:
        """The shares of the held time by cause: of the GPU time if GPUs were held, so that a large run counts for more."""
        held = {cause: value for cause, value in self.seconds.items() if cause not in HOLDS_NO_GPUS}
        amounts = self.gpu_seconds or held
        total = math.fsum(amounts.values())
        return {cause: value / total for cause, value in amounts.items()} if total > 0 else {}

    @property
    def share(self) -> float | None:
        """The goodput: the productive part of the time in which nodes were held, of their GPU time if they have GPUs.

        Time of which nobody knows what it went into is left out of both. None if nothing is known but the start-up.
        """
        shares = self.shares
        productive, unknown = shares.get(Cause.PRODUCTIVE, 0.0), shares.get(Cause.UNKNOWN, 0.0)
        known = math.fsum(shares.values()) - unknown
        return productive / known if known > 0 and (productive or not unknown) else None

    def since(self, moment: float) -> Goodput:
        """Return the part from `moment`, in unix seconds, on.

        Interruptions stay those of the whole run.
        """
        cut = tuple(each._replace(start=max(each.start, moment)) for each in self.segments if each.end > moment)
        return replace(self, **sums_of(cut), segments=cut)


def sums_of(segments: Iterable[Segment]) -> dict[str, Any]:
    """Return those fields of a `Goodput` that are sums over its segments."""
    sums: dict[str, defaultdict[str, float]] = {
        name: defaultdict(float) for name in ("seconds", "gpu_seconds", "lost_s", "lost_gpu_seconds")
    }
    for _, start, end, cause, gpus, because in segments:
        for name, key in (("seconds", cause), ("lost_s", because)):
            if key:
                sums[name][key] += end - start
        for name, key in (("gpu_seconds", cause), ("lost_gpu_seconds", because)):
            if key and gpus and end > start:
                sums[name][key] += (end - start) * gpus
    return {name: dict(total) for name, total in sums.items()}


def over_all(found: Iterable[Goodput]) -> Goodput:
    """Return the sum over several runs: of a sweep, or of a person."""
    names = ("seconds", "gpu_seconds", "lost_gpu_seconds", "lost_s", "interruptions")
    sums: dict[str, dict[Any, Any]] = {name: {} for name in names}
    gpus, running = 0.0, False
    for each in found:
        gpus, running = gpus + each.gpu_count, running or each.running
        for name, total in sums.items():
            for key, value in getattr(each, name).items():
                total[key] = total.get(key, 0) + value
    return Goodput(**sums, gpu_count=gpus, running=running)  # type: ignore[arg-type]
