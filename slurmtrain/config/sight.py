"""What this machine, the login node, can say of a path that a job will use on other machines.

A file that is missing in a folder that is there is missing. Where a folder high up is not there, or is one that each
machine has for itself, the nodes may have what this machine does not: only they can know.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

OF_EACH_NODE = tuple(map(Path, ("/", "/tmp", "/var/tmp", "/dev/shm")))  # each machine has its own
# Where file systems are mounted, other ones on the nodes.
BELOW_ROOT = tuple(map(Path, ("/mnt", "/media", "/srv", "/home")))
# What each machine has for itself, in all depths.
INSTALLED = tuple(map(Path, ("/opt", "/usr", "/etc", "/var", "/run", "/dev", "/proc", "/sys")))


class Sight(Enum):
    """What is known of a path."""

    THERE = auto()
    MISSING = auto()
    OF_NODES = auto()  # it was said that only the nodes see it
    UNKNOWN = auto()  # this machine does not see the place where it would be


@dataclass(frozen=True)
class Seen:
    """What was seen of a path.

    Attributes:
        sight: the verdict.
        place: the deepest folder of the path that is there.
        missing: the name in that folder that is not; None: all of the path is there.
    """

    sight: Sight
    place: Path
    missing: str | None = None


def look(path: Path, node_paths: Sequence[str] = ()) -> Seen:
    """Look at an absolute path, which may be a pattern with wildcards.

    Args:
        node_paths: folders that only the nodes see (cluster.node_paths).
    """
    if any(path.is_relative_to(os.path.normpath(os.path.expanduser(each))) for each in node_paths):
        return Seen(Sight.OF_NODES, path)
    fixed = _fixed_part(path)
    place = next(folder for folder in (fixed, *fixed.parents) if os.path.exists(folder))
    if place == fixed:
        there = fixed == path or next(glob.iglob(str(path), recursive=True), None) is not None
        return Seen(Sight.THERE, place) if there else Seen(Sight.MISSING, place, str(path.relative_to(fixed)))
    missing = fixed.relative_to(place).parts[0]
    target = Path(os.path.realpath(place / missing))
    # A link to where only the nodes may have something.
    if os.path.islink(place / missing) and not os.path.islink(target):
        return look(target, node_paths)
    return Seen(sight_of_gap(place, empty=_is_empty(place)), place, missing)


def sight_of_gap(place: Path, *, empty: bool) -> Sight:
    """Return what it means that a path ends in `place`, as far as this machine sees it.

    Args:
        place: the deepest folder of the path that is there.
        empty: nothing is in it.
    """
    if place in OF_EACH_NODE or place in BELOW_ROOT or any(place.is_relative_to(folder) for folder in INSTALLED):
        return Sight.UNKNOWN
    # The nodes may have a file system mounted on an empty folder.
    return Sight.UNKNOWN if empty and place.parent == Path("/") else Sight.MISSING


def _fixed_part(path: Path) -> Path:
    """Return the folder of a pattern up to its first wildcard; a path without one as it is."""
    if not glob.has_magic(str(path)) or os.path.lexists(path):
        return path
    return next(parent for parent in path.parents if not glob.has_magic(str(parent)))


def _is_empty(folder: Path) -> bool:
    try:
        return next(os.scandir(folder), None) is None
    except OSError:
        return False
