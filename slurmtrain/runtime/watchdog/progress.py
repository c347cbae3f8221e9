"""How long a main thread has got on with nothing, and how long it may: pure bookkeeping, fed once a second."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from slurmtrain.runtime.watchdog.phases import Allowance

if TYPE_CHECKING:
    from slurmtrain.config.schema import WatchdogConfig

STEPS_MEASURED = 100
LONGEST_GAP_S = 5.0  # between two looks: a process that was stopped, or a machine that is very busy, looks later


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

    The time in which it was stopped, as by SLURM's suspend, or a debugger, does not count, nor that in which the whole machine
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
    """The time since a main thread has last got on, and the time-out for what it is doing.

    Attributes:
        moving: it waits for a copy of a checkpoint to or from a mirror, which gets on.

    Args:
        limits: the config group `watchdog`.
    """

    def __init__(self, limits: WatchdogConfig):
        self._limits = limits
        self._steps: deque[float] = deque(maxlen=STEPS_MEASURED)
        self._position = Position(0, None, False)
        self._allowance = Allowance.START
        self._since = 0.0
        self._pure = False  # since then nothing but a step was seen
        self._moved = 0
        self.moving = False
        self.idle_s = 0.0
        self.limit_s = time_out(limits, self._allowance, None)  # others hear of it before the first look

    def look(self, now: float, position: Position, allowance: Allowance, moved: int = 0) -> None:
        """Note what is seen now.

        Args:
            now: active seconds.
            allowance: the kind of work that the main thread is at.
            moved: blocks that threads of this process have copied to or from a mirror.
        """
        if allowance is Allowance.SAVE and moved != self._moved:
            self._since, self.moving = now, True
        elif allowance is not Allowance.SAVE:
            self.moving = False
        self._moved = moved
        if position != self._position:
            rounds = position.rounds - self._position.rounds
            if self._pure and self._position.stepping and rounds > 0:
                self._steps.append((now - self._since) / rounds)
            self._position, self._since, self._pure = position, now, allowance is Allowance.STEP
        elif allowance is not self._allowance:
            self._since, self._pure = now, False
        self._allowance = allowance
        self.idle_s = now - self._since
        self.limit_s = time_out(self._limits, allowance, max(self._steps, default=None))

    @property
    def overdue(self) -> bool:
        return self.overdue_s >= 0

    @property
    def overdue_s(self) -> float:
        """The seconds since the time-out; negative before it."""
        return self.idle_s - self.limit_s


def time_out(limits: WatchdogConfig, allowance: Allowance, longest_step_s: float | None) -> float:
    """Return the seconds after which a rank that does not get on counts as hung.

    Args:
        longest_step_s: the longest of the steps measured last; None: none was.
    """
    if allowance is Allowance.DEBUGGER:
        return math.inf
    if allowance is Allowance.START:
        return limits.first_step_s
    if allowance is Allowance.EVALUATION:
        return limits.evaluation_s
    if allowance is Allowance.SAVE:
        return limits.save_s
    return max(limits.min_s, limits.factor * (longest_step_s or 0.0))
