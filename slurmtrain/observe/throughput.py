"""How fast it goes: tokens per second and seconds per step over the last steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Throughput:
    """A moving window over finished steps.

    Args:
        window: how many of the last steps count.
        clock: returns seconds, monotonic.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)  # seconds, tokens
        self._clock = clock
        self._since = clock()

    def start(self) -> None:
        """Time from here on belongs to the next step: call it after an evaluation, a checkpoint or another pause."""
        self._since = self._clock()

    def step(self, tokens: int) -> float:
        """A step over `tokens` tokens is done; returns its seconds."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._steps.append((seconds, tokens))
        return seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the window; 0 before the first step."""
        seconds = sum(seconds for seconds, _ in self._steps)
        return sum(tokens for _, tokens in self._steps) / seconds if seconds > 0 else 0.0

    @property
    def step_time_s(self) -> float:
        """Mean seconds per step over the window; 0 before the first step."""
        return sum(seconds for seconds, _ in self._steps) / len(self._steps) if self._steps else 0.0
