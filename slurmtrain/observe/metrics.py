"""metrics.jsonl: one JSON object per line and step, the record of a run that outlives its attempts.

A run that died after its last checkpoint has logged steps that the resumed run does again. They are dropped when the
log is opened, so that the file of an interrupted run has the same steps, each once, as that of an uninterrupted one.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmtrain.system import records
from slurmtrain.system.files import fsync_directory, replace_file
from slurmtrain.system.patience import BestEffort

log = logging.getLogger(__name__)

# Names, or what they begin with, of metrics that describe the machine; besides those whose unit has seconds.
MEASURED = ("tokens_per_s", "tflops_per_gpu", "mfu", "communication_share", "memory_")
EVALUATION_KEYS = ("evaluation", "time")  # in a record of an evaluation job, besides the step and its metrics

Value = float | int | str | bool | None


class MetricsLog:
    """A metrics file to which records are appended; each is in the file when `write` returns, if the storage lets it.

    While the disk is full or fails, records are kept in memory, and are written before the next one that can be written:
    the file never lacks one between two others.

    Args:
        path: the file; its folder is made if need be.
        resume_step: the step of the checkpoint that this attempt continues from. Records of later steps, and a last
            line torn by a kill, are dropped. -1 starts from nothing.
        keep: called with each other record; those for which it returns false are dropped, too.

    Raises:
        OSError: the file cannot be opened or shortened.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int,
        keep: Callable[[dict[str, Any]], bool] = lambda record: True,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._descriptor: int | None = None
        self._unwritten: deque[bytes] = deque()
        self._begun = 0  # bytes of the first unwritten line that are in the file
        self._cuts: list[Callable[[], None]] = []  # to be made before anything is written
        self._storage = BestEffort(f"records for {path}", "are kept until they can be")
        self._cut(resume_step, keep)
        self._write_all()

    def write(self, step: int, **values: Value) -> None:
        """Append one record. Floats are written so that reading them gives the same bits (NaN as `NaN`)."""
        self._unwritten.append(json.dumps({"step": step, **values}).encode() + b"\n")
        self._storage.attempt(self._write_all)

    def rewind(
        self,
        step: int,
        keep: Callable[[dict[str, Any]], bool] = lambda record: True,
    ) -> None:
        """Go back to `step`, as a log that is opened with these arguments; when the storage lets it, and before `write`."""
        self._cut(step, keep)
        self._shut()
        wanted = [line for line, record in _whole(self._unwritten) if record["step"] <= step and keep(record)]
        self._unwritten, self._begun = deque(wanted), 0  # the cut drops what was begun of a line
        self._storage.attempt(self._write_all)

    def close(self) -> None:
        """Close the file. Records that still cannot be written are lost."""
        self._storage.attempt(self._write_all)
        self._shut()
        if self._unwritten:
            log.warning("%s lacks %d records, which could not be written", self._path, len(self._unwritten))

    def _cut(self, step: int, keep: Callable[[dict[str, Any]], bool]) -> None:
        self._cuts.append(lambda: _drop(self._path, lambda record: record["step"] <= step and keep(record)))

    def _write_all(self) -> None:
        """Make the cuts that are due, and write what is kept, in order.

        Raises:
            OSError: the rest is still to be done.
        """
        while self._cuts:
            self._cuts[0]()
            del self._cuts[0]
        if self._descriptor is None:
            self._descriptor = records.open_to_append(self._path)
        try:
            while self._unwritten:
                # One call for the whole line: a kill then leaves all of it, or at worst a torn last line.
                self._begun += os.write(self._descriptor, self._unwritten[0][self._begun :])
                if self._begun == len(self._unwritten[0]):
                    self._unwritten.popleft()
                    self._begun = 0
        except OSError:
            self._shut()  # a server that was started anew may not know the open file any more
            raise

    def _shut(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                os.close(descriptor)


def is_measured(name: str) -> bool:
    """Return whether a metric describes the machine, such as its speed, and is never the same twice."""
    return name.endswith("_s") or name.startswith(MEASURED)


def is_detail(name: str) -> bool:
    """Return whether a metric is one of many that explain another, as the part of a step's time."""
    return name.startswith("time_") or name == "mfu_attended"


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


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Return the metrics in a file of evaluation jobs, as `read_metrics` does, without which evaluation it was, and when.

    Raises:
        UnreadableRecordError: as of `read_metrics`.
    """
    return [
        {name: value for name, value in record.items() if name not in EVALUATION_KEYS} for record in read_metrics(path)
    ]


def _whole(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line in lines:
        record = records.parse(line)
        if line.endswith(b"\n") and _is_record(record):
            yield line, record


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and records.is_count(value.get("step"))


def _drop(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only the wanted records in the file, which is usually truncated in place."""
    if not path.exists():
        return
    whole = path.read_bytes()
    kept = b"".join(line for line, record in _whole(whole.splitlines(keepends=True)) if wanted(record))
    if not whole.startswith(kept):
        replace_file(path, kept)  # not in place, so that a kill in the middle loses no record
        fsync_directory(path.parent)
    elif len(kept) < len(whole):
        os.truncate(path, len(kept))
