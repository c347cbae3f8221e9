"""The units of a data set that are done, by the names of their folders. Imports little: the supervisor asks for it, too."""

from __future__ import annotations

import os
from pathlib import Path


def units_done(output: Path) -> set[str]:
    """Return the names of the units that are done, by listing the folder.

    A file system may cache that a single name is missing.

    Raises:
        OSError: the folder cannot be listed.
    """
    return {name for name in os.listdir(output) if name.isdecimal()}


def count_done(output: Path, part: int, parts: int) -> int | None:
    """Return how many units of a part are done; None if that cannot be seen here, such as outside of a container.

    Args:
        part, parts: as in the config. Units have numbers for names, and every `parts`-th one belongs to the part.
    """
    try:
        return sum(int(name) % parts == part for name in units_done(output))
    except OSError:
        return None
