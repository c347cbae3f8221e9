"""Whether all nodes see one folder: rank 0 writes a file, each other node one of its own, and each looks for the other's.

One process of each node looks, less and less often. Nobody lists the folder or opens a name in it before it is there: NFS
remembers for up to a minute that a name was missing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.runtime.preflight.facts import FolderFacts
from slurmtrain.runtime.shared_file_wait import Pauses

LIMIT_S = 30.0
OF_RANK_0 = "rank-0"


@dataclass(frozen=True)
class SharedFolder:
    """The folder `path`, of this attempt alone.

    Attributes:
        token: what rank 0 writes; all ranks know it by another way.
    """

    path: Path
    token: str
    limit_s: float = LIMIT_S

    def write(self, name: str) -> str | None:
        """Write a file, and return why that is not possible; None if it is."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.path / name).write_text(self.token)  # visible to all without fsync, which takes its time
        except OSError as error:
            return error.strerror or type(error).__name__
        return None

    def look(self, error: str | None) -> FolderFacts:
        """Look for rank 0's file until it is there, or the limit is over.

        Args:
            error: why this node could not write there.
        """
        began, pauses, found = time.monotonic(), Pauses(), None
        while found != self.token:
            if (waited := time.monotonic() - began) >= self.limit_s:
                return FolderFacts(None, stale=bool(found), error=error, limit_s=self.limit_s)
            with contextlib.suppress(OSError, ValueError):
                found = (self.path / OF_RANK_0).read_text()
            if found != self.token:
                pauses.pause()
        return FolderFacts(round(waited, 3), error=error, limit_s=self.limit_s)

    def missing(self, expected: Collection[str]) -> list[str]:
        """Wait on rank 0 for the files of all nodes, and return those that it does not see within the limit."""
        began, pauses = time.monotonic(), Pauses()
        while True:
            there: list[str] = []
            with contextlib.suppress(OSError):
                there = os.listdir(self.path)
            left = [name for name in expected if name not in there]
            if not left or time.monotonic() - began >= self.limit_s:
                return left
            pauses.pause()
