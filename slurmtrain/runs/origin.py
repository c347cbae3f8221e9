"""Where a run or a sweep was made: a copy of its folder is another one, whose jobs are not those of the original."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def made_at(folder: Path, path: Path | None = None) -> dict[str, Any]:
    """Return the facts by which a folder is told from a copy of it, for its run.json or sweep.json.

    Args:
        path: the path that the folder will be renamed to; None: it stays.
    """
    found = os.stat(folder)
    return {"path": str(path or folder), "device": found.st_dev, "inode": found.st_ino}


def copied_from(folder: Path, info: Mapping[str, Any]) -> Path | None:
    """Return the path of the original if a folder is a copy; None if it is where it was made, or was moved.

    A move within a file system keeps the inode. A move to another one does not, but leaves nothing at the old path.

    Args:
        info: the contents of its run.json or sweep.json.
    """
    made = info.get("made_at")
    if not isinstance(made, dict) or made.get("path") == str(folder):
        return None
    original = Path(str(made.get("path")))
    try:
        here = os.stat(folder)
        # The number of a device differs between hosts, so only the inode tells that this is the original.
        if here.st_ino == made.get("inode"):
            return None
        return original if here.st_dev == made.get("device") or os.path.lexists(original) else None
    except OSError:  # the folder cannot be looked at, or the path is none
        return None
