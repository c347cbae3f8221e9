"""How what another trainer has saved gets its final name: complete, on the disk, and in one rename.

For files and folders of a trainer's own format, of which nothing but the trainer knows what belongs to them.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.runtime.api import session
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.system.files import fsync_directory

TEMPORARY = ".tmp-"  # in the names of what is being written


def save_together(
    distributed: DistributedContext, final: Path, write: Callable[[Path], object], *, pattern: str, keep: int
) -> None:
    """Save a file or folder under a hidden name, and give it the name `final` when all of it is on the disk.

    All ranks call it together. One of that name that is there already is from an earlier attempt, and complete: it stays.

    Args:
        write: writes this rank's part to a path.
        pattern: of the names of all such files or folders beside it, of which the `keep` last by name stay.
    """
    attempt = session.context.number if session.context is not None else 0
    temporary, first = final.with_name(f".{final.name}{TEMPORARY}{attempt}"), distributed.environment.rank == 0
    if first:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
    distributed.leave_together()  # the folder is there, and empty
    write(temporary)
    distributed.leave_together()  # all have written
    if distributed.environment.local_rank == 0:  # the memory of a node may hold back what was written there
        for path in _files(temporary):
            with suppress(FileNotFoundError):  # of another node, and not to be seen here yet
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
    distributed.leave_together()  # all is on the disk
    if first:
        if final.exists():
            _remove(temporary)
        else:
            temporary.rename(final)
            fsync_directory(final.parent)
        for path in final.parent.glob(f".{pattern}{TEMPORARY}*"):
            number = path.name.rpartition("-")[2]
            if not number.isdigit() or int(number) <= attempt:  # a later attempt may be writing already
                _remove(path)
        for path in sorted(final.parent.glob(pattern))[:-keep]:
            _remove(path)
    distributed.leave_together()  # nobody leaves before the commit


def _remove(path: Path) -> None:
    """Remove a file or a folder, which may be gone already. A folder loses its name first."""
    if path.is_dir() and not path.is_symlink():
        gone = path if TEMPORARY in path.name else path.with_name(f".{path.name}{TEMPORARY}removed")
        if gone != path:
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _files(path: Path) -> list[Path]:
    """Return a file, or the files and folders of a folder, from the bottom up."""
    if not path.is_dir():
        return [path]
    return [
        Path(root, name) for root, folders, names in os.walk(path, topdown=False) for name in [*names, *folders]
    ] + [path]


def gather_states(distributed: DistributedContext, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state of every rank, in the order of ranks. All ranks call it together.

    Args:
        own: this rank's: tensors, numbers, texts, and lists, tuples and dicts of them. What comes from other ranks is read
            without running code.
    """
    written = io.BytesIO()
    torch.save(own, written)
    everyones = RankGroup(distributed.control_group).gather(lambda: base64.b64encode(written.getvalue()).decode())
    return [torch.load(io.BytesIO(base64.b64decode(state)), weights_only=True) for state in everyones]
