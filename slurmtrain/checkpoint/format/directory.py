"""A directory of checkpoints: names in it, which of them are whole, and how one is removed or set aside.

Imports no torch and no numpy.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from slurmtrain.system.files import fsync_directory

MANIFEST, COMPLETE = "manifest.json", "COMPLETE"
OWN = "own/"  # begins the names of what each rank has for itself
OWN_STATE = "own/"  # the entry of a file with the JSON of it
FINAL_NAME = re.compile(r"checkpoint_(\d{7,})(?:\.(\d+))?")
TEMPORARY_NAME = re.compile(r"checkpoint_\d{7,}(?:\.\d+)?\.(?:tmp|removed)-(\d+)")


def checkpoint_name(step: int, revision: int = 1) -> str:
    """Return the final name of a checkpoint; a second one of the same step has revision 2."""
    return f"checkpoint_{step:07d}" + (f".{revision}" if revision > 1 else "")


def file_name(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"rank{rank:05d}.safetensors"


def own_name(rank: int, name: str) -> str:
    """Return the name in a checkpoint of what a rank has for itself under the name `name`."""
    return f"{OWN}{rank:05d}/{name}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = FINAL_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


def committed(directory: Path) -> list[Path]:
    """Return the committed checkpoints, oldest first, without directories that lack COMPLETE."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = FINAL_NAME.fullmatch(path.name)
        if match is not None and (path / COMPLETE).is_file():
            found.append((int(match[1]), int(match[2] or 1), path))
    return [path for _, _, path in sorted(found)]


def newest_committed_step(directory: Path) -> int | None:
    """Return the step of the newest committed checkpoint; None if there is none."""
    found = committed(directory)
    return step_of(found[-1]) if found else None


def remove(path: Path, order: int) -> None:
    """Remove a checkpoint or a leftover. It is renamed first, so that nobody sees it half removed.

    A leftover is renamed, too: if its writer is alive after all, the writer still commits either all of it or nothing.
    Files that cannot be deleted right now (still open over NFS) stay under the name of a leftover until leftovers are
    cleaned up.

    Args:
        path: a checkpoint or a leftover of one; may be gone already.
        order: order of the incarnation that removes it.

    Raises:
        OSError: it could not be renamed, and is as it was.
    """
    checkpoint = FINAL_NAME.match(path.name)
    assert checkpoint is not None, path
    removed = path.with_name(f"{checkpoint[0]}.removed-{order}")
    if path != removed:
        shutil.rmtree(removed, ignore_errors=True)  # an earlier removal of the same step that was cut short
        try:
            path.rename(removed)
        except FileNotFoundError:
            return
        fsync_directory(path.parent)  # otherwise, after a power loss, files may be missing under the old name
    shutil.rmtree(removed, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that no reader finds it, but keep it for people who want to look at it."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(target)
    fsync_directory(path.parent)
    return target


def damaged(directory: Path) -> list[str]:
    """Return the names of the checkpoints that were set aside and still exist."""
    return sorted(path.name for path in directory.glob("checkpoint_*.damaged-*"))


# What is in a checkpoint.
