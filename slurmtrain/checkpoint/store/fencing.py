"""Fencing: processes of an older incarnation must not commit.

An incarnation is one start of the run's job; each requeue or resumption is the next, with a higher number. Processes of an
older one may live on, on a node that was cut off. Fencing keeps them from doing harm: an incarnation claims the
directory by a file with its number in `.incarnations` (a fencing token), and older ones look there before they commit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.errors import CheckpointError, SupersededError
from slurmtrain.checkpoint.format.directory import TEMPORARY_NAME, remove
from slurmtrain.system.files import fsync_directory, write_new
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.patience import refresh

CLAIMS = ".incarnations"
VISIBILITY_S = 60.0  # attribute caches of NFS clients are at most a minute old (acdirmax)


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
        _check_not_superseded(directory, claimed)  # now that a newer one would see this claim
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
    _check_not_superseded(directory, incarnation)


def _check_not_superseded(directory: Path, incarnation: Incarnation) -> None:
    newest = newest_claim(directory)
    if newest > incarnation.order:
        raise SupersededError(
            f"incarnation {incarnation.order} ({incarnation.label}) may not commit in {directory}: "
            f"incarnation {newest} of the same run has started",
            hint="this process is left over from before a restart; kill it",
        )


def newest_claim(directory: Path) -> int:
    """Return the order of the newest incarnation that has claimed `directory`; 0: none has."""
    return max(_claims(directory), default=0)


def previous_claim(directory: Path, order: int) -> int:
    """Return the order of the newest incarnation before `order` that has claimed `directory`; 0: none has."""
    return max((claimed for claimed in _claims(directory) if claimed < order), default=0)


def _claims(directory: Path) -> list[int]:
    claims = directory / CLAIMS
    names = [path.name for path in claims.iterdir()] if claims.is_dir() else []
    return [int(name) for name in names if name.isdecimal() and name.isascii()]


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
