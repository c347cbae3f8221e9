"""The progress of a run: step, loss, speed and the time left.

It is read from the last lines of its metrics.jsonl, without asking SLURM.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmtrain.checkpoint.format.directory import newest_committed_step
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.records import TAIL_BYTES, finite, is_count, is_scalar, read_tail, records_with
from slurmtrain.system.texts import roughly

if TYPE_CHECKING:
    from slurmtrain.runs.program_checkpoints import ProgramCheckpoint


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Unknown values are None: a program of the user's own logs nothing, a run that waits has not logged yet.

    Attributes:
        step: number of steps done, as far as is known.
        steps: number of steps of the whole run.
        loss, valid_loss: values logged last, in nats per token.
        logged: time of the last record, or of a program's newest checkpoint, in unix seconds.
        tokens_per_s: tokens of all ranks per second, while it runs.
        step_time_s: seconds per step over the last steps, without pauses for evaluations and saves; while it runs.
    """

    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    valid_loss: float | None = None
    logged: float | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = None

    @property
    def left(self) -> int | None:
        """The number of steps left to do."""
        return None if self.steps is None else max(0, self.steps - (self.step or 0))

    @property
    def eta_s(self) -> float | None:
        """The seconds left to run, at its present speed."""
        return None if self.step_time_s is None or self.left is None else finite(self.left * self.step_time_s)


def read_progress(
    run_dir: RunDir, steps: int | None, own_checkpoints: Mapping[str, Any] | None = None, *, running_since: float | None
) -> Progress:
    """Return the progress of a run, as metrics.jsonl, and the checkpoints of this package or of the program, show it.

    Args:
        steps: number of steps of the whole run.
        own_checkpoints: what run.json says of the checkpoints of a program of the user's own, if it has any.
        running_since: when the running attempt began; None when none runs, since an earlier speed says nothing about
            now.
    """
    own = _newest_own(run_dir, own_checkpoints) if own_checkpoints else None
    saved = None
    with contextlib.suppress(PermissionError):  # a run of somebody else who shares the run but not its checkpoints
        saved = newest_committed_step(run_dir.checkpoints)
    log = read_tail(run_dir.metrics_file, TAIL_BYTES)
    newest, trained, evaluated = (next(records_with(name, log), {}) for name in ("step", "loss", "valid_loss"))
    logged = os.lstat(run_dir.metrics_file).st_mtime if newest else None
    if newest and not evaluated:  # evaluation jobs need not come in order
        jobs = records_with("valid_loss", read_tail(run_dir.evaluations_file, TAIL_BYTES))
        evaluated = max((each for each in jobs if is_count(each.get("step", 0))), key=_step, default={})
    # A program of the user's own may report steps and nothing else.
    paced = (trained or newest) if running_since is not None and (logged or 0.0) >= running_since else {}
    reached, times = [saved or 0], [logged]
    if is_count(newest.get("step")):
        reached.append(int(newest["step"]))
    if own is not None:
        reached.append(own.step or 0)
        times.append(own.changed)
    return Progress(
        max(reached) or None,
        steps,
        # Also NaN and infinity: a person should see that a loss has diverged.
        loss=trained["loss"] if is_scalar(trained.get("loss")) else None,
        valid_loss=evaluated["valid_loss"] if is_scalar(evaluated.get("valid_loss")) else None,
        logged=max(filter(None, times), default=None),
        tokens_per_s=finite(paced.get("tokens_per_s")),
        step_time_s=finite(paced.get("step_time_s")),
    )


def _newest_own(run_dir: RunDir, described: Mapping[str, Any]) -> ProgramCheckpoint | None:
    """Return the newest complete checkpoint of a program of the user's own, if it is known where they are."""
    from slurmtrain.runs.program_checkpoints import find_checkpoints, newest_complete

    pattern, rule = described.get("pattern"), described.get("complete")
    if isinstance(pattern, str) and isinstance(rule, str | None):
        with contextlib.suppress(OSError):
            return newest_complete(find_checkpoints(run_dir.program_folders, pattern, rule))
    return None


def eta_of_all(waiting: Iterable[Progress], running: Collection[Progress]) -> float | None:
    """Return the seconds until all of these have ended, if as many run at once, each as fast; None while no speed is known."""
    etas = [each.eta_s for each in running if each.eta_s is not None]
    speeds = [each.step_time_s for each in running if each.step_time_s is not None]
    if not etas:
        return None
    left = sum(each.left or 0 for each in [*waiting, *running])
    return max(*etas, left * sum(speeds) / len(speeds) / len(running))


def lowest(points: Iterable[tuple[int, Progress]]) -> tuple[str, float, int] | None:
    """Return the lowest validation loss that was logged last, or if none was, training loss: its name, value and point."""
    found = list(points)
    for metric in ("valid_loss", "loss"):
        values = [(value, number) for number, each in found if (value := getattr(each, metric)) is not None]
        finite = [pair for pair in values if math.isfinite(pair[0])]
        if finite:
            return (metric.replace("_", " "), *min(finite))
    return None


def at_about(moment: float, now: float) -> str:
    """Format a future time: "in about 2 h 10 min (14:30)", with the day unless it is today. Both in unix seconds."""
    then = time.localtime(moment)
    same_day = then[:3] == time.localtime(now)[:3]
    return f"in about {roughly(moment - now)} ({time.strftime('%H:%M' if same_day else '%m-%d %H:%M', then)})"


def _step(record: dict[str, Any]) -> int:
    return int(record.get("step", 0))
