"""The record of a snapshot: code.json beside the folder `code`.

It says what git knew of the code when it was copied, and has the digest of each file. By these a reader can tell the files
of the snapshot from those that the program has written beside them, and whether somebody has changed one since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.system import records
from slurmtrain.system.files import write_json
from slurmtrain.system.records import FLAG, NOTHING, TEXT, TEXTS, Kind

RECORD_BYTES = 64 << 20  # a snapshot of 100,000 small files has 15 MB
_TEXT_BY_NAME = Kind(
    "text by name",
    lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
)
_FIELDS = {
    "revision": TEXT | NOTHING,
    "dirty": FLAG | NOTHING,
    "branch": TEXT | NOTHING,
    "remote": TEXT | NOTHING,
    "diff": TEXT | NOTHING,
    "untracked": TEXTS,
    "files": _TEXT_BY_NAME,
    "links": _TEXT_BY_NAME,
}


@dataclass(frozen=True)
class CodeRecord:
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
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)

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
    write_json(record_of(code), {**asdict(record), "untracked": list(record.untracked)})


def read_code_record(path: Path) -> CodeRecord | None:
    """Return the record of a snapshot; None if there is none.

    Raises:
        UnreadableRecordError: it cannot be used.
    """
    try:
        values: Any = records.parse(records.read_bytes(path, at_most=RECORD_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(values, dict):
        return None
    records.check_fields(values, _FIELDS, path)
    known = {name: value for name, value in values.items() if name in _FIELDS}
    return CodeRecord(**{**known, "untracked": tuple(known.get("untracked", ()))})
