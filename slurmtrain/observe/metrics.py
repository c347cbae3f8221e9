"""metrics.jsonl: one JSON object per line and step, the record of a run that outlives its attempts.

A run that died after its last checkpoint has logged steps that the resumed run does again. They are dropped when the
log is opened, so that the file of an interrupted run has the same steps, each once, as that of an uninterrupted one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slurmtrain.system import records
from slurmtrain.system.files import fsync_directory, replace_file

BLOCK_BYTES = 1 << 18
# Names, or what they begin with, of metrics that describe the machine; besides those whose unit has seconds.
MEASURED = ("tokens_per_s", "tflops_per_gpu", "mfu", "communication_share", "memory_", "slowest_rank")

Value = float | int | str | bool | None


class MetricsLog:
    """A metrics file to which records are appended; each is in the file when `write` returns.

    Args:
        path: the file; its folder is made if need be.
        resume_step: the step of the checkpoint that this attempt continues from. Records of later steps, and a last
            line torn by a kill, are dropped. -1 starts from nothing.
        keep: called with each other record; those for which it returns false are dropped, too.
        settled_step: all records up to this step are kept, and the part of the file that holds only them is not read.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int,
        keep: Callable[[dict[str, Any]], bool] = lambda record: True,
        settled_step: int | None = None,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        settled = resume_step if settled_step is None else min(settled_step, resume_step)
        _drop(path, lambda record: record["step"] <= resume_step and keep(record), settled)
        self._file = os.fdopen(records.open_to_append(path), "a", encoding="utf-8")

    def write(self, step: int, **values: Value) -> None:
        """Append one record. Floats are written so that reading them gives the same bits (NaN as `NaN`)."""
        # One write call for the whole line: a kill then leaves all of it, or at worst a torn last line.
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_measured(name: str) -> bool:
    """Return whether a metric describes the machine, such as its speed, and is never the same twice."""
    return name.endswith("_s") or name.startswith(MEASURED)


def is_detail(name: str) -> bool:
    """Return whether a metric is one of many that explain another: a part of a step's time, or the norm of one layer."""
    return name.startswith(("time_", "grad_norm/", "param_norm/", "slowest_rank")) or name == "mfu_attended"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all whole records of a metrics file, in order; none when there is no file. Safe while the run goes on.

    Raises:
        UnreadableRecordError: it is not a regular file, too large, or cannot be read.
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


def _drop(path: Path, wanted: Callable[[dict[str, Any]], bool], settled_step: int) -> None:
    """Keep only the wanted records in the file.

    Only the end of a long file is read, and it is usually truncated in place.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = _settled_bytes(file, size, settled_step)
        file.seek(begin)
        end = file.read()
        kept = b"".join(line for line, record in _whole(end.splitlines(keepends=True)) if wanted(record))
        if end.startswith(kept):
            if len(kept) < len(end):
                file.truncate(begin + len(kept))
            return
        file.seek(0)
        before = file.read(begin)
    replace_file(path, before + kept)  # not in place, so that a kill in the middle loses no record
    fsync_directory(path.parent)


def _settled_bytes(file: BinaryIO, size: int, settled_step: int) -> int:
    """Return the size of the first part of the file that need not be read.

    That part ends with a block of whole records, none of a later step.

    Steps grow along the file; a whole block is checked, since a rank that was cut off may have added some lines of its
    own.
    """
    end = size
    while end > BLOCK_BYTES:
        file.seek(end - BLOCK_BYTES)
        block = file.read(BLOCK_BYTES)
        first = block.find(b"\n") + 1
        lines = block[first:].splitlines(keepends=True)
        steps = [record["step"] for _, record in _whole(lines)]
        if steps and len(steps) == len(lines) and max(steps) <= settled_step:
            return end
        if not first:  # a line that is longer than a block
            return 0
        end = end - BLOCK_BYTES + first
    return 0
