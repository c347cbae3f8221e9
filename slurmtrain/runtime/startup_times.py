"""The stages of a start and their durations: from the interpreter's first instruction to the first step."""

from __future__ import annotations

import logging
import os
import time

from slurmtrain.system import process

log = logging.getLogger(__name__)


class Timeline:
    """The seconds between marks, from the start of this process on.

    Attributes:
        aloud: log what begins, so that a person who follows the log sees progress.
    """

    aloud = False

    def __init__(self) -> None:
        self._last = time.time() - process_age_s()
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Record that the stage `name` ends now."""
        now = time.time()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now

    def begin(self, what: str) -> None:
        """Log that a stage begins: "loading PyTorch"."""
        if self.aloud:
            log.info("%s ...", what)


def process_age_s() -> float:
    """Return the seconds since the kernel started this process (`man 5 proc`, starttime of /proc/pid/stat)."""
    this = process.stat("self")
    assert this is not None, "/proc is not mounted"
    started = this.start / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
