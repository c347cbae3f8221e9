"""A sweep with cluster=local: its points as runs of this machine, several at a time, in the foreground.

Each is a `resume` in a process of its own, which starts or continues the run. The sweep on disk is the same as on a
cluster, without arrays.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from slurmtrain.errors import ClusterError
from slurmtrain.report.status.look import states
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system.file_claims import claimed
from slurmtrain.system.process import ProcessMark, end_with_parent

log = logging.getLogger(__name__)

POLL_S = 0.05


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


class LocalRuns:
    """Runs of a sweep as processes of this machine, within `with` and `alone`.

    Args:
        show: print the output of the ranks to the terminal.
        at_once: number of runs at the same time.
    """

    def __init__(self, sweep: Sweep, *, show: bool, at_once: int):
        self._sweep, self._show, self._at_once = sweep, show, at_once
        self._waiting: list[RunDir] = []
        self._running: dict[RunDir, subprocess.Popen[bytes]] = {}
        self._signals: list[int] = []  # that this process has got and not passed on yet

    def __enter__(self) -> LocalRuns:
        self._handlers = {
            number: signal.signal(number, lambda number, frame: self._signals.append(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        """Stop what still runs, and wait for it: the process would be stopped with this one anyway."""
        try:
            self._stop(signal.SIGTERM)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start(self, run_dir: RunDir) -> None:
        """Start or continue a run, as soon as there is room for it."""
        self._waiting.append(run_dir)
        self._fill()

    def ended(self, timeout_s: float = math.inf) -> RunDir | None:
        """Wait until a process has left and return its run; None if there is none within so many seconds.

        Raises:
            KeyboardInterrupt: a person has stopped this process, and all runs have been stopped, too.
        """
        until = time.monotonic() + timeout_s
        while True:
            if self._signals:
                self._stop(self._signals.pop(0))
                raise KeyboardInterrupt
            if (left := self._take()) is not None:
                self._fill()
                return left
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_S)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            run_dir = self._waiting.pop(0)
            log.info("%s begins", _name(run_dir))
            self._running[run_dir] = subprocess.Popen(
                [sys.executable, "-m", "slurmtrain", "resume", str(run_dir.path)],
                stdin=subprocess.DEVNULL,
                stdout=None if self._show else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            )

    def _stop(self, number: int) -> None:
        """Send a signal to all processes, and wait until they have left."""
        self._signals.append(number)
        while self._running:
            while self._signals:
                number = self._signals.pop(0)
                for process in self._running.values():
                    process.send_signal(number)
            if self._take() is None:
                time.sleep(POLL_S)

    def _take(self) -> RunDir | None:
        """Return a run whose process has left, if there is one, and say how it has ended."""
        left = next((run_dir for run_dir, process in self._running.items() if process.poll() is not None), None)
        if left is not None:
            del self._running[left]
            if left.info_file.exists():
                log.info("%s: %s", _name(left), states([left])[left].explanation)
        return left


def _name(run_dir: RunDir) -> str:
    return f"run {run_dir.id} ({' '.join(run_dir.info().get('varied', ()))})"
