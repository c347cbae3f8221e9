"""The commit protocol: a checkpoint is there completely, or not at all, and every reader can tell.

Promise: a directory with a final name (`checkpoint_0001000`) and a COMPLETE file in it holds everything that all ranks
handed in, byte for byte as it was digested; no process that dies at any moment can leave one that does not.

The steps, and why each is needed:
 1. Everything is written in a fresh directory named after this incarnation (`checkpoint_0001000.tmp-7`), never over an
    existing checkpoint: a kill in the middle leaves the older ones as they were.
 2. Every file is digested from memory while it is written, and fsynced: the content of the disk can be compared with the
    content of memory. An error of any thread of any rank fails the save on all.
 3. Rank 0 collects name, size and digest of all ranks' files: a file that no rank handed in is not part of the checkpoint.
    It checks that the pieces tile every tensor (`tensor_index`), and writes down where they lie.
 4. It looks for a newer incarnation. Old ranks can live on after the job was restarted elsewhere; they must not commit.
 5. manifest.json (JSON: nothing is executed by reading it), then COMPLETE with the manifest's digest, each fsynced, then
    the directory: after a power loss, names and contents are there together.
 6. The rename is the commit; the parent is fsynced. A directory that is not empty cannot be renamed over, so nothing that
    was committed is ever replaced: a second checkpoint of one step is `checkpoint_0001000.2`.

An incarnation is one start of the run's job; each requeue or resumption is the next, with a higher number. Processes of an
older one may live on, on a node that was cut off. Fencing keeps them from doing harm: an incarnation claims the
directory by a file with its number in `.incarnations` (a fencing token), and older ones look there before they commit.

File systems: local disks, Lustre and NFS. No locks are taken. What another node has written may become visible late on
NFS (nfs(5), "Data and metadata coherence"): a directory is changed before it is listed, which makes the client ask the
server, and readers wait for files that rank 0 has named.

This module knows files and directories; their contents are the business of `tensor_index`, `state` and `checkpointer`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint import blocks
from slurmtrain.checkpoint.blocks import FileRecord, refresh
from slurmtrain.errors import CheckpointError, CheckpointMismatchError, SupersededError
from slurmtrain.system.files import fsync_directory, write_new, write_synced
from slurmtrain.system.modes import folder_mode

FORMAT = 2
FINAL_NAME = re.compile(r"checkpoint_(\d{7,})(?:\.(\d+))?")
TEMPORARY_NAME = re.compile(r"checkpoint_\d{7,}(?:\.\d+)?\.(?:tmp|removed)-(\d+)")
CLAIMS = ".incarnations"
MANIFEST, COMPLETE, INDEX = "manifest.json", "COMPLETE", "index.bin"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
MANIFEST_BYTES = 1 << 30  # more than that of a million tensors
SPARE_SPACE = 1.2
# Attribute caches of NFS clients are at most a minute old (acdirmax).
VISIBILITY_S = 60.0


@dataclass(frozen=True, order=True)
class Incarnation:
    """One incarnation of a job: each requeue or resumption is a new one with a higher `order`.

    Attributes:
        order: strictly increasing over the incarnations of one run.
        label: job id and restart count, for people, and to distinguish incarnations of the same order.
    """

    order: int
    label: str = ""

    def to_json(self) -> list[Any]:
        """Return it as ranks tell it to each other."""
        return [self.order, self.label]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Incarnation:
        """Return the incarnation that another rank has told by `to_json`."""
        order, label = values
        return cls(int(order), str(label))


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint: its contents, and what it belongs to.

    Attributes:
        step: optimiser steps done.
        files: record of every file except manifest.json and COMPLETE.
        tensors: global shape and dtype by name.
        state: everything that is not a tensor and the same on all ranks.
        config: config values of the run, so that later changes can be found.
        metrics: metrics of this step, as they were passed to `save`.
        created: unix time of the commit in seconds; for people, nothing is decided by it.
    """

    format: int
    run_id: str
    step: int
    incarnation: int
    incarnation_label: str
    world_size: int
    torch_version: str
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, Mapping[str, Any]]
    state: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: float = 0.0

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of every file, by name."""
        return {name: record.size for name, record in self.files.items()}


def checkpoint_name(step: int, revision: int = 1) -> str:
    """Return the final name of a checkpoint; a second one of the same step has revision 2."""
    return f"checkpoint_{step:07d}" + (f".{revision}" if revision > 1 else "")


def _step_and_revision(path: Path) -> tuple[int, int]:
    match = FINAL_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1)), int(match.group(2) or 1)


def newer_without_complete(directory: Path) -> list[Path]:
    """Return the checkpoints newer than all committed ones whose COMPLETE is not visible.

    A checkpoint gets its final name with COMPLETE already in it, so the file may only be late. A caller that wants the
    newest one looks once more, after a change of its own to the folder (see `refresh`).
    """
    newest = max((_step_and_revision(path) for path in committed(directory)), default=(-1, 0))
    found = [path for path in directory.iterdir() if FINAL_NAME.fullmatch(path.name)] if directory.is_dir() else []
    return [path for path in found if _step_and_revision(path) > newest]


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return _step_and_revision(path)[0]


def committed(directory: Path) -> list[Path]:
    """Return the committed checkpoints, oldest first, without directories that lack COMPLETE."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if FINAL_NAME.fullmatch(path.name) and (path / COMPLETE).is_file()]
    return sorted(found, key=_step_and_revision)


def newest_committed_step(directory: Path) -> int | None:
    """Return the step of the newest committed checkpoint; None if there is none. It looks into no other checkpoint."""
    try:
        found = [Path(directory, name) for name in os.listdir(directory) if FINAL_NAME.fullmatch(name)]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # the same rule as in `committed`
            return None
        raise
    newest_first = sorted(found, key=_step_and_revision, reverse=True)
    return next((step_of(path) for path in newest_first if os.path.isfile(path / COMPLETE)), None)


# Fencing.


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
        claimed = incarnation or Incarnation(_newest_claim(claims) + 1, label)
        _check_not_superseded(directory, claimed)
        path = claim_file(directory, claimed)
        try:
            write_new(path, claimed.label.encode())
        except FileExistsError:
            if incarnation is None:
                continue
            holder = path.read_text()
            if holder != claimed.label:
                raise CheckpointError(
                    f"{directory} is in use by {holder or 'another process'}, which has the same number "
                    f"({claimed.order}) as this one, {claimed.label}",
                    hint="give each job a checkpoint directory of its own",
                ) from None
        fsync_directory(claims)
        _check_not_superseded(directory, claimed)  # a newer one may have come between
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
    _check_not_superseded(directory, incarnation)


def _check_not_superseded(directory: Path, incarnation: Incarnation) -> None:
    newest = _newest_claim(directory / CLAIMS)
    if newest > incarnation.order:
        raise SupersededError(
            f"incarnation {incarnation.order} ({incarnation.label}) may not commit in {directory}: "
            f"incarnation {newest} of the same run has started",
            hint="this process is left over from before a restart and should be ended",
        )


def _newest_claim(claims: Path) -> int:
    return max(
        (int(path.name) for path in claims.iterdir() if path.name.isdecimal() and path.name.isascii()), default=0
    )


def wait_until_visible(path: Path, timeout_s: float = VISIBILITY_S) -> None:
    """Wait for a file that another node has written, at most `timeout_s` seconds.

    There is no event to wait for: the client learns of the file when it asks again.
    """
    deadline, pause = time.monotonic() + timeout_s, 0.05
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
        if path.parent.is_dir():
            os.listdir(path.parent)


# Writing.


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
            hint="free some space; `checkpoints RUN prune` removes what is not needed any more",
        )


def commit(temporary: Path, manifest: Manifest, incarnation: Incarnation) -> Path:
    """Do steps 4 to 6 of the protocol. Called by rank 0 after every rank has handed in its files.

    Raises and returns as `publish` does.
    """
    return publish(temporary, json.dumps(asdict(manifest), indent=1).encode(), manifest.step, incarnation)


def publish(temporary: Path, manifest: bytes, step: int, incarnation: Incarnation) -> Path:
    """Commit a directory with the given manifest.json: that of a save, or of a copy that was fetched from elsewhere.

    Returns:
        The final path.

    Raises:
        CheckpointError: a newer incarnation has claimed the directory.
    """
    directory = temporary.parent
    try:
        write_synced(temporary / MANIFEST, manifest)
        write_synced(temporary / COMPLETE, hashlib.sha256(manifest).hexdigest().encode() + b"\n")
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


# Reading.


def read_manifest(path: Path, *, late_s: float = blocks.LATE_S) -> Manifest:
    """Read and check manifest.json against COMPLETE.

    Args:
        late_s: seconds to wait for a file that is missing.

    Raises:
        CheckpointError: manifest.json is missing, damaged, or of another format. UnreadableError: see `blocks.patiently`.
    """
    return parse_manifest(path, *read_manifest_bytes(path, late_s=late_s))


def read_manifest_bytes(path: Path, *, late_s: float = blocks.LATE_S) -> tuple[bytes, str]:
    """Return the bytes of manifest.json and the digest in COMPLETE, unchecked; see `read_manifest`."""

    def read(name: str) -> bytes:
        return blocks.patiently(partial(_read_small, path / name), path / name, late_s=late_s)

    try:
        return read(MANIFEST), read(COMPLETE).decode().removesuffix("\n")
    except OSError as error:
        raise CheckpointError(f"{path}: {blocks.cannot_be_read(MANIFEST, error)}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: manifest.json cannot be read: {error}") from None


def _read_small(path: Path) -> bytes:
    with os.fdopen(blocks.open_file(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > MANIFEST_BYTES:
            raise ValueError(f"{path.name} has {os.fstat(file.fileno()).st_size} bytes")
        return file.read(MANIFEST_BYTES)


def parse_manifest(path: Path, text: bytes, expected: str) -> Manifest:
    """Return the manifest in `text`, checked against the digest `expected`.

    Raises:
        CheckpointError: the manifest is damaged, or of another format.
    """
    if hashlib.sha256(text).hexdigest() != expected:
        raise CheckpointError(f"{path}: manifest.json is damaged: its digest is not the one in COMPLETE")
    try:
        values = json.loads(text)
        if values.get("format") != FORMAT:
            # Not damaged, and nothing to set aside: another version of this package wrote it.
            raise CheckpointMismatchError(
                f"{path} has format {values.get('format')}, expected {FORMAT}",
                hint="read it with the version of slurmtrain that wrote it",
            )
        files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
        manifest = Manifest(files=files, **values)
        _check_types(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: manifest.json cannot be read: {error}") from None
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{path}: manifest.json names {name[:100]!r}, which is not a plain file name")
    if FINAL_NAME.fullmatch(path.name) and manifest.step != step_of(path):
        raise CheckpointError(f"{path}: manifest.json is of step {manifest.step}, so it belongs to another checkpoint")
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise TypeError if a field has a wrong type.

    Digests show that the file is as it was written, not that this program wrote it.
    """
    for name, kind in {
        "run_id": str,
        "step": int,
        "incarnation": int,
        "incarnation_label": str,
        "world_size": int,
        "torch_version": str,
        "tensors": dict,
        "state": dict,
        "config": dict,
        "metrics": dict,
    }.items():
        value: Any = getattr(manifest, name)
        if type(value) is not kind or (type(value) is int and value < 0):
            raise TypeError(f"{name} is {str(value)[:50]!r}")
    for name, record in manifest.files.items():
        if type(record.size) is not int or record.size < 0 or type(record.sha256) is not str:
            raise TypeError(f"{name[:100]!r} has size {str(record.size)[:50]} and digest {str(record.sha256)[:50]}")


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
