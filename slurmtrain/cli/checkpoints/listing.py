"""checkpoints RUN list: a row, or a JSON object, for everything that is there. Contents are not read: that is `verify`."""

from __future__ import annotations

import argparse
import math
import time
from itertools import islice
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.directory import COMPLETE, TEMPORARY_NAME, checkpoint_name
from slurmtrain.cli.checkpoints.target import CheckpointTarget, has_final_name, of_step, step_of
from slurmtrain.cli.columns import format_size, print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import CheckpointError, UnreadableError
from slurmtrain.report.checkpoints import inspect
from slurmtrain.system.files import disk_usage
from slurmtrain.system.records import printable


def list_checkpoints(target: CheckpointTarget, options: argparse.Namespace) -> int:
    """Print a row for everything that is there, by step. Sizes are compared, contents are not: that is `verify`."""
    now = time.time()
    paths = [target.chosen] if target.chosen else [path for path in _entries(target.directory) if has_final_name(path)]
    if not paths:
        of_step(target, None)
    paths.sort(key=lambda path: (step_of(path), path.name))
    if options.json:
        print_json([_object(path) for path in paths])
        return 0
    rows = [_row(path, now) for path in paths]
    print_table(["step", "size", "age", "layout", "metrics", "torch", "written by", "state"], rows)
    return 0


def _entries(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from None


def _row(path: Path, now: float) -> list[str]:
    aside = ".damaged-" in path.name
    if not aside and TEMPORARY_NAME.fullmatch(path.name):
        leaves = ".removed-" in path.name
        state = f"{path.name}: {'being removed' if leaves else 'being written'}, or left by a process that was killed"
        return [str(step_of(path)), format_size(disk_usage(path)), _age(path, now), "", "", "", "", state]
    try:
        manifest, damage = inspect(path)
    except UnreadableError as error:
        return [str(step_of(path)), "", "", "", "", "", "", printable(f"{path.name} was not read: {error.message}")]
    state = damage[0] if damage else "complete"
    if aside:
        state = f"{path.name}: set aside as damaged" + (f" ({damage[0]})" if damage else "")
    elif not (path / COMPLETE).is_file():
        state = f"{path.name} was not committed: it has no {COMPLETE}"
    elif path.name != checkpoint_name(step_of(path)) and has_final_name(path):
        state += f" ({path.name})"  # a second one of this step
    if manifest is None:
        return [str(step_of(path)), format_size(disk_usage(path)), _age(path, now), "", "", "", "", printable(state)]
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size != 1 else ''}"
    cells = [
        str(manifest.step),
        format_size(manifest.size),
        _age(path, now),
        f"{ranks}, {len(manifest.tensors)} tensors",
        ", ".join(f"{name} {_number(value)}" for name, value in islice(manifest.metrics.items(), 3)),
        manifest.torch_version,
        manifest.incarnation_label,
        state,
    ]
    return [printable(str(cell)) for cell in cells]


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON of a checkpoint.

    `damage` is what is wrong by sizes, in words; `complete` is whether a restore would consider the checkpoint. Where the
    storage fails, `complete` is null and `unread` says why.
    """
    try:
        manifest, damage = inspect(path)
    except UnreadableError as error:
        return {"step": step_of(path), "path": str(path), "damage": [], "complete": None, "unread": error.message}
    facts: dict[str, Any] = {"step": step_of(path), "path": str(path), "bytes": disk_usage(path), "damage": damage}
    final = has_final_name(path) and ".damaged-" not in path.name and (path / COMPLETE).is_file()
    facts["complete"] = final and not damage
    if manifest is not None:
        facts |= {"world_size": manifest.world_size, "tensors": len(manifest.tensors), "metrics": manifest.metrics}
        facts |= {"torch": manifest.torch_version, "written_by": manifest.incarnation_label}
    return facts


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and math.isfinite(value) else str(value)


def _age(path: Path, now: float) -> str:
    """Format the time since the commit, or else since the folder changed, roughly."""
    try:
        marker = path / COMPLETE
        seconds = now - (marker if marker.exists() else path).stat().st_mtime
    except OSError:
        return "?"
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {word}"
    return f"{max(seconds, 0):.0f} s"
