"""Writing that the work does not depend on: numbers, curves and events of a run, while its disk is full or fails.

One rule for all of them: an error of the storage is told once, the work goes on, and it is told when writing works again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from slurmtrain.errors import UnreadableRecordError

log = logging.getLogger(__name__)


class BestEffort:
    """Writing of one kind.

    Args:
        what: what is written, for a person: "events of this run".
        meanwhile: what becomes of what cannot be written: "are left out".
    """

    def __init__(self, what: str, meanwhile: str = "are left out"):
        self._what, self._meanwhile = what, meanwhile
        self._failures = 0

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write`, and return whether the storage has let it through. Errors other than of the storage are raised."""
        try:
            write()
        except (OSError, UnreadableRecordError) as error:
            if not self._failures:
                log.warning("%s cannot be written now, and %s: %s", self._what, self._meanwhile, error)
            self._failures += 1
            return False
        if self._failures:
            log.warning("%s can be written again; that had failed %d times", self._what, self._failures)
            self._failures = 0
        return True
