"""Runs of cluster=local that outlive the program that starts them: their launcher is a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from slurmtrain.errors import ClusterError
from slurmtrain.system.records import printable, read_tail

LAUNCHER_LOG = "launcher.log"  # what the launcher says on stderr; the output of the ranks is in their own logs
POLL_S = 0.05
SHOWN_BYTES = 2000


def start(words: list[str], folder: Path, has_begun: Callable[[], bool]) -> subprocess.Popen[bytes]:
    """Start `python -m slurmtrain WORDS` in the background, and return its process when it has begun.

    It is in a session of its own, so neither Ctrl-C nor the end of this process reaches it.

    Args:
        folder: the folder of the run or sweep, which gets the launcher's log.
        has_begun: returns whether it has taken over.

    Raises:
        ClusterError: it has ended before.
    """
    log = folder / LAUNCHER_LOG
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slurmtrain", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, name="wait-for-launcher", daemon=True).start()  # it must not stay a zombie
    while not has_begun():
        if process.returncode is not None and not has_begun():
            said = read_tail(log, SHOWN_BYTES).decode(errors="replace").strip()
            raise ClusterError(f"the launcher of {folder} exited immediately: {printable(said) or process.returncode}")
        time.sleep(POLL_S)
    return process
