"""Speed: tokens per second, seconds per step and seconds of waiting for data, over the last steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Throughput:
    """A moving window over finished steps.

    Args:
        window: number of the last steps that count.
        clock: returns seconds, monotonic.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=window)  # seconds, tokens, of them waiting
        self._clock = clock
        self._since = clock()

    def start(self) -> None:
        """Count the time from now on as that of the next step; called after an evaluation, a checkpoint or another pause."""
        self._since = self._clock()

    def step(self, tokens: int, data_wait_s: float = 0.0) -> float:
        """Record a step over `tokens` tokens that waited `data_wait_s` seconds for its data, and return the step's seconds."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._steps.append((seconds, tokens, data_wait_s))
        return seconds

    @property
    def full(self) -> bool:
        """Whether the window is full, so that the first steps, with their one-time costs, no longer stand out."""
        return len(self._steps) == self._steps.maxlen

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second over the window; 0 before the first step."""
        seconds = sum(seconds for seconds, _, _ in self._steps)
        return sum(tokens for _, tokens, _ in self._steps) / seconds if seconds > 0 else 0.0

    @property
    def step_time_s(self) -> float:
        """The mean seconds per step over the window; 0 before the first step."""
        return sum(seconds for seconds, _, _ in self._steps) / len(self._steps) if self._steps else 0.0

    @property
    def data_wait_s(self) -> float:
        """The mean seconds per step of waiting for data; 0 before the first step."""
        return sum(waited for _, _, waited in self._steps) / len(self._steps) if self._steps else 0.0
