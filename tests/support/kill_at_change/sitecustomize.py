"""With this folder on PYTHONPATH, the supervisor of a job is killed before the KILL_AT-th change that it makes to the world.

Files that are written, renamed and removed are changes, and so is the start of a process. PHASE says which count: those
before the ranks start, or those after it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "subprocess.Popen")
HELPERS = ("--hook", "--watch", "--stage-to")  # are started beside the supervisor


class Killer:
    """Counts the changes, and kills this process before one of them."""

    def __init__(self, kill_at: int, phase: str) -> None:
        self.kill_at = kill_at
        self.counts, self.later = phase == "before", phase == "after"
        self.count = 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Be told of an event by the interpreter."""
        if not self.is_change(event, args):
            return
        self.count += self.counts
        if self.counts and self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "subprocess.Popen" and [*map(os.fsdecode, args[1])][:2] == ["env", "srun"]:
            self.counts = self.later

    def is_change(self, event: str, args: tuple[Any, ...]) -> bool:
        """Return whether it changes anything that another process can see."""
        if event != "open":
            return event in EVENTS
        return bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and args[0] != os.devnull


words = sys.orig_argv
if "KILL_AT" in os.environ and "supervise" in words and not {*HELPERS} & {*words}:
    sys.addaudithook(Killer(int(os.environ["KILL_AT"]), os.environ["PHASE"]))
