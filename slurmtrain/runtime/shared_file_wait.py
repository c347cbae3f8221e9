"""Wait for files that rank 0 writes into a shared folder: one process per node looks, less and less often.

A shared file system has no event to await, and its metadata server serves everybody: if each of 1,024 ranks looked
fifty times a second until rank 0 is there, that would be 50,000 directory reads a second. So the first rank of each
node looks, and passes on what it finds through a file in the memory of that node. If that does not reach another rank,
as between containers, that rank looks by itself after a while, and seldom. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.patience import may_pass

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
BY_ITSELF_S = 5.0  # seconds for which a rank leaves looking to the first one of its node; then doubled
LONGEST_BY_ITSELF_S = 40.0
LEFTOVER_S = 3600.0  # age of a node's copy that nobody is going to read
DIGITS = 24  # of the digest in its name


class Pauses:
    """Sleeps that grow from FIRST_PAUSE_S to `longest_s`, each randomly a little longer or shorter.

    None is much longer than half of the time that was waited before, so no rank is much too late.
    """

    def __init__(self, longest_s: float = LONGEST_PAUSE_S, sleep: Callable[[float], None] = time.sleep):
        self._next_s, self._longest_s, self._sleep = FIRST_PAUSE_S, longest_s, sleep

    def pause(self) -> None:
        """Sleep once more."""
        self._sleep(self._next_s * random.uniform(0.75, 1.25))  # so that many ranks do not look at the same moment
        self._next_s = min(1.5 * self._next_s, self._longest_s)


def _remove_leftovers(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.glob(f"slurmtrain-{os.getuid()}-{'[0-9a-f]' * DIGITS}.json"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > LEFTOVER_S:
                    path.unlink()


class Published:
    """A JSON object that rank 0 publishes under `path`, and that the others wait for.

    Args:
        path: a file in a folder that all ranks share and that belongs to this attempt alone.
        clock: returns seconds.
    """

    def __init__(self, path: Path, environment: Environment, clock: Callable[[], float] = time.monotonic):
        self._path, self._clock = path, clock
        self._looks_for_all = environment.local_rank == 0
        self._alone = environment.local_world_size == 1
        name = hashlib.sha256(str(path).encode()).hexdigest()[:DIGITS]
        memory = Path("/dev/shm")
        folder = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        self._on_node = folder / f"slurmtrain-{os.getuid()}-{name}.json"
        self._handed_on = self._complained = False
        self._by_itself_s = BY_ITSELF_S
        self._by_itself_at = clock() + BY_ITSELF_S

    def look(self) -> dict[str, Any] | None:
        """Return what rank 0 has published; None while it is not known on this node, or the storage fails.

        Raises:
            OSError: the file cannot be read, and that will not pass.
            UnreadableRecordError: it is not a regular file.
        """
        if self._looks_for_all:
            found = self._look_in_folder()
            if found is not None and not self._alone and not self._handed_on:
                with contextlib.suppress(OSError):  # the others look by themselves
                    write_json(self._on_node, found, durable=False)
                    self._handed_on = True
            return found
        found = self._look_on_node()
        if found is None and self._clock() >= self._by_itself_at:
            self._by_itself_s = min(2 * self._by_itself_s, LONGEST_BY_ITSELF_S)
            self._by_itself_at = self._clock() + self._by_itself_s * random.uniform(0.75, 1.25)
            found = self._look_in_folder()
        return found

    def forget(self) -> None:
        """Remove the node's copy, when all ranks of this node have read it, or need it no more.

        Old copies of this user go, too: those of ranks that were killed before they could do so. Who still waits for such a
        one finds the original.
        """
        if self._looks_for_all and not self._alone:
            with contextlib.suppress(OSError):  # anybody may put a file there, which only they can remove
                self._on_node.unlink()
            _remove_leftovers(self._on_node.parent)

    def _look_in_folder(self) -> dict[str, Any] | None:
        # Listing the directory makes NFS ask its server; opening a name that it remembers as missing does not.
        try:
            names = os.listdir(self._path.parent)
            return read_json(self._path) if self._path.name in names else None
        except FileNotFoundError:
            return None
        except OSError as error:
            if not may_pass(error):
                raise
            if not self._complained:
                self._complained = True
                log.warning("%s cannot be read, and is looked for again: %s", self._path, error.strerror or error)
            return None

    def _look_on_node(self) -> dict[str, Any] | None:
        try:
            descriptor = os.open(self._on_node, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(descriptor) as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():  # anybody may write in that folder
                return None
            try:
                value = json.loads(file.read())
            except ValueError:
                return None
        return value if isinstance(value, dict) else None
