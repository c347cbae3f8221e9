"""How what another trainer has saved gets its final name: complete, on the disk, and in one rename.

For files and folders of a trainer's own format, of which nothing but the trainer knows what belongs to them. All ranks
have written when `commit` is called; who reads sees complete ones only.
"""

from __future__ import annotations

import base64
import errno
import io
import os
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from slurmtrain.checkpoint.format import directory
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs.program_checkpoints import cut
from slurmtrain.runtime.api import session
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.system.files import fsync_directory, read_json, write_json

FILES = "files.json"  # the sizes of a folder's files
TEMPORARY = ".tmp-"  # in the names of what is being written
LOST = (errno.ENOENT, errno.EIO)  # what a disk says of a file that it has lost; other errors may pass


def temporary_name(final: Path) -> Path:
    """Return the hidden name under which this attempt writes `final`: the same on all ranks, another in each attempt."""
    return final.with_name(f".{final.name}{TEMPORARY}{_attempt()}")


def _attempt() -> int:
    return session.context.number if session.context is not None else 0


def flush(temporary: Path) -> None:
    """Wait until what this node has written of the file or folder `temporary` is on the disk.

    One rank of each node calls it: the memory of a node may hold back what was written there, for all the others know.
    """
    for path in _files(temporary):
        with suppress(FileNotFoundError):  # of another node, and not to be seen here yet
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def commit(temporary: Path, final: Path) -> None:
    """Give the file or folder `temporary`, which all nodes have flushed, its final name. One rank calls it.

    One of that name that is there already is from an earlier attempt, and complete: it stays.
    """
    if final.exists():
        remove(temporary)
        return
    temporary.rename(final)
    fsync_directory(final.parent)


def note_files(temporary: Path) -> None:
    """Write the sizes of all files of a folder, which all nodes have flushed, beside them. One rank calls it."""
    sizes = {str(path.relative_to(temporary)): _size(path) for path in _files(temporary) if path.is_file()}
    write_json(temporary / FILES, {"sizes": sizes})
    fsync_directory(temporary)


def damage_of(checkpoint: Path, *, thorough: bool = False) -> str | None:
    """Say what is missing or cut in a file or folder that was committed; None if nothing is found.

    Args:
        thorough: read all that torch.save has written, and compare it with its checksums.

    Raises:
        OSError: it cannot be read now, and may be whole.
    """
    try:
        noted = (read_json(checkpoint / FILES) or {}).get("sizes")
        for name, size in (noted if isinstance(noted, dict) else {}).items():
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if (found := _size(checkpoint / name)) != size:
                return f"{name} has {found} of {size} bytes"
        for path in _files(checkpoint):
            if not path.is_file():
                continue
            reason = cut(path) or (damage_of_zip(path) if thorough and zipfile.is_zipfile(path) else None)
            if reason:
                return reason if path == checkpoint else f"{path.relative_to(checkpoint)}: {reason}"
    except UnreadableRecordError as error:
        return str(error)
    except OSError as error:
        return _lost(error)
    return None


def _lost(error: OSError) -> str:
    """Return what an error says of a file that is lost; raise it again if the file may be whole."""
    if error.errno not in LOST:
        raise error
    return str(error)


def _size(path: Path) -> int:
    """Return the size of a file that another node may have written: NFS asks for it when the file is opened."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def damage_of_zip(path: Path) -> str | None:
    """Say what is wrong with a file of torch.save, all of which is read; None if nothing is.

    Raises:
        OSError: it cannot be read now, and may be whole.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError) as error:
        return str(error)
    except OSError as error:
        return _lost(error)
    return f"{bad} in it is damaged" if bad else None


def set_aside(path: Path) -> None:
    """Rename a damaged file or folder, so that neither `commit` nor `keep_newest` prefers it to a sound one.

    People who want to look at it find it under a hidden name. A disk that does not let it be renamed is no error.
    """
    with suppress(OSError):
        directory.set_aside(path, hidden=True)


def remove(path: Path) -> None:
    """Remove a file or a folder, which may be gone already. A folder loses its name first."""
    if path.is_dir() and not path.is_symlink():
        gone = path if TEMPORARY in path.name else path.with_name(f".{path.name}{TEMPORARY}removed")
        if gone != path:
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Remove all but the `count` last by name of those that match, and what earlier attempts were writing."""
    for path in folder.glob(f".{pattern}{TEMPORARY}*"):
        number = path.name.rpartition("-")[2]
        if not number.isdigit() or int(number) <= _attempt():  # a later attempt may be writing already
            remove(path)
    for path in sorted(folder.glob(pattern))[:-count]:
        remove(path)


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
