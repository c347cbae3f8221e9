"""Wait for files that rank 0 writes into a shared folder: less and less often, and first of all on one rank of each node.

A shared file system has no event to await, and its metadata server serves everybody: if each of 1,024 ranks looked
fifty times a second until rank 0 is there, that would be 50,000 directory reads a second. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import read_json
from slurmtrain.system.patience import may_pass

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0


class Pauses:
    """Sleeps that grow from `first_s` to `longest_s`, each randomly a little longer or shorter.

    None is much longer than half of the time that was waited before, so no rank is much too late.
    """

    def __init__(
        self,
        longest_s: float = LONGEST_PAUSE_S,
        sleep: Callable[[float], None] = time.sleep,
        *,
        first_s: float = FIRST_PAUSE_S,
    ):
        self._next_s, self._longest_s, self._sleep = first_s, longest_s, sleep

    @classmethod
    def of_rank(cls, environment: Environment, sleep: Callable[[float], None] = time.sleep) -> Pauses:
        """Return those of a rank that looks into a shared folder: all but the first of each node look ten times less often."""
        times = 1 if environment.local_rank == 0 else 10
        return cls(times * LONGEST_PAUSE_S, sleep, first_s=times * FIRST_PAUSE_S)

    def pause(self) -> None:
        """Sleep once more."""
        self._sleep(self._next_s * random.uniform(0.75, 1.25))  # so that many ranks do not look at the same moment
        self._next_s = min(1.5 * self._next_s, self._longest_s)


def look(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that rank 0 has published under `path`; None while it is not there, or the storage fails.

    Raises:
        OSError: the file cannot be read, and that will not pass.
        UnreadableRecordError: it is not a regular file.
    """
    # Listing the directory makes NFS ask its server; opening a name that it remembers as missing does not.
    try:
        return read_json(path) if path.name in os.listdir(path.parent) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        if not may_pass(error):
            raise
        log.warning("%s cannot be read, and is looked for again: %s", path, error.strerror or error)
        return None
