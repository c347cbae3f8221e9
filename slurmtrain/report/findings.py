"""What has happened to the numbers, the ranks and the checkpoints of a run, by its events; and what its checks have found."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.reasons import Event
from slurmtrain.system import records
from slurmtrain.system.records import Count, Number, printable

RANKS_NAMED = 8  # of one node, at most
_NUMBERS = (Event.UPDATE_SKIPPED, Event.ROLLED_BACK)
SLOW_SHOWN = 3  # findings of slow ranks that are told in a phrase


def trouble(events: Sequence[Mapping[str, Any]]) -> str:
    """Return a phrase such as "3 updates skipped (the last in step 12)"; an empty one if nothing happened."""
    found = {name: [each for each in events if each.get("event") == name] for name in _NUMBERS}
    skipped, backs = found.values()
    parts = []
    if skipped:
        total = skipped[-1].get("skipped")
        number = total if isinstance(total, int) and records.is_count(total) else len(skipped)
        parts.append(f"{_times(number, 'update')} skipped (the last in step {skipped[-1].get('step')})")
    if backs:
        last, many = backs[-1], "once" if len(backs) == 1 else f"{len(backs)} times"
        parts.append(f"went back {many} (the last time from step {last.get('from_step')} to {last.get('step')})")
    return ", ".join(parts)


@dataclass(frozen=True)
class SlowRanks:
    """Ranks of a node that a run has found slower than the others.

    Attributes:
        phase: the part of a step in which they are.
        ratio: how many times as long it takes the slowest of them; None: not known.
        share: by how much of a whole step it takes longer; None: not known.
        since, until: steps after which this was found, and was over; None: it was not.
    """

    node: str
    ranks: tuple[int, ...]
    phase: str
    ratio: float | None
    share: float | None
    since: int
    until: int | None = None
    attempt: int | None = None

    def __str__(self) -> str:
        """Say it: "rank 3 on n2 (1.6 times as long for forward_backward, in attempt 1 from step 120 to 360)"."""
        many = ", ".join(map(str, self.ranks[:RANKS_NAMED])) + (", ..." if len(self.ranks) > RANKS_NAMED else "")
        times = "much longer" if self.ratio is None else f"{self.ratio:.2g} times as long"
        when = f"since step {self.since}" if self.until is None else f"from step {self.since} to {self.until}"
        where = "" if self.attempt is None else f"in attempt {self.attempt} "
        return (
            f"rank{'s' if len(self.ranks) > 1 else ''} {many} on {self.node} ({times} for {self.phase}, {where}{when})"
        )


def slow_ranks(events: Iterable[Mapping[str, Any]]) -> list[SlowRanks]:
    """Return the slow ranks that a run has named, oldest first; what no run has written is left out."""
    found: list[SlowRanks] = []
    for event in events:
        name, step, ranks = event.get("event"), event.get("step"), event.get("ranks")
        if name not in (Event.STRAGGLER, Event.STRAGGLER_OVER) or not records.is_count(step):
            continue
        node, phase, attempt = event.get("node"), event.get("phase"), event.get("attempt")
        if not (isinstance(node, str) and isinstance(phase, str) and isinstance(ranks, list) and ranks):
            continue
        if not all(records.is_count(rank) for rank in ranks):
            continue
        assert isinstance(step, int)
        if name == Event.STRAGGLER:
            excess, step_s = records.finite(event.get("excess_s")), records.finite(event.get("step_s"))
            share = excess / step_s if excess is not None and step_s else None
            ratio = records.finite(event.get("ratio"))
            number = attempt if isinstance(attempt, int) else None
            found.append(SlowRanks(node, tuple(ranks), phase, ratio, share, step, attempt=number))
            continue
        for place, each in enumerate(found):
            same = (each.node, each.phase, each.attempt) == (node, phase, attempt) and each.until is None
            if same and set(each.ranks) & set(ranks):
                found[place] = replace(each, until=step)
    return found


def trouble_of_ranks(found: Sequence[SlowRanks]) -> str:
    """Return a phrase on the slow ranks that were found last; an empty one if there were none."""
    earlier = [f"{len(found) - SLOW_SHOWN} more before"] if len(found) > SLOW_SHOWN else []
    return "; ".join([*map(str, found[-SLOW_SHOWN:]), *earlier])


def trouble_of_checkpoints(events: Sequence[Mapping[str, Any]]) -> str:
    """Return a phrase on the checkpoints of a program of the user's own; an empty one if nothing is wrong with them."""
    unseen = [each.get("attempt") for each in events if each.get("event") == Event.NO_CHECKPOINT_SEEN]
    incomplete = [each for each in events if each.get("event") == Event.INCOMPLETE_CHECKPOINT]
    parts = []
    if unseen:
        numbers = ", ".join(str(number) for number in unseen[-5:])
        parts.append(f"none visible at the start of attempt{'s' if len(unseen) > 1 else ''} {numbers}")
    if incomplete:
        last = os.path.basename(str(incomplete[-1].get("path")))
        parts.append(f"{_times(len(incomplete), 'incomplete one')} moved aside (the last: {last})")
    return ", ".join(parts)


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


# What the checks of an attempt have found, read from its preflight.json, which anybody may have written.


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
    """The checks of an attempt, as `rank.preflight.check` writes them.

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
