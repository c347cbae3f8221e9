"""What a training library tells of itself, in the record and metrics.jsonl of the run: for status, ETA and the budget.

A script that was not submitted has no run directory, and reports nothing. A script may train several times, one after
the other: the steps of a later training are counted on from where the one before it ended, so that they are progress,
and each keeps its lines when the other begins again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurmtrain.observe.metrics import MetricsLog
from slurmtrain.runs import attempts, reached_step
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import attempt_context
from slurmtrain.runtime.api import session
from slurmtrain.system import records
from slurmtrain.system.patience import BestEffort


@dataclass
class _Trainings:
    """The trainings of this process.

    Attributes:
        numbers: how many trainings each folder has had.
        reached: step that the last training of each folder has reached, by its own count; None while it goes on.
        furthest: the furthest step reported, by the count of the run.
        stepped: a step was done here.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int | None] = field(default_factory=dict)
    furthest: int = 0
    stepped: bool = False

    def name(self, folder: str, first_step: int) -> str:
        """Return the name of a training that begins: its folder, with a number from the second training there on.

        One that begins while the one before has not ended (it is tried again with smaller batches), or where that
        ended, is the same training.
        """
        reached = self.reached.get(folder, -1)
        if (reached is not None and first_step < reached) or folder not in self.numbers:
            self.numbers[folder] = self.numbers.get(folder, 0) + 1
        self.reached[folder] = None
        number = self.numbers[folder]
        return folder if number == 1 else f"{folder}#{number}"


_trainings = _Trainings()


class ProgressReport:
    """Reports the progress of one training; on other ranks than 0, and outside of a run, it does nothing.

    Args:
        first_step: optimiser steps done when the training begins; what was logged of later ones is dropped.
        total_steps: steps of the whole training; None: not known.
        folder: where its checkpoints are, by which it is told from other trainings of the script, also after a restart.
    """

    def __init__(self, first_step: int, total_steps: int | None, folder: Path | str):
        self._log: MetricsLog | None = None
        self._storage = BestEffort("steps of saves for the record of this attempt")
        self._context = session.context
        if self._context is None or session.initialised()[0].environment.rank != 0:
            return
        run_dir, self._folder = self._context.run_dir, str(folder)
        offset, later = _place(run_dir, _trainings.name(self._folder, first_step))
        steps = offset + total_steps if total_steps else None
        if (steps or offset) and run_dir.info().get("steps") != steps:
            run_dir.update_info(steps=steps)
        if not _trainings.stepped:  # an earlier training had ended before, and this one is where the attempt begins
            attempt_context.update_attempt(self._context, first_step=offset + first_step, stepping=time.time())
        again = range(offset + first_step + 1, later)
        self._log = MetricsLog(
            run_dir.metrics_file,
            sys.maxsize,
            keep=lambda record: record["step"] not in again,
            settled_step=offset + first_step,
        )
        self._offset, self._step = offset, first_step
        self._last = first_step, time.monotonic()
        earlier = [each for each in attempts.all_attempts(run_dir) if each.number < self._context.number]
        furthest = max((each.last_step or 0 for each in earlier), default=0)
        self._done_before = furthest if furthest > offset + first_step else 0

    def log(self, step: int, **values: float) -> None:
        """Append a line about the state after `step` steps, and how long a step took since the line before."""
        if self._log is None:
            return
        before, logged = self._last
        if step > before:
            self._last = step, time.monotonic()
            values = {**values, "step_time_s": (self._last[1] - logged) / (step - before)}
        self._reached(step)
        self._log.write(self._offset + step, **values)
        if self._context is not None and step > before:
            self._tell_events(self._context, self._offset + step)

    def _tell_events(self, context: attempt_context.AttemptContext, step: int) -> None:
        """Record when this attempt is where an earlier one had been."""
        if 0 < self._done_before <= step:
            self._done_before = 0
            with contextlib.suppress(OSError):  # only the accounts of time need it
                context.run_dir.event(Event.CAUGHT_UP, attempt=context.number, step=step)

    def saved(self, step: int, checkpoint: Path) -> None:
        """Record that the library itself has saved the state after `step` steps, and where."""
        if self._log is not None and self._context is not None:
            self._reached(step)
            context, reached, path = self._context, self._offset + step, str(checkpoint.absolute())
            self._storage.attempt(lambda: attempt_context.update_attempt(context, last_step=reached, saved=path))

    def close(self) -> None:
        """Close the file; nothing is reported any more."""
        if self._log is not None:
            self._log.close()
            self._log = None
            _trainings.reached[self._folder] = self._step

    def _reached(self, step: int) -> None:
        if step > self._step:
            self._step, _trainings.stepped = step, True
        _trainings.furthest = max(_trainings.furthest, self._offset + step)


def _place(run_dir: RunDir, name: str) -> tuple[int, int]:
    """Return the place of a training in the run's count of steps, which is kept in run.json.

    Returns:
        how many steps trainings before it have done
        the first step that may be of one after it
    """
    info = run_dir.info()
    kept = info.get("trainings") or {}
    offsets: Mapping[str, int] = {
        each: offset for each, offset in kept.items() if records.is_count(offset) and offset >= 0
    }
    if name not in offsets:
        done = max(reached_step.furthest_reported(run_dir) or 0, _trainings.furthest) if offsets else 0
        is_first = sum(_trainings.numbers.values()) == 1
        if offsets and is_first and done < (info.get("steps") or 0):
            # The last one has not ended, so this is it again, in a folder whose name changes: no progress for that.
            done = max(offsets.values())
        offsets = {**offsets, name: done}
        run_dir.update_info(trainings=offsets)
    own = offsets[name]
    return own, min((each + 1 for each in offsets.values() if each > own), default=sys.maxsize)
