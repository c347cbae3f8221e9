"""How far a run has come, by the files in its directory: its newest checkpoint, and the last records of its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.directory import newest_committed_step
from slurmtrain.runs.attempts import all_attempts
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records

TAIL_BYTES = 65536  # read from the end of a run's metrics


def furthest_reported(run_dir: RunDir) -> int | None:
    """Return the furthest step in the last part of metrics.jsonl, or in the record of an attempt; None if there is none.

    A program that is started from scratch reports its first steps once more: they are no progress.
    """
    steps = [record["step"] for record in records_with("step", tail(run_dir.metrics_file))]
    earlier = [attempt.reported_step for attempt in all_attempts(run_dir)]
    return max((step for step in [*steps, *earlier] if isinstance(step, int)), default=None)


def newest_checkpoint_step(run_dir: RunDir) -> int | None:
    """Return the step of the run's newest committed checkpoint; None if there is none."""
    return newest_committed_step(run_dir.checkpoints)


def last_logged_step(run_dir: RunDir) -> int | None:
    """Return the last step in metrics.jsonl: the progress of a crashed attempt, to within train.log_every."""
    for record in records_with("step", tail(run_dir.metrics_file)):
        if records.is_count(record["step"]):
            return int(record["step"])
    return None


def tail(path: Path) -> bytes:
    """Return the last part of a file that may be long. Its first line may be cut.

    Raises:
        UnreadableRecordError: it is not a regular file, or cannot be read.
    """
    return records.read_tail(path, TAIL_BYTES)


def records_with(name: str, log: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records that have a value of this name, newest first.

    Other lines are not parsed, nor are records not asked for.
    """
    found = len(log)
    while (found := log.rfind(f'"{name}":'.encode(), 0, found)) >= 0:
        begin, end = log.rfind(b"\n", 0, found) + 1, log.find(b"\n", found)
        # The first line may be cut, and the last not written to its end: both are left out.
        record = records.parse(log[begin : end if end >= 0 else None])
        if isinstance(record, dict) and name in record:
            yield record
