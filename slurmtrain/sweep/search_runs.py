"""The runs of a search, as jobs of a cluster or as processes of this machine: started, watched, and reported when they end.

A run whose directory is gone has ended, too: nothing more is to be expected of it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from slurmtrain.report.status.look import states
from slurmtrain.report.status.state import RunState
from slurmtrain.report.waiting import EndWatch
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.sweep.adaptive import OpenSweep
from slurmtrain.sweep.folder import REMOVED
from slurmtrain.sweep.jobs import Submission
from slurmtrain.sweep.local import LocalRuns

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5  # at the logs of local runs, if they are judged by them


class ClusterRuns:
    """The runs of a search as jobs. One squeue call asks for all of them, now and then."""

    def __init__(self, open_sweep: OpenSweep):
        self._open_sweep, self._watch = open_sweep, EndWatch(ask_first=False)

    def __enter__(self) -> ClusterRuns:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            name = self._open_sweep.sweep.id
            log.info("the jobs of %s go on without this shell; sweep cancel %s ends them", name, name)

    @property
    def watched(self) -> bool:
        return bool(self._watch.waiting)

    def start(self, run_dirs: Sequence[RunDir]) -> Submission:
        """Submit those that have no job."""
        gone = [run_dir for run_dir in run_dirs if is_gone(run_dir)]
        there = [run_dir for run_dir in run_dirs if run_dir not in gone]
        submission = self._open_sweep.submit(there)
        self.watch([*gone, *(run_dir for run_dir in there if run_dir.info()["job_ids"])])
        return submission

    def watch(self, run_dirs: Sequence[RunDir]) -> None:
        self._watch.add(run_dirs)

    def ended(self, _: bool) -> list[tuple[RunDir, RunState]]:
        """Wait a moment, and return the runs that have ended, in the order in which they have.

        Raises:
            UnreadableRecordError: the files of a run cannot be used.
        """
        gone = [run_dir for run_dir in self._watch.waiting if is_gone(run_dir)]
        self._watch.forget(gone)
        found = [*((run_dir, REMOVED) for run_dir in gone), *sorted(self._watch.look(), key=_when_it_ended)]
        if not found:
            time.sleep(self._watch.pause_s)
        return found


class ProcessRuns:
    """The runs of a search as processes of this machine."""

    def __init__(self, open_sweep: OpenSweep, *, show: bool):
        self._runs = LocalRuns(open_sweep.sweep, show=show, retry=False)
        self._over: list[RunDir] = []
        self._known = set[RunDir]()

    def __enter__(self) -> ProcessRuns:
        self._runs.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._runs.__exit__(*error)

    @property
    def watched(self) -> bool:
        return True

    def start(self, run_dirs: Sequence[RunDir]) -> Submission:
        """Start those that have not ended."""
        for run_dir in run_dirs:
            if run_dir in self._known:
                continue
            self._known.add(run_dir)
            if is_gone(run_dir):
                self._over.append(run_dir)
            else:
                self._runs.start(run_dir)
        return Submission([], [])

    def watch(self, run_dirs: Sequence[RunDir]) -> None:
        """Report runs that have ended; those that are known already are reported as such."""
        new = [run_dir for run_dir in run_dirs if run_dir not in self._known]
        self._known.update(new)
        self._over += new

    def ended(self, look_at_logs: bool) -> list[tuple[RunDir, RunState]]:
        """Wait until a run has ended, or for a moment if logs are to be looked at."""
        over, self._over = self._over, []
        over = over or self._runs.ended(timeout_s=LOOK_EVERY_S if look_at_logs else None)
        self._known.difference_update(over)  # another trial may have the same config
        now = states([run_dir for run_dir in over if not is_gone(run_dir)])
        return [(run_dir, now.get(run_dir.id, REMOVED)) for run_dir in over]


def is_gone(run_dir: RunDir) -> bool:
    """Return whether the directory of a run was removed."""
    return not os.path.lexists(run_dir.path)


def _when_it_ended(ended: tuple[RunDir, RunState]) -> tuple[float, str]:
    run_dir, now = ended
    last = now.attempts[-1].ended if now.attempts else None
    return (last if last is not None else math.inf, run_dir.id)
