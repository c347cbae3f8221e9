"""The commit protocol: a checkpoint is there completely, or not at all, and whoever reads it can tell.

Promise: a directory with a final name (`checkpoint_0001000`) and a COMPLETE file in it holds everything that all ranks
handed in, byte for byte as it was digested; nothing that dies at any moment can make one that does not.

How, and why each step:
 1. Everything is written in a fresh directory named after this incarnation (`checkpoint_0001000.tmp-7`), never over an
    existing checkpoint: a kill in the middle leaves the older ones as they were.
 2. Every file is flushed and fsynced, then digested: what is on the disk is what was meant.
 3. Rank 0 collects name, size and digest of all ranks' files: a file nobody handed in is not part of the checkpoint.
 4. It looks for a newer incarnation. Old ranks can live on after the job was restarted elsewhere; they must not commit.
 5. manifest.json (JSON: nothing is executed by reading it), then COMPLETE with the manifest's digest, each fsynced, then
    the directory: after a power loss names and contents are there together.
 6. The rename is the commit; the parent is fsynced. Where a store has no rename, COMPLETE alone would commit.

This module knows files and directories; what is in them is `state`'s and `checkpointer`'s business.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import CheckpointError

FORMAT = 1
FINAL_NAME = re.compile(r"checkpoint_(\d{7,})")
TEMPORARY_NAME = re.compile(r"checkpoint_\d{7,}\.(?:tmp|removed)-(\d+)")
CLAIMS = ".incarnations"
BLOCK = 1 << 20


@dataclass(frozen=True, order=True)
class Incarnation:
    """One life of a job. A requeued or resumed job is a new one with a higher `order`.

    Attributes:
        order: strictly increasing over the lives of one run.
        label: for people: job id and restart count.
    """

    order: int
    label: str = ""


@dataclass(frozen=True)
class FileRecord:
    """A file as it was handed in: size in bytes and SHA-256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds and what it belongs to.

    Attributes:
        step: optimiser steps done.
        files: record of every file but manifest.json and COMPLETE.
        tensors: global shape and dtype by key.
        state: everything that is not a tensor and the same on all ranks.
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


def checkpoint_name(step: int) -> str:
    return f"checkpoint_{step:07d}"


def step_of(path: Path) -> int:
    match = FINAL_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


def committed(directory: Path) -> list[Path]:
    """Committed checkpoints, oldest first. A name without COMPLETE is none."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if FINAL_NAME.fullmatch(path.name) and (path / "COMPLETE").is_file()]
    return sorted(found, key=step_of)


def claim(directory: Path, incarnation: Incarnation) -> None:
    """Announce this incarnation: from now on no older one commits into `directory`, and what those left is removed.

    Raises:
        CheckpointError: a newer incarnation has been here, so this one is the leftover.
    """
    claims = directory / CLAIMS
    claims.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_fence(directory, incarnation)
    (claims / f"{incarnation.order:08d}").write_text(incarnation.label)
    fsync_directory(claims)
    for path in directory.iterdir():
        match = TEMPORARY_NAME.fullmatch(path.name)
        if match and int(match.group(1)) < incarnation.order:
            shutil.rmtree(path, ignore_errors=True)


def check_fence(directory: Path, incarnation: Incarnation) -> None:
    """Raise when a newer incarnation has claimed `directory`."""
    newest = max((int(path.name) for path in (directory / CLAIMS).iterdir() if path.name.isdigit()), default=0)
    if newest > incarnation.order:
        raise CheckpointError(
            f"incarnation {incarnation.order} ({incarnation.label}) may not commit in {directory}: "
            f"incarnation {newest} of the same run has started",
            hint="this process is left over from before a restart and should be ended",
        )


def begin(directory: Path, step: int, incarnation: Incarnation) -> Path:
    """A fresh directory to write `step` into. Called by one rank; the others are told the path."""
    check_fence(directory, incarnation)
    path = directory / f"{checkpoint_name(step)}.tmp-{incarnation.order}"
    if path.exists():  # a save of this very incarnation that failed
        shutil.rmtree(path)
    path.mkdir(mode=0o700)
    return path


def digest(path: Path, *, sync: bool = True) -> FileRecord:
    """Size and SHA-256 of a file; with `sync`, after it has reached the disk."""
    checksum = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(BLOCK):
            checksum.update(block)
            size += len(block)
    return FileRecord(size, checksum.hexdigest())


def commit(temporary: Path, manifest: Manifest, incarnation: Incarnation) -> Path:
    """Steps 4 to 6 of the protocol. Called by rank 0 after every rank has handed in its files.

    Returns:
        The final path.

    Raises:
        CheckpointError: fenced off by a newer incarnation, or one of this step by it is there already.
    """
    directory = temporary.parent
    text = json.dumps({**asdict(manifest)}, indent=1)
    try:
        write_synced(temporary / "manifest.json", text)
        write_synced(temporary / "COMPLETE", hashlib.sha256(text.encode()).hexdigest() + "\n")
        fsync_directory(temporary)
    except FileNotFoundError:
        check_fence(directory, incarnation)  # a newer incarnation removes what older ones were writing
        raise
    final = directory / checkpoint_name(manifest.step)
    check_fence(directory, incarnation)
    if final.exists():
        # The same step, by an older incarnation that committed after this one had chosen what to resume from.
        superseded = directory / f"{final.name}.removed-{incarnation.order}"
        final.rename(superseded)
        temporary.rename(final)
        shutil.rmtree(superseded, ignore_errors=True)
    else:
        temporary.rename(final)
    fsync_directory(directory)
    return final


def read_manifest(path: Path) -> Manifest:
    """Read and check manifest.json against COMPLETE.

    Raises:
        CheckpointError: missing, damaged, or of another format.
    """
    try:
        text = (path / "manifest.json").read_bytes()
        expected = (path / "COMPLETE").read_text().strip()
        if hashlib.sha256(text).hexdigest() != expected:
            raise CheckpointError(f"{path}: manifest.json is damaged: its digest is not the one in COMPLETE")
        values = json.loads(text)
        if values.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {values.get('format')}, expected {FORMAT}")
        files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: manifest.json cannot be read: {error}") from None
    for name in files:
        if name in ("", "..") or Path(name).name != name:
            raise CheckpointError(f"{path}: manifest.json names {name!r}, which is not a plain file name")
    return Manifest(files=files, **values)


def find_damage(path: Path, manifest: Manifest, names: Iterable[str], *, verify: bool) -> list[str]:
    """What is wrong with the given files: one sentence each. With `verify`, contents are compared, else sizes only."""
    damage = []
    for name in names:
        expected = manifest.files[name]
        try:
            size = (path / name).stat().st_size
            if size != expected.size:
                damage.append(f"{name} has {size} bytes instead of {expected.size}")
            elif verify and digest(path / name, sync=False) != expected:
                damage.append(f"{name} is not what was written: its digest differs")
        except OSError as error:
            damage.append(f"{name} cannot be read: {error.strerror}")
    return damage


def set_aside(path: Path) -> Path:
    """Take a damaged checkpoint out of the readers' sight, but keep it for whoever wants to look at it."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(target)
    fsync_directory(path.parent)
    return target


def damaged(directory: Path) -> list[str]:
    """Names of the checkpoints that were set aside and are still there."""
    return sorted(path.name for path in directory.glob("checkpoint_*.damaged-*"))


def prune(directory: Path, *, keep_last: int, incarnation: Incarnation) -> None:
    """Remove all but the newest `keep_last` committed checkpoints: renamed first, so that none is seen half removed."""
    for path in committed(directory)[:-keep_last]:
        removed = path.with_name(f"{path.name}.removed-{incarnation.order}")
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
