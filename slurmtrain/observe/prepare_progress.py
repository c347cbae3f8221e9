"""The progress of `prepare`, for a person."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from slurmtrain.data.prepare.worker_pool import Tally
from slurmtrain.observe.progress import display, format_count, format_duration


class Preparing:
    """A progress line of bytes, documents and the time left. `stream` and `clock`: see `display`."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began = clock, clock()
        self._display = display(stream, clock)

    def show(self, tally: Tally) -> None:
        """Show the progress."""
        self._display.show(describe(tally, self._clock() - self._began), tally.size, tally.total)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._display.close()


def describe(tally: Tally, seconds: float) -> str:
    """Describe a tally, `seconds` after its first: 120.0/800.0 MB  5.1 MB/s  12.3k documents  2 bad  eta 2:13."""
    words = [f"{tally.size / 1e6:.1f}/{tally.total / 1e6:.1f} MB"]
    speed = (tally.size - tally.before) / seconds if seconds > 0 else 0.0
    if speed:
        words.append(f"{speed / 1e6:.1f} MB/s")
    words.append(f"{format_count(tally.documents)} documents")
    if tally.bad:
        words.append(f"{format_count(tally.bad)} bad")
    if speed and tally.size < tally.total:
        words.append(f"eta {format_duration((tally.total - tally.size) / speed)}")
    return "  ".join(words)
