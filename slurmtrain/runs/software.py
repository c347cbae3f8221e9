"""What a run's attempts ran: the snapshot of the code, and the software around it.

code.json beside the folder `code` says what git knew of the code when it was copied, and has the digest of each file. By
these a reader can tell the files of the snapshot from those that the program has written beside them, and whether somebody
has changed one since. attempts/NNNN/environment.json is written by rank 0 for its own process and node.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.system import records
from slurmtrain.system.files import write_json
from slurmtrain.system.process_facts import gather_facts
from slurmtrain.system.records import read_json, typed, typed_or_none

log = logging.getLogger(__name__)

RECORD_BYTES = 64 << 20  # a snapshot of 100,000 small files has 15 MB


class CodeRecord(Struct, frozen=True):
    """What a snapshot is.

    Attributes:
        revision: git commit, or None outside of git.
        dirty: whether the work tree differed from that commit; None: git did not say, as where it took too long.
        branch, remote: git branch, and the URL of its remote `origin`; None where there is none.
        diff: difference of tracked files from the commit, as a patch; None: it was too long to be kept, or git took too long.
        untracked: files of the snapshot that git does not track.
        files: sha256 of each file, by its path in the snapshot.
        links: target of each link.
    """

    revision: str | None = None
    dirty: bool | None = False
    branch: str | None = None
    remote: str | None = None
    diff: str | None = ""
    untracked: tuple[str, ...] = ()
    files: Mapping[str, str] = {}
    links: Mapping[str, str] = {}

    @property
    def git(self) -> dict[str, Any]:
        """What run.json says of the code."""
        return {name: getattr(self, name) for name in ("revision", "dirty", "branch", "remote")}


def words_for_changes(dirty: object) -> str:
    """Return what is said after a revision of whether the code differs from it.

    Args:
        dirty: as in `CodeRecord`, out of a record that somebody else may have written.
    """
    if dirty is None:
        return " (whether with changes is not known)"
    return " with changes" if dirty else ""


def record_of(code: Path) -> Path:
    """Return the path of the record of a snapshot: code.json beside the folder code."""
    return code.with_name(f"{code.name}.json")


def write_code_record(code: Path, record: CodeRecord) -> None:
    """Write the record of a snapshot beside it."""
    write_json(record_of(code), msgspec.to_builtins(record))


def read_code_record(path: Path) -> CodeRecord | None:
    """Return the record of a snapshot; None if there is none.

    Raises:
        UnreadableRecordError: it cannot be used.
    """
    try:
        values: Any = records.parse(records.read_bytes(path, at_most=RECORD_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return typed(CodeRecord, values, path) if isinstance(values, dict) else None


def record_environment(attempt_dir: AttemptDir) -> threading.Thread:
    """Gather and write the facts of this process beside its other work, which nothing of it can stop."""

    def record() -> None:
        try:
            write_json(attempt_dir.environment_file, gather_facts().to_json(), durable=False)
        except Exception as error:  # it serves later readers only
            log.debug("what this attempt runs with is not recorded: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=record, name="slurmtrain-facts", daemon=True)
    thread.start()
    return thread


def read_environment(attempt_dir: AttemptDir) -> dict[str, dict[str, str]] | None:
    """Return what an attempt ran with, by group and name; None if it has no record of it.

    Raises:
        UnreadableRecordError: the record cannot be read.
    """
    return typed_or_none(dict[str, dict[str, str]], read_json(attempt_dir.environment_file))
