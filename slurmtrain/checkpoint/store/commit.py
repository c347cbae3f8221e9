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
 4. It looks for a newer incarnation (`check_fence`). Old ranks can live on after the job was restarted elsewhere; they must
    not commit.
 5. manifest.json (JSON: nothing is executed by reading it), then COMPLETE with the manifest's digest, each fsynced, then
    the directory: after a power loss, names and contents are there together.
 6. The rename is the commit; the parent is fsynced. A directory that is not empty cannot be renamed over, so nothing that
    was committed is ever replaced: a second checkpoint of one step is `checkpoint_0001000.2`.

File systems: local disks, Lustre and NFS. No locks are taken. What another node has written may become visible late on
NFS (nfs(5), "Data and metadata coherence"): a directory is changed before it is listed, which makes the client ask the
server, and readers wait for files that rank 0 has named.

This module knows files and directories; their contents are the business of `format`, `state` and `checkpointer`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.checkpoint.errors import CheckpointError, SupersededError
from slurmtrain.checkpoint.format.directory import COMPLETE, MANIFEST, TEMPORARY_NAME, checkpoint_name, remove
from slurmtrain.checkpoint.store.retention import check_space
from slurmtrain.system.files import folder_mode, fsync_directory, refresh, write_new

CLAIMS = ".incarnations"
VISIBILITY_S = 60.0  # attribute caches of NFS clients are at most a minute old (acdirmax)


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


def commit(temporary: Path, manifest: bytes, step: int, incarnation: Incarnation) -> Path:
    """Do steps 4 to 6 of the protocol, on rank 0, with the given manifest.json.

    That is of a save, when every rank has handed in its file, or of a copy that was fetched from elsewhere.

    Returns:
        The final path.

    Raises:
        CheckpointError: a newer incarnation has claimed the directory.
    """
    directory = temporary.parent
    try:
        # COMPLETE says that all that is named in manifest.json is there. Each is on the disk when the next is written.
        write_new(temporary / MANIFEST, manifest)
        write_new(temporary / COMPLETE, hashlib.sha256(manifest).hexdigest().encode() + b"\n")
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


# Fencing. An incarnation is one start of the run's job; each requeue or resumption is the next, with a higher number. Processes
# of an older one may live on, on a node that was cut off. They do no harm, since an incarnation claims the directory by a file
# with its number in `.incarnations` (a fencing token), and older ones look there before they commit.


@dataclass(frozen=True, order=True)
class Incarnation:
    """One incarnation of a job: each requeue or resumption is a new one with a higher `order`.

    Attributes:
        order: strictly increasing over the incarnations of one run.
        label: job id and restart count, for people, and to distinguish incarnations of the same order.
    """

    order: int
    label: str = ""


def claim(directory: Path, incarnation: Incarnation | None, *, label: str = "") -> Incarnation:
    """Announce an incarnation: from now on no older one commits into `directory`, and what older ones left is removed.

    Args:
        incarnation: None: the next free one, with `label`, so that a second job in the same directory fences off the
            first.

    Raises:
        SupersededError: a newer incarnation has claimed the directory.
        CheckpointError: another process claims to be the same incarnation.
    """
    claims = directory / CLAIMS
    directory.mkdir(parents=True, exist_ok=True)
    claims.mkdir(mode=folder_mode(directory), exist_ok=True)
    with suppress(OSError):
        refresh(claims)
    while True:
        claimed = incarnation or Incarnation(newest_claim(directory) + 1, label)
        path, holder = claim_file(directory, claimed), claimed.label
        try:
            write_new(path, claimed.label.encode())
        except FileExistsError:
            if incarnation is None:
                continue
            holder = path.read_text()
        fsync_directory(claims)
        check_fence(directory, claimed)  # now that a newer one would see this claim
        if holder != claimed.label:
            raise CheckpointError(
                f"{directory} is in use by {holder or 'another process'}, which has the same number "
                f"({claimed.order}) as this one, {claimed.label}",
                hint="give each job its own checkpoint directory",
            )
        break
    for path in directory.iterdir():
        match = TEMPORARY_NAME.fullmatch(path.name)
        if match and int(match.group(1)) < claimed.order:
            remove(path, claimed.order)
    return claimed


def claim_file(directory: Path, incarnation: Incarnation) -> Path:
    """Return the file by which an incarnation claims `directory`."""
    return directory / CLAIMS / f"{incarnation.order:08d}"


def check_fence(directory: Path, incarnation: Incarnation) -> None:
    """Raise SupersededError if a newer incarnation has claimed `directory`."""
    refresh(directory / CLAIMS)
    newest = newest_claim(directory)
    if newest > incarnation.order:
        raise SupersededError(
            f"incarnation {incarnation.order} ({incarnation.label}) may not commit in {directory}: "
            f"incarnation {newest} of the same run has started",
            hint="this process is left over from before a restart; kill it",
        )


def newest_claim(directory: Path) -> int:
    """Return the order of the newest incarnation that has claimed `directory`; 0: none has."""
    claims = directory / CLAIMS
    names = [path.name for path in claims.iterdir()] if claims.is_dir() else []
    return max((int(name) for name in names if name.isdecimal() and name.isascii()), default=0)


def wait_until_visible(path: Path) -> None:
    """Wait for a file that another node has written, at most VISIBILITY_S seconds.

    There is no event to wait for: the client learns of the file when it asks again.
    """
    deadline, pause = time.monotonic() + VISIBILITY_S, 0.05
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
        if path.parent.is_dir():
            os.listdir(path.parent)
