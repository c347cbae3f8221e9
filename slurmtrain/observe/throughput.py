"""Speed over the last steps: tokens, samples and operations per second, seconds per step and of waiting for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class _Step(NamedTuple):
    seconds: float
    tokens: int
    data_wait_s: float
    samples: int
    flops: tuple[int, int]


class Throughput:
    """A moving window over finished steps.

    Args:
        window: number of the last steps that count.
        clock: returns seconds, monotonic.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        self._steps: deque[_Step] = deque(maxlen=window)
        self._clock = clock
        self._since = clock()

    def start(self) -> None:
        """Count the time from now on as that of the next step; called after an evaluation, a checkpoint or another pause."""
        self._since = self._clock()

    def step(
        self, tokens: int, data_wait_s: float = 0.0, *, samples: int = 0, flops: tuple[int, int] = (0, 0)
    ) -> float:
        """Record a step, and return its seconds.

        Args:
            tokens, samples: number of tokens and of samples of the step, over all ranks.
            data_wait_s: seconds of it that this rank has waited for its data.
            flops: floating-point operations of the step over all ranks, with dense and with attended attention, see
                `planner.shape`.
        """
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._steps.append(_Step(seconds, tokens, data_wait_s, samples, flops))
        return seconds

    @property
    def full(self) -> bool:
        """Whether the window is full, so that the first steps, with their one-time costs, no longer stand out."""
        return len(self._steps) == self._steps.maxlen

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second over the window; 0 before the first step."""
        return self._per_second(sum(step.tokens for step in self._steps))

    @property
    def samples_per_s(self) -> float:
        """The samples per second over the window; 0 before the first step."""
        return self._per_second(sum(step.samples for step in self._steps))

    @property
    def flops_per_s(self) -> tuple[float, float]:
        """The operations per second over the window, with dense and with attended attention; 0 where they are not known."""
        dense, attended = (sum(step.flops[kind] for step in self._steps) for kind in (0, 1))
        return self._per_second(dense), self._per_second(attended)

    @property
    def step_time_s(self) -> float:
        """The mean seconds per step over the window; 0 before the first step."""
        return self._seconds / len(self._steps) if self._steps else 0.0

    @property
    def data_wait_s(self) -> float:
        """The mean seconds per step of waiting for data; 0 before the first step."""
        return sum(step.data_wait_s for step in self._steps) / len(self._steps) if self._steps else 0.0

    @property
    def _seconds(self) -> float:
        return sum(step.seconds for step in self._steps)

    def _per_second(self, count: float) -> float:
        return count / self._seconds if self._seconds > 0 else 0.0
