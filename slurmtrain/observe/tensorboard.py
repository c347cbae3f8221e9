"""TensorBoard as a logger: the numbers of a run as events in its folder. Needs the pip extra `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmtrain.observe.logger import Ending, LoggedRun, Logger


class TensorBoardLogger(Logger):
    """Writes a file of events for each attempt; TensorBoard hides what earlier ones have of the same steps."""

    def __init__(self, _: object):
        self._writer: Any = None

    def open(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        held = max(
            run.held.step, run.held.evaluated
        )  # an evaluation may be of a later step than the last that was logged
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=held + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, ending: Ending) -> None:
        if self._writer is not None:
            self._writer.close()
