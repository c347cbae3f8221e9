"""checkpoints RUN verify: compare every file of a checkpoint with its digest."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.directory import damaged
from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.checkpoint.store import retention
from slurmtrain.cli.checkpoints.progress_bar import progress_bar
from slurmtrain.cli.checkpoints.target import CheckpointTarget, of_step, step_of
from slurmtrain.cli.columns import format_size
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import CheckpointError, UnreadableError
from slurmtrain.system.records import printable


def verify_checkpoints(target: CheckpointTarget, options: argparse.Namespace) -> int:
    """Compare every file with its digest. The exit code is 1 if anything is damaged."""
    aside = damaged(target.directory) if target.chosen is None and options.step is None else []
    paths = of_step(target, options.step) if not aside else target.committed()
    found: list[dict[str, Any]] = []
    for path in paths:
        began = time.monotonic()
        try:
            with retention.reading(path):
                size, files, damage = compare_with_digests(path)
        except UnreadableError as error:  # nothing is known about this one; the others may lie elsewhere
            found.append(
                {"step": step_of(path), "path": str(path), "sound": None, "damage": [], "unread": error.message}
            )
            if not options.json:
                print(printable(f"{path.name}: NOT READ: {error.message}: that says nothing about the checkpoint"))
            continue
        seconds = time.monotonic() - began
        found.append({"step": step_of(path), "path": str(path), "sound": not damage, "damage": damage})
        if options.json:
            continue
        if damage:
            print(printable(f"{path.name}: DAMAGED: {'; '.join(damage)}"))
        else:
            print(
                f"{path.name}: sound ({files} files, {format_size(size)}, {size / 1e6 / max(seconds, 1e-6):.0f} MB/s)"
            )
    if options.json:
        print_json(found)
    else:
        for name in aside:
            print(f"{name}: set aside as damaged by a restore; nothing reads it, `prune --damaged` removes it")
    return 0 if all(each["sound"] for each in found) else 1


def compare_with_digests(path: Path) -> tuple[int, int, list[str]]:
    """Return bytes and number of files, and everything that is wrong with their contents.

    Raises:
        UnreadableError: the storage fails, and after all retries still does.
    """
    try:
        manifest = read_manifest(path)
    except UnreadableError:
        raise
    except CheckpointError as error:
        return 0, 0, [error.message.removeprefix(f"{path}: ")]
    files = sorted(manifest.files.items())
    with progress_bar(path.name, manifest.size) as progress:
        damage = blocks.find_damage(path, files, mapped=True, progress=progress)
    if not damage:
        from slurmtrain.checkpoint.format.index_file import find_disagreement  # numpy, which other actions do not need

        damage = find_disagreement(path, manifest)
    return manifest.size, len(manifest.files), damage
