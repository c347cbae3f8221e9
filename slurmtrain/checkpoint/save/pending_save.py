"""What `Checkpointer.save` returns: a save in flight, and how it ends. It ends the same way on all ranks."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.system.activity import SAVE, doing

DRAIN_S = 30.0  # how long whoever has failed waits for a save in flight


@dataclass(frozen=True)
class SaveResult:
    """One committed checkpoint.

    Attributes:
        seconds: from the call of `save` until the commit.
        stall_s: seconds for which `save` held up this rank.
        size: bytes of all ranks' files.
    """

    path: Path
    step: int
    seconds: float
    stall_s: float = 0.0
    size: int = 0


class PendingSave:
    """A save that has begun. `result()` waits for the commit.

    Attributes:
        step: optimiser steps done.
        stall_s: seconds for which `save` held up this rank.
        begun: time.monotonic() at the call of `save`.
        on_nodes_only: it is a copy on the nodes, and no checkpoint of the directory.
    """

    def __init__(self, step: int, begun: float, *, on_nodes_only: bool = False):
        self.step, self.begun, self.on_nodes_only = step, begun, on_nodes_only
        self.stall_s = 0.0
        self._decided = threading.Event()
        self._saved: SaveResult | None = None
        self._error: CheckpointError | None = None

    def done(self) -> bool:
        """Return whether it is committed or has failed."""
        return self._decided.is_set()

    @doing(SAVE)
    def result(self, timeout_s: float | None = None) -> SaveResult:
        """Wait for the commit.

        Raises:
            CheckpointError: the save failed, on every rank, and the older checkpoints are as they were; or it takes
                longer than `timeout_s` seconds.
        """
        if not self._decided.wait(timeout_s):
            raise CheckpointError(f"the save of step {self.step} is not committed after {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    @doing(SAVE)
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is committed or has failed; return False if it is neither after `timeout_s` seconds."""
        return self._decided.wait(timeout_s)

    def decide(self, ending: SaveResult | CheckpointError) -> None:
        """Record how the save ended. Called by the writer."""
        if isinstance(ending, SaveResult):
            self._saved = ending
        else:
            self._error = ending
        self._decided.set()

    @property
    def error(self) -> CheckpointError | None:
        """The error with which it failed; None: it has not failed, or is not decided yet."""
        return self._error
