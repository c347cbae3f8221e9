"""The units of a data set that are done, by the names of their records. Imports little: the supervisor asks for it, too."""

from __future__ import annotations

import os
from pathlib import Path

WORK_FOLDER = ".prepare"  # in the output: the plan, the units' records, temporary files


def units_folder(output: Path) -> Path:
    """Return the folder of the records of units that are done."""
    return output / WORK_FOLDER / "units"


def recorded(folder: Path) -> set[str]:
    """Return the names of the units that have a record, by listing the folder.

    A file system may cache that a single name is missing.

    Raises:
        OSError: the folder cannot be listed.
    """
    return {name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")}


def count_done(output: Path, part: int, parts: int) -> int | None:
    """Return how many units of a part are done; None if that cannot be seen here, such as outside of a container.

    Args:
        part, parts: as in the config. Units have numbers for names, and every `parts`-th one belongs to the part.
    """
    try:
        names = recorded(units_folder(output))
    except OSError:
        return None
    return sum(int(name) % parts == part for name in names if name.isdecimal())
