"""With this folder on PYTHONPATH, the supervisor of a job is killed before the KILL_AT-th change that it makes to the world.

Files that are written, renamed and removed are changes, and so is the start of a process. CHANGES names the file that gets
a line for each. PHASE says which count: those before the ranks start, or those after it. With CANCEL, the supervisor is
killed directly after somebody has cancelled its run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "subprocess.Popen")
HELPERS = ("--hook", "--watch", "--stage-to")  # are started beside the supervisor


class Killer:
    """Counts the changes, and kills this process before one of them."""

    def __init__(self, log: str, kill_at: int, phase: str, cancel: list[str]) -> None:
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.kill_at, self.cancel = kill_at, cancel
        self.counts, self.later = phase == "before", phase == "after"
        self.count, self.busy = 0, False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Be told of an event by the interpreter."""
        if self.busy or not self.is_change(event, args):
            return
        self.count, self.busy = self.count + self.counts, True
        what = " ".join(map(os.fsdecode, args[1])) if event == "subprocess.Popen" else args[0]
        os.write(self.log, f"{self.count} {event} {what}\n".encode())
        if self.counts and self.count == self.kill_at:
            if self.cancel:
                subprocess.run(self.cancel, stdout=subprocess.DEVNULL, check=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "subprocess.Popen" and what.startswith("env srun "):
            self.counts = self.later
        self.busy = False

    def is_change(self, event: str, args: tuple[Any, ...]) -> bool:
        """Return whether it changes anything that another process can see."""
        if event != "open":
            return event in EVENTS
        return bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and args[0] != os.devnull


words = sys.orig_argv
if "CHANGES" in os.environ and "supervise" in words and not {*HELPERS} & {*words}:
    run_dir = words[words.index("supervise") + 1]
    cancel = [sys.executable, "-m", "slurmtrain", "cancel", run_dir] if "CANCEL" in os.environ else []
    sys.addaudithook(Killer(os.environ["CHANGES"], int(os.environ["KILL_AT"]), os.environ["PHASE"], cancel))
