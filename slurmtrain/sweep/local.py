"""A sweep with cluster=local: its points as runs of this machine, several at a time, in the foreground.

Each is a `resume` in a process of its own, which starts or continues the run. The sweep on disk is the same as on a
cluster, without arrays.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from slurmtrain.errors import ClusterError
from slurmtrain.launch.local import PR_SET_PDEATHSIG
from slurmtrain.report.status import state
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Point, Sweep
from slurmtrain.system.file_claims import Owner, claimed

log = logging.getLogger(__name__)

# A signal's number, or the id of a run whose process has left. SimpleQueue.put may be called from a signal handler.
Events = queue.SimpleQueue[int | str]


@contextlib.contextmanager
def alone(sweep: Sweep) -> Iterator[None]:
    """Claim the right to wait for the points of a sweep: two processes would start the same run twice.

    Raises:
        ClusterError: another process has claimed it.
    """

    def refuse(owner: Owner) -> None:
        raise ClusterError(
            f"process {owner['pid']} on {owner['host']} is at sweep {sweep.id} already",
            hint=f"sweep status {sweep.id} shows how it stands; when that process has ended, start again",
        )

    with claimed(sweep.path, refuse):
        yield


def run_here(sweep: Sweep, run_ids: Sequence[str], at_once: int, *, show: bool) -> bool:
    """Start or continue these runs; return False when a person stopped it: Ctrl-C, or TERM to this process.

    Called within `alone`.

    Args:
        at_once: number of runs at the same time.
        show: print the output of the ranks to the terminal.
    """
    names = {
        point.run_id: _name(point) for point in reversed(sweep.points())
    }  # the first of those with the same config
    waiting, stopped = list(run_ids), False
    running: dict[str, subprocess.Popen[bytes]] = {}
    with _signals() as events:
        while running or (waiting and not stopped):
            if waiting and not stopped and len(running) < at_once:
                run_id = waiting.pop(0)
                log.info("%s: run %s begins", names[run_id], run_id)
                running[run_id] = _start(sweep.run_dir(run_id), events, show=show)
                continue
            event = events.get()
            if isinstance(event, str):
                del running[event]
                log.info("%s: %s", names[event], state(sweep.run_dir(event)).explanation)
                continue
            stopped = True
            for process in running.values():
                process.send_signal(event)
    return not stopped


def _name(point: Point) -> str:
    return f"point {point.number} ({' '.join(f'{key}={value}' for key, value in point.varied.items())})"


def _start(run_dir: RunDir, events: Events, *, show: bool) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "slurmtrain", "resume", str(run_dir.path)],
        stdin=subprocess.DEVNULL,
        stdout=None if show else subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
        preexec_fn=_leave_with_us,
    )

    def wait() -> None:
        process.wait()
        events.put(run_dir.id)

    threading.Thread(target=wait, daemon=True).start()
    return process


def _leave_with_us() -> None:
    """Have the kernel send SIGTERM to the new process when its parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _signals() -> Iterator[Events]:
    events: Events = queue.SimpleQueue()
    handlers = {
        number: signal.signal(number, lambda number, frame: events.put(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield events
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
