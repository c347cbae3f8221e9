"""One save after another, in the background: a thread that writes, commits, reads back and cleans up.

At most one save is in flight. The thread communicates with the other ranks' threads on a gloo group of its own, so that
its messages are separate from training's. A save ends the same way on all ranks, because rank 0 broadcasts it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import CheckpointError

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
    """

    def __init__(self, step: int, begun: float):
        self.step, self.begun = step, begun
        self.stall_s = 0.0
        self._decided = threading.Event()
        self._saved: SaveResult | None = None
        self._error: CheckpointError | None = None

    def done(self) -> bool:
        """Return whether it is committed or has failed."""
        return self._decided.is_set()

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


def _try(work: Callable[[], None]) -> None:
    """Run `work` and print its errors.

    What fails after the commit must not end the thread, or the next save would never end.
    """
    try:
        work()
    except Exception:
        traceback.print_exc()


class Writer:
    """The thread. It starts with the first save and ends with `stop`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._work: Callable[[], None] | None = None
        self._stopping = False

    def submit(
        self,
        saving: PendingSave,
        write: Callable[[], SaveResult],
        ended: Callable[[SaveResult | CheckpointError], None],
        afterwards: Callable[[], None],
    ) -> None:
        """Write in the background, after the present work.

        Args:
            write: returns when the checkpoint is committed; its CheckpointError is the save's.
            ended: called with the committed checkpoint, or with the error.
            afterwards: further work, which only the next save waits for.
        """

        def work() -> None:
            ending: SaveResult | CheckpointError
            try:
                ending = write()
            except CheckpointError as error:
                ending = error
            except BaseException as error:  # a bug of ours must not look like a save that never ends
                traceback.print_exc()
                ending = CheckpointError(f"{type(error).__name__}: {error}")
            saving.decide(ending)
            _try(lambda: ended(ending))
            if isinstance(ending, SaveResult):
                _try(afterwards)

        self.run(work)

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` in the background, after the present work."""
        with self._changed:
            self._changed.wait_for(lambda: self._work is None)
            self._work = work
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether there is no work."""
        return self._work is None

    def wait_idle(self) -> None:
        """Wait until nothing is being written, read back or cleaned up."""
        with self._changed:
            self._changed.wait_for(lambda: self._work is None)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after its present work; return False if it has not ended after `timeout_s` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work is not None or self._stopping)
                work = self._work
            if work is None:
                return
            try:
                work()
            finally:
                with self._changed:
                    self._work = None
                    self._changed.notify_all()
