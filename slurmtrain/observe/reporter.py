"""The one place to which a run's numbers go: it writes the metrics file, TensorBoard and the progress line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmtrain.observe.metrics import MetricsLog
from slurmtrain.observe.progress import ProgressLine
from slurmtrain.observe.tensorboard import TensorBoardLog


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
        self._progress.close()
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
        self._progress.close()
        self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _made_once(evaluated_at: int) -> Callable[[dict[str, Any]], bool]:
    """Return what tells the records that stay: one without a training loss is of an evaluation.

    Those after the last checkpoint are made again.
    """
    return lambda record: "loss" in record or record["step"] <= evaluated_at
