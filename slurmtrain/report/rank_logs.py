"""The output of the ranks: which file holds it, and its text, as it comes or its last lines."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

from slurmtrain.errors import UsageError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records

LEAST_TAIL_BYTES, LINE_BYTES = 1 << 20, 1 << 12  # of a log's end: how much is read of it, and for each line more


def attempt_number(run_dir: RunDir, wanted: int | None) -> int:
    """Return the number of the attempt whose log is wanted; None wants the latest.

    Raises:
        UsageError: there is no such attempt, or none at all yet.
    """
    numbers = run_dir.attempt_numbers()
    if wanted is not None and wanted not in numbers:
        raise UsageError(
            f"run {run_dir.id} has no attempt {wanted}", hint=f"it has: {', '.join(map(str, numbers)) or 'none yet'}"
        )
    if not numbers:
        raise UsageError(
            f"run {run_dir.id} has not started yet, so there is no log",
            hint=f"status {run_dir.id}; logs -f waits for it",
        )
    return wanted or numbers[-1]


def log_file(run_dir: RunDir, rank: int, number: int) -> Path:
    """Return the log of a rank in an attempt, or that of its set-up if no rank has started.

    Raises:
        UsageError: there is none.
    """
    attempt_dir = run_dir.attempt(number)
    log = attempt_dir.rank_log(rank)
    if os.path.lexists(log):
        return log
    ranks = list(attempt_dir.rank_logs())
    for other in (attempt_dir.setup_failure_file, attempt_dir.srun_log):
        if not ranks and os.path.lexists(other):
            return other
    raise UsageError(
        f"attempt {number} of run {run_dir.id} has no log of rank {rank}",
        hint=f"it has ranks 0 to {ranks[-1]}" if ranks else f"no rank has started; see {run_dir.path}/slurm-*.log",
    )


def _marked(rank: int, text: str) -> str:
    """Put the rank in front of each line; a last line without an end gets one."""
    return "".join(f"[{rank}] {line}\n" for line in text.removesuffix("\n").split("\n"))


LONGEST_LINE = 1 << 20  # characters of a line that are held back until its end comes


class Tail:
    """The part of a log that has been added since the last look.

    Args:
        rank: number to mark each line with; then only whole lines are returned. None: text is returned as it comes.
    """

    def __init__(self, log: Path, rank: int | None):
        self._log, self._rank = log, rank
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two parts
        self._rest = ""

    def pieces(self) -> Iterator[str]:
        """Yield what has been added, in pieces of at most 1 MiB: a log may be larger than the memory.

        Raises:
            UnreadableRecordError: it is not a regular file, or cannot be read.
        """
        for piece in records.pieces(self._log, self._position):
            self._position += len(piece)
            added = self._decoder.decode(piece)
            if self._rank is None:
                yield added
                continue
            whole, end, self._rest = (self._rest + added).rpartition("\n")
            if not end and len(self._rest) > LONGEST_LINE:
                whole, end, self._rest = self._rest, "\n", ""
            if end:
                yield _marked(self._rank, whole)

    def rest(self) -> str:
        """Return a last line without an end, when no more will come."""
        if self._rank is None:
            return self._decoder.decode(b"", final=True)
        self._rest += self._decoder.decode(b"", final=True)
        return _marked(self._rank, self._rest) if self._rest else ""


def last_lines(log: Path, count: int) -> str:
    """Return the last lines of a log, without reading the rest of it: of very long lines, only what is at its end.

    Raises:
        UnreadableRecordError: it is not a regular file, or cannot be read.
    """
    data = records.read_tail(log, LEAST_TAIL_BYTES + count * LINE_BYTES)
    lines = data.decode(errors="replace").splitlines(keepends=True)
    return "".join(lines[len(lines) - min(count, len(lines)) :])
