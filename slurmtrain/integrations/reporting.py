"""What a training library tells of itself, in the record and metrics.jsonl of the run: for status, ETA and the budget.

A script that was not submitted has no run directory, and reports nothing. Of a script that trains several times, one after
the other, the training that goes on is told.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from slurmtrain.observe.metrics import MetricsLog
from slurmtrain.rank import attempt_context
from slurmtrain.rank.api import session
from slurmtrain.runs import attempts
from slurmtrain.runs.reasons import Event
from slurmtrain.system.patience import BestEffort


class ProgressReport:
    """Reports the progress of one training; on other ranks than 0, and outside of a run, it does nothing.

    Args:
        first_step: optimiser steps done when the training begins; what was logged of later ones is dropped.
        total_steps: steps of the whole training; None: not known.
    """

    def __init__(self, first_step: int, total_steps: int | None):
        self._log: MetricsLog | None = None
        self._storage = BestEffort("steps of saves for the record of this attempt")
        self._context = session.context
        if self._context is None or session.initialised()[0].environment.rank != 0:
            return
        run_dir = self._context.run_dir
        if total_steps and run_dir.info().get("steps") != total_steps:
            run_dir.update_info(steps=total_steps)
        attempt_context.update_attempt(self._context, first_step=first_step, stepping=time.time())
        self._log = MetricsLog(run_dir.metrics_file, first_step)
        self._last = first_step, time.monotonic()
        earlier = [each for each in attempts.all_attempts(run_dir) if each.number < self._context.number]
        furthest = max((each.last_step or 0 for each in earlier), default=0)
        self._done_before = furthest if furthest > first_step else 0

    def log(self, step: int, **values: float) -> None:
        """Append a line about the state after `step` steps, and how long a step took since the line before."""
        if self._log is None:
            return
        before, logged = self._last
        if step > before:
            self._last = step, time.monotonic()
            values = {**values, "step_time_s": (self._last[1] - logged) / (step - before)}
        self._log.write(step, **values)
        if self._context is not None and 0 < self._done_before <= step:  # where an earlier attempt had been
            self._done_before = 0
            with contextlib.suppress(OSError):  # only the accounts of time need it
                self._context.run_dir.event(Event.CAUGHT_UP, attempt=self._context.number, step=step)

    def saved(self, step: int, checkpoint: Path) -> None:
        """Record that the library itself has saved the state after `step` steps, and where."""
        if self._log is not None and self._context is not None:
            context, path = self._context, str(checkpoint.absolute())
            self._storage.attempt(lambda: attempt_context.update_attempt(context, last_step=step, saved=path))

    def close(self) -> None:
        """Close the file; nothing is reported any more."""
        if self._log is not None:
            self._log.close()
            self._log = None
