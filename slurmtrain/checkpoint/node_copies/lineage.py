"""The lineage of the copies on the nodes: which of them the newest state of the run has, and which are from before a step back.

A node keeps its copies when ranks are killed, and nobody can ask a node that is away to forget them. So the run directory
says which copies count. Each attempt that restores or begins afresh writes a new token there, before its first step, and
its copies have that token. The copies of earlier attempts do not count any more, except the one that the attempt has
restored: it is the newest until this attempt has a copy of its own. An attempt that goes on from anything else, for
instance from an older checkpoint on purpose, thereby makes all copies void.

A copy also knows which checkpoint of the run directory was the newest when it was made. If that one is not the newest any
more, the run has gone on, or somebody has taken it away in order to go back: the copy does not count either.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.store.fencing import Incarnation, check_fence
from slurmtrain.system.files import fsync_directory, read_json, write_json

LINEAGE = ".node-copies.json"  # in the directory of the checkpoints


@dataclass(frozen=True)
class Lineage:
    """The copies that count.

    Attributes:
        token: of the copies that the newest attempt makes.
        base: digest (that in COMPLETE) of the copy that it has restored; None: it went on from something else.
    """

    token: str
    base: str | None = None


@dataclass(frozen=True)
class Mark:
    """What a copy says of itself beside its manifest.

    Attributes:
        token: that of the attempt that has made it.
        durable: name of the newest checkpoint in the run directory at that time; None: there was none.
    """

    token: str
    durable: str | None

    def to_bytes(self) -> bytes:
        """Return it as it is written beside the manifest."""
        return json.dumps({"token": self.token, "durable": self.durable}).encode() + b"\n"


def counts(mark: Mark, digest: str, lineage: Lineage, newest: str | None) -> bool:
    """Return whether a copy may be restored.

    Args:
        digest: that in its COMPLETE.
        newest: name of the newest checkpoint in the run directory; None: there is none.
    """
    of_this_lineage = mark.token == lineage.token or digest == lineage.base
    return of_this_lineage and mark.durable == newest


def newest_durable(directory: Path) -> str | None:
    """Return the name of the newest committed checkpoint in the run directory; None if there is none."""
    found = committed(directory)
    return found[-1].name if found else None


def read_lineage(directory: Path) -> Lineage | None:
    """Return which copies count; None: none do."""
    values = read_json(directory / LINEAGE) or {}
    token, base = values.get("token"), values.get("base")
    if not isinstance(token, str) or not (base is None or isinstance(base, str)):
        return None
    return Lineage(token, base)


def begin_lineage(directory: Path, incarnation: Incarnation, base: str | None) -> Lineage:
    """Make all copies void except `base`, before the first step of an attempt. Called by rank 0.

    Raises:
        SupersededError: a newer incarnation has claimed the directory.
    """
    check_fence(directory, incarnation)
    lineage = Lineage(secrets.token_hex(8), base)
    write_json(directory / LINEAGE, {"base": lineage.base, "token": lineage.token})
    fsync_directory(directory)
    return lineage
