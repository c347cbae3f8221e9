"""What the checks of an attempt have found, read from its preflight.json, which anybody may have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.system import records
from slurmtrain.system.records import Count, Number, printable


@dataclass(frozen=True)
class FoundFinding:
    """A finding as it is shown: its kind, one sentence, what to do, and whether it has ended the attempt."""

    kind: str
    sentence: str
    advice: str = ""
    fatal: bool = False


@dataclass(frozen=True)
class Rates:
    """What was measured: GB/s of an all-reduce, TFLOP/s by rank, and (node, node, GB/s) of pairs of nodes."""

    all_reduce: Number | None = None
    tflops: dict[str, Number] = field(default_factory=dict)
    links: list[tuple[str, str, Number]] = field(default_factory=list)


@dataclass(frozen=True)
class PreflightRecord:
    """The checks of an attempt, as `runtime.preflight.check.record_of` writes them.

    Attributes:
        seconds: of the quick checks, on rank 0.
        nodes: for each node, what it is.
        measured: None: nothing was measured.
    """

    mode: str
    seconds: Number
    ranks: Count
    findings: list[FoundFinding]
    nodes: list[dict[str, Any]]
    measured: Rates | None = None

    @property
    def fatal(self) -> bool:
        """Whether training must not begin."""
        return any(each.fatal for each in self.findings)


def read_preflight(attempt_dir: AttemptDir) -> PreflightRecord | None:
    """Return what the checks of an attempt have found; None: they have not come to an end, or the record is none of ours.

    Raises:
        UnreadableRecordError: the record is no regular file, or too large.
    """
    try:
        values = records.parse(records.read_bytes(attempt_dir.preflight_file, at_most=records.EVENTS_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return records.typed_or_none(PreflightRecord, values)


def in_words(found: Sequence[FoundFinding]) -> str:
    """Say findings in one line: the first one, and how many more there are."""
    if not found:
        return ""
    more = f", and {len(found) - 1} more in preflight.json" if len(found) > 1 else ""
    return printable(f"{found[0].kind}: {found[0].sentence}{more}")
