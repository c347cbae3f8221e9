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
    waiting = list(run_ids)
    with LocalRuns(sweep, show=show) as runs:
        try:
            while runs.running or waiting:
                while waiting and len(runs.running) < at_once:
                    runs.start(sweep.run_dir(waiting.pop(0)))
                runs.ended()
        except KeyboardInterrupt:
            return False
    return True


class LocalRuns:
    """Runs of a sweep as processes of this machine, within `with`. Called within `alone`.

    Args:
        show: print the output of the ranks to the terminal.
    """

    def __init__(self, sweep: Sweep, *, show: bool):
        self._sweep, self._show = sweep, show
        self.running: dict[RunDir, subprocess.Popen[bytes]] = {}
        self._names: dict[str, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalRuns:
        self._events = self._stack.enter_context(_signals())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop what still runs, and wait for it: the process would be stopped with this one anyway."""
        with self._stack:
            for process in self.running.values():
                process.send_signal(signal.SIGTERM)
            self._wait_for_all()

    def start(self, run_dir: RunDir) -> None:
        """Start or continue a run."""
        log.info("%s: run %s begins", self._name(run_dir), run_dir.id)
        self.running[run_dir] = _start(run_dir, self._events, show=self._show)

    def ended(self, timeout_s: float | None = None) -> list[RunDir]:
        """Return the runs whose processes have left; wait until there is one, or for so many seconds.

        Raises:
            KeyboardInterrupt: a person has stopped this process, and all runs have been stopped, too.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return []
        if isinstance(event, int):
            self._pass_on(event)
            self._wait_for_all()
            raise KeyboardInterrupt
        return [self._take(event)]

    def _wait_for_all(self) -> None:
        while self.running:
            event = self._events.get()
            if isinstance(event, int):
                self._pass_on(event)
            else:
                self._take(event)

    def _pass_on(self, number: int) -> None:
        for process in self.running.values():
            process.send_signal(number)

    def _take(self, run_id: str) -> RunDir:
        run_dir = self._sweep.run_dir(run_id)
        del self.running[run_dir]
        log.info("%s: %s", self._name(run_dir), state(run_dir).explanation)
        return run_dir

    def _name(self, run_dir: RunDir) -> str:
        if run_dir.id not in self._names:  # the first of those with the same config
            self._names = {point.run_id: _name(point) for point in reversed(self._sweep.points())}
        return self._names[run_dir.id]


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
