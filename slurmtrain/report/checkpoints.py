"""The checkpoints of a run that a restore would take, described without reading their contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from slurmtrain.checkpoint.errors import CheckpointError, UnreadableError
from slurmtrain.checkpoint.format.blocks import find_damage, patiently, read_manifest
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.format.manifest import Manifest


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint.

    Attributes:
        step: optimiser steps done.
        path: its folder.
        size_bytes: size of all its files.
        world_size: number of ranks that have saved it.
        metrics: metrics that were saved with it, by name.
        created: unix time of the commit in seconds.
    """

    step: int
    path: Path
    size_bytes: int
    world_size: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: float = 0.0


def complete_checkpoints(directory: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints of a directory that are committed and have all files in full size, oldest first.

    Raises:
        UnreadableError: the storage fails, and after all retries still does.
    """
    found = []
    for path in patiently(partial(committed, directory), directory):
        manifest, damage = inspect(path)
        if manifest is not None and not damage:
            found.append(
                StoredCheckpoint(
                    manifest.step, path, manifest.size, manifest.world_size, manifest.metrics, manifest.created
                )
            )
    return found


def inspect(path: Path) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of a checkpoint, and one sentence for everything that is wrong, by sizes.

    A file that is missing is not waited for.

    Raises:
        UnreadableError: the storage fails, and after all retries still does.
    """
    try:
        manifest = read_manifest(path, late_s=0.0)
    except UnreadableError:
        raise
    except CheckpointError as error:
        return None, [error.message.removeprefix(f"{path} is damaged: ")]
    return manifest, find_damage(path, manifest.files, contents=False, late_s=0.0)
