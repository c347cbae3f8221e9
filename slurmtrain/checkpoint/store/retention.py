"""The room that checkpoints take: which are kept, the removal of the others, and whether there is space for another.

Promise: the newest ones are kept, whatever else is configured; a checkpoint that is being read is kept meanwhile;
nobody ever sees a checkpoint half removed. A save of this run that is still being written is no leftover, however long
it takes.

Readers mark what they read. The markers are no locks (locks cannot be relied on over NFS and Lustre): a reader that
loses the race finds a file missing and reports it; it never reads half of one checkpoint and half of another.

The decisions are pure functions (`Keep`, `Kept`, `surplus`); those that look and remove are thin, and get the time as
an argument.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import FINAL_NAME, TEMPORARY_NAME, step_of
from slurmtrain.choices import BestMode
from slurmtrain.system.files import folder_mode, is_mine, refresh

SPARE_SPACE = 1.2
READERS = ".readers"
HOLDS = ".held"
# A reader on another host cannot be asked whether it lives. A checkpoint that a dead one holds back for a day costs only its
# space, and nobody reads for longer.
READER_S = 24 * 3600.0


@dataclass(frozen=True)
class Keep:
    """The rules for which committed checkpoints are kept: those that any of the rules wants.

    Attributes:
        last: number of the newest to keep, at least 2.
        every: keep those whose step is a multiple of this; 0: none for that reason.
        best: number of the best by `metric` to keep; 0: none for that reason.
        metric: name among the metrics that were saved with a checkpoint.
        mode: "min" or "max": which values of the metric are good.
    """

    last: int = 2
    every: int = 0
    best: int = 0
    metric: str = "valid_loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.last < 2 or self.every < 0 or self.best < 0 or self.mode not in tuple(BestMode):
            raise CheckpointError(
                f"checkpoints cannot be kept by {self}",
                hint="last: at least 2, since one must remain while the next is written; every, best: 0 (off) or more; "
                "mode: min (as for a loss) or max (as for an accuracy)",
            )


class Soundness(NamedTuple):
    """What a training knows of its numbers, which it learns steps later.

    Attributes:
        sound_step: the newest step that is known to be sound; None: not known.
        unchecked_step: the first step of which that is not known yet; None: nobody looks, or all are known.
    """

    sound_step: int | None = None
    unchecked_step: int | None = None


UNKNOWN_SOUNDNESS = Soundness()


@dataclass(frozen=True)
class Kept:
    """A committed checkpoint: its step, and the metrics that were saved with it; None: they cannot be read, so it stays."""

    step: int
    metrics: Mapping[str, float] | None


def surplus(
    checkpoints: Sequence[Kept],
    keep: Keep,
    *,
    in_use: Collection[int] = (),
    soundness: Soundness = UNKNOWN_SOUNDNESS,
) -> list[int]:
    """Return the steps that may be removed, oldest first: those that no rule of `keep` wants and nobody reads.

    The newest of at most `soundness.sound_step` stays: newer ones may be from after a trouble. Those of
    `soundness.unchecked_step` and of later steps stay, since any of them may turn out to be the newest sound one.

    Saves made because of a preemption or the time limit count like any other. Checkpoints of one step are kept or
    removed together. They are never all removed: `keep.last` is at least 2.
    """
    steps = sorted({checkpoint.step for checkpoint in checkpoints})
    unknown = [checkpoint.step for checkpoint in checkpoints if checkpoint.metrics is None]
    stay = {*steps[-keep.last :], *unknown, *in_use}
    if soundness.sound_step is not None:
        stay.update([step for step in steps if step <= soundness.sound_step][-1:])
    if soundness.unchecked_step is not None:
        stay.update(step for step in steps if step >= soundness.unchecked_step)
    if keep.every > 0:
        stay.update(step for step in steps if step % keep.every == 0)
    if keep.best > 0:
        stay.update(_best(checkpoints, keep))
    return [step for step in steps if step not in stay]


def _best(checkpoints: Sequence[Kept], keep: Keep) -> list[int]:
    """Return the steps of the best checkpoints by metric; the newer of equals.

    Without a metric, NaN and infinity are never the best.
    """
    sign = 1 if keep.mode == BestMode.MIN else -1
    losses: dict[int, float] = {}
    for checkpoint in checkpoints:
        value = (checkpoint.metrics or {}).get(keep.metric)
        if isinstance(value, int | float) and math.isfinite(value):  # JSON may hold null for what is not a number
            losses[checkpoint.step] = min(sign * value, losses.get(checkpoint.step, math.inf))
    return sorted(losses, key=lambda step: (losses[step], -step))[: keep.best]


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


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Mark the checkpoint `path` as being read, so that it is not removed meanwhile.

    The marker of a reader that was killed counts for READER_S seconds. If no marker can be made (a read-only directory,
    a path that is no checkpoint), it is read without one.
    """
    path = Path(os.path.realpath(path))
    marker = path.parent / READERS / f"{path.name}.{secrets.token_hex(8)}"
    # Nothing else is ever pruned; and nothing is written among somebody else's checkpoints.
    if FINAL_NAME.fullmatch(path.name) and is_mine(path.parent):
        with suppress(OSError):
            marker.parent.mkdir(mode=folder_mode(path.parent), exist_ok=True)
            marker.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            marker.unlink()


def hold(directory: Path, step: int, by: str) -> None:
    """Keep the checkpoint of `step`, now or once it exists, for a process that will read it later; until `release`.

    Args:
        by: name of that process, as a part of a file's name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / HOLDS).mkdir(mode=folder_mode(directory), exist_ok=True)
    (directory / HOLDS / f"{step}.{by}").touch()


def release(directory: Path, step: int, by: str) -> None:
    """End what `hold` has begun."""
    (directory / HOLDS / f"{step}.{by}").unlink(missing_ok=True)


def held(directory: Path) -> list[tuple[int, str]]:
    """Return the steps that are kept by `hold`, and for which process, in order."""
    try:
        names = [path.name for path in (directory / HOLDS).iterdir()]
    except OSError:  # no checkpoint has been held yet
        return []
    return sorted((int(step), by) for step, _, by in (name.partition(".") for name in names) if step.isdigit())


def in_use(directory: Path, now: float) -> set[str]:
    """Return the names of the checkpoints in `directory` that are being read.

    Markers that dead readers left are removed.

    Args:
        now: unix time.
    """
    names: set[str] = set()
    with suppress(OSError):  # read-only: then as far as can be seen from here
        refresh(directory / READERS)
    for marker in (directory / READERS).glob("checkpoint_*.*"):
        with suppress(OSError):  # its reader has just finished
            if now - marker.stat().st_mtime < READER_S:  # below zero when the clock was set back: young
                names.add(marker.stem)
            else:
                marker.unlink()
    return names


def leftovers(directory: Path, *, now: float, older_than_s: float = 3600.0) -> list[Path]:
    """Return what saves and removals that were killed have left in `directory`, sorted by name.

    A save of another incarnation that still goes on writes to its files, and so is young. Anything with a time in the
    future counts as young, too (a clock was set back): an hour of wasted space is better than a lost save.

    Args:
        now: unix time.
        older_than_s: seconds for which nothing in a leftover has changed.
    """
    found = []
    for path in directory.glob("checkpoint_*"):
        if TEMPORARY_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # it vanishes just now, or cannot be listed
                newest = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
                if now - newest > older_than_s:
                    found.append(path)
    return sorted(found)


def unwanted(
    directory: Path,
    found: Sequence[Path],
    keep: Keep,
    spare: Collection[int] = (),
    soundness: Soundness = UNKNOWN_SOUNDNESS,
) -> list[Path]:
    """Return those of the committed checkpoints `found` that `keep` does not want, and nobody reads or holds.

    A link stays: its maker may remove it.

    Args:
        spare: steps that stay in any case: the one just saved, which after a step back is not the highest.
    """
    read = in_use(directory, time.time())
    kept = [Kept(step_of(path), _metrics(path) if keep.best else {}) for path in found]
    wanted = {*spare, *(step for step, _ in held(directory)), *(step_of(path) for path in found if path.name in read)}
    steps = set(surplus(kept, keep, in_use=wanted, soundness=soundness))
    return [path for path in found if step_of(path) in steps and not path.is_symlink()]


def _metrics(path: Path) -> Mapping[str, float] | None:
    """None: not known, of a manifest that cannot be read or is damaged. It may be the best."""
    try:
        return read_manifest(path).metrics
    except (CheckpointError, OSError):
        return None
