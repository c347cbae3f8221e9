"""What the checks of an attempt have found, read from its preflight.json, which anybody may have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.system import records
from slurmtrain.system.records import printable


@dataclass(frozen=True)
class FoundFinding:
    """A finding as it is shown: its kind, one sentence, what to do, and whether it has ended the attempt."""

    kind: str
    sentence: str
    advice: str
    fatal: bool
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreflightRecord:
    """The checks of an attempt.

    Attributes:
        seconds: of the quick checks, on rank 0.
        nodes: for each node, what `runtime.preflight.check.record_of` writes.
        measured: rates, as `runtime.preflight.measure.Rates.summary` writes them; None: nothing was measured.
        values: all of it, for `--json`.
    """

    mode: str
    seconds: float
    ranks: int
    findings: tuple[FoundFinding, ...]
    nodes: tuple[dict[str, Any], ...]
    measured: dict[str, Any] | None
    values: dict[str, Any]

    @property
    def fatal(self) -> bool:
        """Whether training must not begin."""
        return any(each.fatal for each in self.findings)


def read_preflight(attempt_dir: AttemptDir) -> PreflightRecord | None:
    """Return what the checks of an attempt have found; None: they have not come to an end.

    Raises:
        UnreadableRecordError: the record is no regular file, or too large.
    """
    try:
        values = records.parse(records.read_bytes(attempt_dir.preflight_file, at_most=records.EVENTS_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(values, dict):
        return None
    found, nodes = values.get("findings"), values.get("nodes")
    measured = values.get("measured")
    return PreflightRecord(
        mode=printable(str(values.get("mode"))),
        seconds=records.finite(values.get("seconds")) or 0.0,
        ranks=values["ranks"] if records.is_count(values.get("ranks")) else 0,
        findings=tuple(_finding(each) for each in (found if isinstance(found, list) else ()) if isinstance(each, dict)),
        nodes=tuple(each for each in (nodes if isinstance(nodes, list) else ()) if isinstance(each, dict)),
        measured=measured if isinstance(measured, dict) else None,
        values=values,
    )


def _finding(values: dict[str, Any]) -> FoundFinding:
    def text(name: str) -> str:
        return printable(str(values.get(name, "")))[:2000]

    nodes = values.get("nodes")
    names = tuple(printable(str(each)) for each in nodes) if isinstance(nodes, list) else ()
    return FoundFinding(text("kind"), text("sentence"), text("advice"), values.get("fatal") is True, names)


def in_words(found: Sequence[FoundFinding]) -> str:
    """Say findings in one line: the first one, and how many more there are."""
    if not found:
        return ""
    more = f", and {len(found) - 1} more in preflight.json" if len(found) > 1 else ""
    return f"{found[0].kind}: {found[0].sentence}{more}"
