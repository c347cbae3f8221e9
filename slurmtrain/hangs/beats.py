"""What a rank says of itself once a second, and how it is found: what its main thread does, and for how long already."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from slurmtrain.system import activity
from slurmtrain.system.process import ProcessMark

if TYPE_CHECKING:
    from slurmtrain.config.schema import WatchdogConfig

STEPS_MEASURED = 100
LONGEST_GAP_S = 5.0  # between two looks: a process that was stopped, or a machine that is very busy, looks later
TIME_OUTS = {
    activity.COMPILATION: "first_step_s",
    activity.EVALUATION: "evaluation_s",
    activity.HOOK: "evaluation_s",
    activity.SAVE: "save_s",
    activity.RESTORE: "save_s",
}


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a rank.

    Attributes:
        number: counts up, so that a reader sees whether the rank still beats.
        time: unix seconds.
        node: the rank's node, as SLURM names it.
        process: the rank's own.
        step: optimiser steps done; None where nobody counts them.
        phase: what its main thread does, as it tells.
        waits: it waits for other ranks.
        idle_s: seconds in which it has not got on.
        limit_s: seconds after which it counts as hung at what it does.
        unhurried: its first step is not done, or it compiles: a call may then hold the interpreter for long.
    """

    rank: int
    number: int
    time: float
    node: str
    process: ProcessMark
    step: int | None
    phase: str
    waits: bool
    idle_s: float
    limit_s: float
    unhurried: bool = False

    @property
    def in_step(self) -> str:
        return "" if self.step is None else f" in step {self.step + 1}"

    @property
    def at_work(self) -> bool:
        """Whether it may take longer still, and others that wait have to wait for it."""
        return not self.waits and self.idle_s < self.limit_s


def parse_beat(text: bytes) -> Beat | None:
    """Return the beat in this text; None if it is none."""
    try:
        return msgspec.json.decode(text, type=Beat)
    except msgspec.MsgspecError:
        return None


class Position(NamedTuple):
    """How far a rank has got.

    Attributes:
        rounds: times that it has agreed with the others on whether to stop: once a step, and once a batch of an evaluation.
        step: optimiser steps done; None where nobody counts them.
        stepping: the first step of this attempt is done.
    """

    rounds: int
    step: int | None
    stepping: bool


class ActiveClock:
    """Seconds in which this process could run.

    The time in which it was stopped, as by SLURM's suspend, does not count, nor that in which the whole machine
    slept, in which the kernel's monotonic clock stands still.
    """

    def __init__(self, now: float):
        self.seconds = 0.0
        self._last = now

    def look(self, now: float) -> float:
        """Return the seconds so far, given time.monotonic(). Call it more often than every `LONGEST_GAP_S`."""
        gap, self._last = now - self._last, now
        self.seconds += gap if gap <= LONGEST_GAP_S else 1.0
        return self.seconds


class Progress:
    """How long a main thread has not got on, and how long it may: fed once a second.

    Args:
        limits: the config group `watchdog`.
    """

    def __init__(self, limits: WatchdogConfig):
        self._limits = limits
        self._steps: deque[float] = deque(maxlen=STEPS_MEASURED)
        self._seen: tuple[Any, ...] = ()
        self._position, self._time_out = Position(0, None, False), ""
        self._since = 0.0
        self._pure = False  # since then nothing but a step was seen
        self.idle_s, self.limit_s = 0.0, float(limits.first_step_s)

    def look(self, now: float, position: Position, phase: str, copied: int = 0) -> None:
        """Note what is seen now.

        Args:
            now: active seconds.
            phase: what the main thread does.
            copied: blocks that threads of this process have copied to or from a mirror, for which a save may wait.
        """
        time_out = TIME_OUTS.get(phase, "min_s")
        if time_out == "min_s" and not position.stepping:
            time_out = "first_step_s"
        seen = (position, time_out, copied if time_out == "save_s" else None)
        if seen != self._seen:
            rounds = position.rounds - self._position.rounds
            if self._pure and self._position.stepping and rounds > 0:
                self._steps.append((now - self._since) / rounds)
            moved_on = position != self._position
            self._pure = time_out == "min_s" and moved_on
            self._seen, self._since, self._position, self._time_out = seen, now, position, time_out
        self.idle_s = now - self._since
        self.limit_s = float(getattr(self._limits, time_out))
        if time_out == "min_s":
            self.limit_s = max(self.limit_s, self._limits.factor * max(self._steps, default=0.0))

    @property
    def unhurried(self) -> bool:
        """Whether the first step is not done, or something is compiled."""
        return self._time_out == "first_step_s"
