"""The same metrics as TensorBoard events, if TensorBoard is installed. What the storage does not take is left out."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.system.patience import BestEffort

AGAIN_S = 600.0  # after an error, since every writer begins a file of its own


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
