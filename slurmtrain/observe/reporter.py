"""The one place to which a run's numbers go: it writes the metrics file, TensorBoard and the progress line.

TensorBoard has events if it is installed. What the storage does not take of these is left out.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.observe.metrics import MetricsLog
from slurmtrain.observe.progress import ProgressLine
from slurmtrain.system.patience import BestEffort

AGAIN_S = 600.0  # after an error, since every writer begins a file of its own


class Reporter:
    """The output of rank 0. Other ranks have none."""

    def __init__(
        self, *, metrics_file: Path, tensorboard: Path | None, total_steps: int, resume_step: int, evaluated_at: int
    ):
        self._folder, self._total_steps = tensorboard, total_steps
        self._metrics = MetricsLog(metrics_file, resume_step, _made_once(evaluated_at))
        self._begin(resume_step)

    def _begin(self, step: int) -> None:
        self._tensorboard = TensorBoardLog(self._folder, step) if self._folder is not None else None
        self._progress = ProgressLine(self._total_steps, step)

    def rewind(self, step: int, *, evaluated_at: int) -> None:
        """Go back to step `step`: what was written of later ones is dropped."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._metrics.rewind(step, _made_once(evaluated_at))
        self._begin(step)

    def log(self, step: int, **values: float | str | None) -> None:
        """Record one step's numbers, and update the progress line."""
        self._metrics.write(step, **values)
        if self._tensorboard is not None:
            self._tensorboard.write(step, **values)
        shown = {name: value for name in ("loss", "lr", "tokens_per_s") if isinstance(value := values.get(name), float)}
        self._progress.update(step, **shown)

    def record(self, step: int, **values: float) -> None:
        """Record the numbers of an evaluation, without updating the progress line."""
        self._metrics.write(step, **values)
        if self._tensorboard is not None:
            self._tensorboard.write(step, **values)

    def message(self, text: str) -> None:
        self._progress.message(text)

    def close(self) -> None:
        self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _made_once(evaluated_at: int) -> Callable[[dict[str, Any]], bool]:
    """Return what tells the records that stay: one without a training loss is of an evaluation.

    Those after the last checkpoint are made again.
    """
    return lambda record: "loss" in record or record["step"] <= evaluated_at


class TensorBoardLog:
    """A writer of scalars as TensorBoard events; without the `tensorboard` package it does nothing.

    Args:
        directory: folder of the event files.
        resume_step: the step of the checkpoint that this attempt continues from; TensorBoard hides what earlier
            attempts logged for later steps. None: it hides nothing.
    """

    def __init__(self, directory: Path, resume_step: int | None):
        self._writer: Any = None
        self._directory, self._purge_step = directory, None if resume_step is None else resume_step + 1
        self._storage = BestEffort(f"points of the curves in {directory}")
        self._again = 0.0  # when a writer is made after one has failed
        self._missing = importlib.util.find_spec("tensorboard") is None
        if not self._missing:
            self._storage.attempt(self._open)

    def write(self, step: int, **values: Any) -> None:
        """Add one point at `step` to the curve of each value that is a number."""
        if self._missing or time.monotonic() < self._again:
            return
        if not self._storage.attempt(lambda: self._add(step, values)):
            self._writer = None  # its thread has ended
            self._again = time.monotonic() + AGAIN_S

    def close(self) -> None:
        """Write what is buffered, and close."""
        if self._writer is not None:
            self._storage.attempt(self._writer.close)

    def _open(self) -> None:
        # Imported here: it takes about a second, and only one rank ever needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
        self._purge_step = None  # one that is made after an error goes on

    def _add(self, step: int, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._open()
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
