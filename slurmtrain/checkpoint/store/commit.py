"""The commit protocol: a checkpoint is there completely, or not at all, and every reader can tell.

Promise: a directory with a final name (`checkpoint_0001000`) and a COMPLETE file in it holds everything that all ranks
handed in, byte for byte as it was digested; no process that dies at any moment can leave one that does not.

The steps, and why each is needed:
 1. Everything is written in a fresh directory named after this incarnation (`checkpoint_0001000.tmp-7`), never over an
    existing checkpoint: a kill in the middle leaves the older ones as they were.
 2. Every file is digested from memory while it is written, and fsynced: the content of the disk can be compared with the
    content of memory. An error of any thread of any rank fails the save on all.
 3. Rank 0 collects name, size and digest of all ranks' files: a file that no rank handed in is not part of the checkpoint.
    That the pieces of all ranks are all of every tensor was checked when they agreed on them (`save.plan`); where they lie,
    the header of every file says.
 4. It looks for a newer incarnation (`fencing`). Old ranks can live on after the job was restarted elsewhere; they must
    not commit.
 5. manifest.json (JSON: nothing is executed by reading it), then COMPLETE with the manifest's digest, each fsynced, then
    the directory: after a power loss, names and contents are there together.
 6. The rename is the commit; the parent is fsynced. A directory that is not empty cannot be renamed over, so nothing that
    was committed is ever replaced: a second checkpoint of one step is `checkpoint_0001000.2`.

File systems: local disks, Lustre and NFS. No locks are taken. What another node has written may become visible late on
NFS (nfs(5), "Data and metadata coherence"): a directory is changed before it is listed, which makes the client ask the
server, and readers wait for files that rank 0 has named.

This module knows files and directories; their contents are the business of `headers`, `state` and `checkpointer`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import checkpoint_name
from slurmtrain.checkpoint.format.manifest import Manifest, write_manifest
from slurmtrain.checkpoint.store.fencing import Incarnation, check_fence
from slurmtrain.system.files import fsync_directory
from slurmtrain.system.modes import folder_mode

SPARE_SPACE = 1.2


def begin(directory: Path, step: int, incarnation: Incarnation, *, size: int = 0) -> Path:
    """Make a fresh directory to write `step` into. Called by one rank, which tells the others the path.

    Args:
        size: bytes of the whole checkpoint, as far as known.

    Raises:
        CheckpointError: a newer incarnation has claimed the directory, or the disk has less than 1.2 times that space.
    """
    check_fence(directory, incarnation)
    path = directory / f"{checkpoint_name(step)}.tmp-{incarnation.order}"
    if path.exists():  # a save of this very incarnation that failed
        shutil.rmtree(path)
    check_space(directory, size)
    path.mkdir(mode=folder_mode(directory))
    return path


@contextmanager
def removed_on_failure(temporary: Path, *, on_this_rank: bool) -> Iterator[None]:
    """Remove what was written if it is not committed, so that a full disk does not become fuller with every try.

    Args:
        on_this_rank: whether this rank is the one that removes it.
    """
    try:
        yield
    except CheckpointError:
        if on_this_rank:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_space(directory: Path, size: int) -> None:
    """Raise CheckpointError if the disk has no room for `size` bytes and a reserve.

    That is better than to fill the disk for everybody.
    """
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < SPARE_SPACE * size:
        raise CheckpointError(
            f"{directory} has {free / 1e6:.1f} MB left, and a checkpoint of {size / 1e6:.1f} MB wants "
            f"{SPARE_SPACE} times its size",
            hint="free some space; `checkpoints RUN prune` removes checkpoints that are no longer needed",
        )


def commit(temporary: Path, manifest: Manifest, incarnation: Incarnation) -> Path:
    """Do steps 4 to 6 of the protocol. Called by rank 0 after every rank has handed in its files.

    Raises and returns as `publish` does.
    """
    return publish(temporary, manifest_bytes(manifest), manifest.step, incarnation)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the contents of manifest.json."""
    return json.dumps(asdict(manifest), indent=1).encode()


def publish(temporary: Path, manifest: bytes, step: int, incarnation: Incarnation) -> Path:
    """Commit a directory with the given manifest.json: that of a save, or of a copy that was fetched from elsewhere.

    Returns:
        The final path.

    Raises:
        CheckpointError: a newer incarnation has claimed the directory.
    """
    directory = temporary.parent
    try:
        write_manifest(temporary, manifest)
        fsync_directory(temporary)
    except FileNotFoundError:
        check_fence(directory, incarnation)  # a newer incarnation removes what older ones were writing
        raise
    check_fence(directory, incarnation)
    revision = 1
    while True:
        # A checkpoint of this step may exist: by an older incarnation that committed after this one had chosen what to
        # resume from, or by this one. Renaming over it fails, whichever comes first.
        final = directory / checkpoint_name(step, revision)
        if not final.exists():
            try:
                temporary.rename(final)
                break
            except FileExistsError:
                pass
            except OSError:
                if not final.exists():
                    raise
        revision += 1
    fsync_directory(directory)
    return final
