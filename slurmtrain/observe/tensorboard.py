"""The same metrics as TensorBoard events, if TensorBoard is installed."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class TensorBoardLog:
    """A writer of scalars as TensorBoard events; without the `tensorboard` package it logs one message and does nothing.

    Args:
        directory: folder of the event files.
        resume_step: the step of the checkpoint that this attempt continues from; TensorBoard hides what earlier
            attempts logged for later steps. None: it hides nothing.
    """

    _said_missing = False

    def __init__(self, directory: Path, resume_step: int | None):
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is None:
            if not TensorBoardLog._said_missing:
                TensorBoardLog._said_missing = True
                log.warning("tensorboard is not installed (pip install tensorboard): no event files")
            return
        # Imported here: it takes about a second, and only one rank ever needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=None if resume_step is None else resume_step + 1)

    def write(self, step: int, **values: Any) -> None:
        """Add one point at `step` to the curve of each value that is a number."""
        if self._writer is None:
            return
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered, and close."""
        if self._writer is not None:
            self._writer.close()
