"""A sweep with cluster=local: its points as runs of this machine, several at a time, in the foreground.

Each is a `resume` in a process of its own, which starts or continues the run. The sweep on disk is the same as on a
cluster, without arrays.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from slurmtrain.errors import ClusterError
from slurmtrain.report.status.look import is_over, states
from slurmtrain.report.status.state import RunStatus
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Point, Sweep
from slurmtrain.system.file_claims import claimed
from slurmtrain.system.parent_death import end_with_parent
from slurmtrain.system.process_mark import ProcessMark

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5  # at runs that still have processes of another shell

# A signal's number, or the id of a run whose process has left. SimpleQueue.put may be called from a signal handler.
Events = queue.SimpleQueue[int | str]


@contextlib.contextmanager
def alone(sweep: Sweep) -> Iterator[None]:
    """Claim the right to wait for the points of a sweep: two processes would start the same run twice.

    Raises:
        ClusterError: another process has claimed it.
    """

    def refuse(owner: ProcessMark) -> None:
        raise ClusterError(
            f"process {owner.pid} on {owner.host} is already running sweep {sweep.id}",
            hint=f"sweep status {sweep.id} shows its state; when that process has ended, start again",
        )

    with claimed(sweep.path, refuse):
        yield


def run_here(sweep: Sweep, run_ids: Sequence[str], at_once: int, *, show: bool, retry: bool = True) -> bool:
    """Start or continue these runs; return False when a person stopped it: Ctrl-C, or TERM to this process.

    Called within `alone`.

    Args:
        at_once: number of runs at the same time.
        show: print the output of the ranks to the terminal.
        retry: as in `LocalRuns`.
    """
    waiting = list(run_ids)
    with LocalRuns(sweep, show=show, retry=retry) as runs:
        try:
            while runs.count or waiting:
                while waiting and runs.count < at_once:
                    runs.start(sweep.run_dir(waiting.pop(0)))
                runs.ended()
        except KeyboardInterrupt:
            return False
    return True


class LocalRuns:
    """Runs of a sweep as processes of this machine, within `with`. Called within `alone`.

    Args:
        show: print the output of the ranks to the terminal.
        retry: also start runs that have failed; else only those that `is_to_go_on`.
    """

    def __init__(self, sweep: Sweep, *, show: bool, retry: bool):
        self._sweep, self._show, self._retry = sweep, show, retry
        self._running: dict[RunDir, subprocess.Popen[bytes]] = {}
        self._leaving: list[RunDir] = []
        self._over: list[RunDir] = []
        self._names: dict[str, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalRuns:
        self._events = self._stack.enter_context(_signals())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop what still runs, and wait for it: the process would be stopped with this one anyway."""
        with self._stack:
            for process in self._running.values():
                process.send_signal(signal.SIGTERM)
            self._wait_for_all()

    @property
    def count(self) -> int:
        """The number of runs that were started, and that `ended` has not returned."""
        return len(self._running) + len(self._leaving) + len(self._over)

    def start(self, run_dir: RunDir) -> None:
        """Start or continue a run.

        When the shell before this one was killed, its processes were told to leave, and may still be saving. The run is
        continued when they have left.

        Raises:
            ClusterError: nobody knows whether it has processes on another host.
        """
        now = states([run_dir])[run_dir.id]
        if now.status == RunStatus.UNKNOWN:
            raise ClusterError(
                f"run {run_dir.id} cannot be continued here: {now.explanation}",
                hint="give the command there; if that host is gone for good, remove "
                f"{run_dir.attempt(now.attempts[-1].number).record_file} a minute before",
            )
        if now.alive:
            log.info("%s: run %s begins when the processes that it still has are gone", self._name(run_dir), run_dir.id)
            self._leaving.append(run_dir)
        elif self._retry or is_to_go_on(run_dir):
            log.info("%s: run %s begins", self._name(run_dir), run_dir.id)
            self._running[run_dir] = _start(run_dir, self._events, show=self._show)
        else:
            self._over.append(run_dir)

    def ended(self, timeout_s: float | None = None) -> list[RunDir]:
        """Return the runs whose processes have left; wait until there is one, or for so many seconds.

        Raises:
            KeyboardInterrupt: a person has stopped this process, and all runs have been stopped, too.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._over and time.monotonic() < until:
            pause_s = min(LOOK_EVERY_S if self._leaving else math.inf, until - time.monotonic())
            try:
                event = self._events.get(timeout=max(0.0, pause_s) if pause_s < math.inf else None)
            except queue.Empty:
                self._start_again()
                continue
            if isinstance(event, int):
                self._pass_on(event)
                self._wait_for_all()
                raise KeyboardInterrupt
            self._over.append(self._take(event))
        over, self._over = self._over, []
        return over

    def _start_again(self) -> None:
        """Continue the runs whose former processes have left."""
        leaving, self._leaving = self._leaving, []
        now = states(leaving)
        for run_dir in leaving:
            if now[run_dir.id].alive:
                self._leaving.append(run_dir)
            else:
                self.start(run_dir)

    def _wait_for_all(self) -> None:
        while self._running:
            event = self._events.get()
            if isinstance(event, int):
                self._pass_on(event)
            else:
                self._take(event)

    def _pass_on(self, number: int) -> None:
        for process in self._running.values():
            process.send_signal(number)

    def _take(self, run_id: str) -> RunDir:
        run_dir = self._sweep.run_dir(run_id)
        del self._running[run_dir]
        log.info("%s: %s", self._name(run_dir), states([run_dir])[run_dir.id].explanation)
        return run_dir

    def _name(self, run_dir: RunDir) -> str:
        if run_dir.id not in self._names:  # the first of those with the same config
            self._names = {point.run_id: _name(point) for point in reversed(self._sweep.points())}
        return self._names[run_dir.id]


def is_to_go_on(run_dir: RunDir) -> bool:
    """Return whether a search goes on with a run that has no processes: it has not ended, or was stopped with Ctrl-C."""
    now = states([run_dir])[run_dir.id]
    return now.status == RunStatus.STOPPED or (now.status != RunStatus.UNREADABLE and not is_over(run_dir))


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
    end_with_parent(signal.SIGTERM)


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
