"""The manifest of a checkpoint: what it holds and belongs to, and how it is read and checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import FileRecord
from slurmtrain.checkpoint.format.boxes import DTYPE_BYTES, TensorFacts
from slurmtrain.checkpoint.format.directory import COMPLETE, FINAL_NAME, MANIFEST, file_name, step_of
from slurmtrain.system.files import write_synced
from slurmtrain.system.patience import LATE_S

FORMAT = 4

Natural = Annotated[int, msgspec.Meta(ge=0)]

MANIFEST_BYTES = 1 << 30  # more than that of a million tensors
# Of a tensor, not counting extents of 0: torch counts the bytes of an empty one's strides in 64 bits, too.
MOST_ELEMENTS = 1 << 59


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint: its contents, and what it belongs to.

    Attributes:
        format: version of the format.
        run_id: the run that has saved it; empty without one.
        step: optimiser steps done.
        incarnation, incarnation_label: the incarnation of the run that has saved it; see `store.commit`.
        world_size: number of ranks that have saved it.
        torch_version: of those ranks.
        files: record of the file of every rank.
        headers: SHA-256, in hex, of the header of every file, with its length in front.
        tensors: global shape and dtype of all tensors by name; what a rank has for itself has its number there (`own_name`).
        state: everything that is not a tensor and the same on all ranks.
        config: config values of the run, so that later changes can be found.
        metrics: metrics of this step, as they were passed to `save`.
        created: unix time of the commit in seconds; for people, nothing is decided by it.
    """

    format: int
    run_id: str
    step: Natural
    incarnation: Natural
    incarnation_label: str
    world_size: Natural
    torch_version: str
    files: Mapping[str, FileRecord]
    headers: Mapping[str, str]
    tensors: Mapping[str, TensorFacts]
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


def read_manifest(path: Path, *, late_s: float = LATE_S) -> Manifest:
    """Read and check manifest.json against COMPLETE.

    Args:
        late_s: seconds to wait for a file that is missing.

    Raises:
        CheckpointError: manifest.json is missing, damaged, or of another format. UnreadableError: see `blocks.patiently`.
    """
    return parse_manifest(path, *read_manifest_bytes(path, late_s=late_s))


def read_manifest_bytes(path: Path, *, late_s: float = LATE_S) -> tuple[bytes, str]:
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


def write_manifest(path: Path, text: bytes) -> None:
    """Write manifest.json into a folder, and after it COMPLETE, which says that all that is named there is there.

    Each is on the disk when the next is written.
    """
    write_synced(path / MANIFEST, text)
    write_synced(path / COMPLETE, hashlib.sha256(text).hexdigest().encode() + b"\n")


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
        manifest = msgspec.convert(values, Manifest)
        size = manifest.size
        for name, facts in manifest.tensors.items():
            if facts.dtype not in DTYPE_BYTES:
                raise ValueError(f"{name[:100]} has the unknown dtype {facts.dtype[:100]!r}")
            if facts.nbytes > size or math.prod(filter(None, facts.shape)) >= MOST_ELEMENTS:
                raise ValueError(f"{name[:100]} is larger than the checkpoint")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: manifest.json cannot be read: {error}") from None
    ranks = {file_name(rank) for rank in range(len(manifest.files))}
    if len(ranks) != manifest.world_size or manifest.files.keys() != ranks:
        others = sorted(manifest.files.keys() - ranks)[:1]
        raise CheckpointError(
            f"{path}: manifest.json has other files than one for each of its {manifest.world_size} ranks"
            + "".join(f": {name[:100]!r}" for name in others)
        )
    if FINAL_NAME.fullmatch(path.name) and manifest.step != step_of(path):
        raise CheckpointError(f"{path}: manifest.json is of step {manifest.step}, so it belongs to another checkpoint")
    return manifest
