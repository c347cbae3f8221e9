"""The checkpoints that a person means by RUN: those of a run, those in a directory, or a single one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.directory import COMPLETE, FINAL_NAME, MANIFEST, committed
from slurmtrain.checkpoint.store.fencing import CLAIMS
from slurmtrain.errors import UsageError
from slurmtrain.runs import lookup
from slurmtrain.runs.run_dir import RunDir


@dataclass(frozen=True)
class CheckpointTarget:
    """The checkpoints that a command is about.

    Attributes:
        directory: directory of the checkpoints.
        name: name of the directory for a person.
        run: the run that it belongs to, if any.
        chosen: the one checkpoint that was named, if any.
    """

    directory: Path
    name: str
    run: RunDir | None = None
    chosen: Path | None = None

    def committed(self) -> list[Path]:
        if self.chosen is not None:
            return [self.chosen]
        return blocks.patiently(partial(committed, self.directory), self.directory)


def find_target(reference: str) -> CheckpointTarget:
    """Return the checkpoints that a person means by RUN.

    Raises:
        UsageError: it is neither a run nor a checkpoint.
    """
    path = Path(reference)
    try:
        is_dir = path.is_dir()
    except (OSError, ValueError) as error:  # too long, or with a null byte
        raise UsageError(f"{reference[:80]!r} is no path: {error}") from None
    if is_dir and not (path / "run.json").is_file():
        path = path.resolve()
        if RunDir(path).exists():
            return CheckpointTarget(RunDir(path).checkpoints, f"run {path.name}", run=RunDir(path))
        if (path / MANIFEST).is_file() or (path / COMPLETE).is_file() or has_final_name(path):
            return CheckpointTarget(path.parent, str(path), chosen=path)
        if (path / CLAIMS).is_dir() or any(has_final_name(entry) for entry in path.iterdir()):
            return CheckpointTarget(path, str(path))
        if os.sep in reference or reference in (".", ".."):
            raise UsageError(
                f"{path} is neither a run nor a directory of checkpoints",
                hint="checkpoints are folders called checkpoint_<step>",
            )
    run = lookup.find(reference, lookup.runs_root())
    return CheckpointTarget(run.checkpoints, f"run {run.id}", run=run)


def of_step(target: CheckpointTarget, step: int | None) -> list[Path]:
    """Return the committed checkpoints of a step, or all.

    Raises:
        UsageError: there is none.
    """
    found = target.committed()
    chosen = [path for path in found if step is None or (has_final_name(path) and step_of(path) == step)]
    if not chosen:
        steps = ", ".join(str(step_of(path)) for path in found[-5:])
        status = f"status {target.run.id}" if target.run else None
        if step is None or not found:
            raise UsageError(f"{target.name} has no checkpoint yet", hint=status)
        raise UsageError(f"{target.name} has no checkpoint of step {step}", hint=f"there are: {steps}")
    return chosen


def has_final_name(path: Path) -> bool:
    """Return whether a folder has the name of a committed checkpoint."""
    return FINAL_NAME.match(path.name) is not None


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint; -1: its name has none."""
    match = FINAL_NAME.match(path.name)
    return int(match.group(1)) if match else -1
