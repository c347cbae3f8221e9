"""A thread that does one piece of work after another while training goes on. At most one piece is accepted at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class BackgroundThread:
    """The thread. It starts with the first work and ends with `stop`.

    An error of a piece of work is logged with its traceback and ends that piece alone: work reports what it wants known.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._work: Callable[[], None] | None = None
        self._stopping = False

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` in the background, after the present work."""
        with self._changed:
            self._changed.wait_for(lambda: self._work is None)
            self._work = work
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether there is no work."""
        return self._work is None

    def wait_idle(self) -> None:
        """Wait until the present work is done."""
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
            except BaseException:  # whatever it is: without the thread, the next piece would be waited for for ever
                log.exception("%s: a piece of work has failed", self._name)
            finally:
                with self._changed:
                    self._work = None
                    self._changed.notify_all()
