"""metrics.jsonl: one JSON object per line and step, the record of a run that outlives its attempts.

A run that died after its last checkpoint has logged steps that the resumed run does again. They are dropped when the
log is opened, so that the file of an interrupted run has the same steps, each once, as that of an uninterrupted one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from slurmtrain import records

Value = float | int | str | bool | None


class MetricsLog:
    """Appends records; each is in the file when `write` returns.

    Args:
        path: the file; its folder is made if need be.
        resume_step: the step of the checkpoint that this attempt continues from. Records of later steps, and a last
            line torn by a kill, are dropped. -1 starts from nothing.
        keep: of the others, those for which this is false are dropped, too.
    """

    def __init__(self, path: Path, resume_step: int, keep: Callable[[dict[str, Any]], bool] = lambda record: True):
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop(path, lambda record: record["step"] <= resume_step and keep(record))
        self._file = os.fdopen(records.open_to_append(path), "a", encoding="utf-8")

    def write(self, step: int, **values: Value) -> None:
        """Append one record. Floats are written so that reading them gives the same bits (NaN as `NaN`)."""
        # One write call for the whole line: a kill then leaves all of it, or at worst a torn last line.
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics file, in order; none when there is no file. Safe while the run goes on.

    Raises:
        UnreadableRecord: it is not a regular file, too large, or cannot be read.
    """
    try:
        lines = records.read_bytes(path, at_most=records.METRICS_BYTES).splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # One call for all lines takes half the time; a torn one among them makes it fail.
    found = records.parse(b"[%s]" % b",".join(lines))
    if not isinstance(found, list) or len(found) != len(lines) or not all(_is_record(record) for record in found):
        return [record for _, record in _whole(lines)]
    return found if not lines or lines[-1].endswith(b"\n") else found[:-1]


def _whole(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line in lines:
        record = records.parse(line)
        if line.endswith(b"\n") and _is_record(record):
            yield line, record


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and records.is_count(value.get("step"))


def _drop(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite the file with the wanted records only."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = b"".join(line for line, record in _whole(lines) if wanted(record))
    if path.stat().st_size == len(kept):
        return
    # By way of a second file, so that a kill in the middle loses nothing of what was recorded.
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
