"""Whether all nodes see one folder: rank 0 writes a file, each other node one of its own, and each looks for the other's.

One process of each node looks, less and less often. Nobody lists the folder or opens a name in it before it is there: NFS
remembers for up to a minute that a name was missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.runtime.preflight.facts import FolderFacts
from slurmtrain.runtime.shared_file_wait import Pauses

LIMIT_S = 30.0
WORD = "rank-0"


def _read(path: Path) -> str:
    return path.read_text()


@dataclass(frozen=True)
class SharedFolder:
    """The folder `path`, of this attempt alone.

    Attributes:
        token: what rank 0 writes; all ranks know it by another way.
        read: reads a file.
        names: lists the folder.
    """

    path: Path
    token: str
    limit_s: float = LIMIT_S
    clock: Callable[[], float] = time.monotonic
    pauses: Callable[[], Pauses] = Pauses
    read: Callable[[Path], str] = _read
    names: Callable[[Path], list[str]] = os.listdir

    def write(self, name: str) -> str | None:
        """Write a file of this node, or of rank 0 (WORD), and return why that is not possible; None if it is."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self.path / name, "w") as file:  # visible to all without fsync, which takes its time
                file.write(self.token)
        except OSError as error:
            return error.strerror or type(error).__name__
        return None

    def look(self, error: str | None) -> FolderFacts:
        """Look for rank 0's file until it is there, or the limit is over.

        Args:
            error: why this node could not write there.
        """
        began, pauses, found = self.clock(), self.pauses(), None
        while True:
            with contextlib.suppress(OSError, ValueError):
                found = self.read(self.path / WORD)
            if found == self.token:
                return FolderFacts(round(self.clock() - began, 3), error=error, limit_s=self.limit_s)
            if self.clock() - began >= self.limit_s:
                return FolderFacts(None, stale=bool(found), error=error, limit_s=self.limit_s)
            pauses.pause()

    def missing(self, expected: Collection[str]) -> tuple[str, ...]:
        """Wait on rank 0 for the files of all nodes, and return those that it does not see within the limit."""
        began, pauses = self.clock(), self.pauses()
        while True:
            try:
                there = set(self.names(self.path))
            except OSError:
                there = set()
            left = tuple(name for name in expected if name not in there)
            if not left or self.clock() - began >= self.limit_s:
                return left
            pauses.pause()

    def remove(self) -> None:
        """Remove the folder, on rank 0, when nobody looks any more."""
        shutil.rmtree(self.path, ignore_errors=True)
