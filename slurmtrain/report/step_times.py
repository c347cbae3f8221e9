"""How long the steps of a run take, and what each part of them takes, from its own records: metrics.jsonl and events.jsonl.

Records of a run are those of whoever has written them: what is not a finite number counts as missing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmtrain.runs.events import Event
from slurmtrain.system import records

RECORDS = 50  # newest records that count
PREFIX, SUFFIX = "time_", "_s"
SHORTEST_S, LONGEST_S = 1e-7, 1e7  # of a step; a time beyond is none
PARTS = ("data", "forward_backward", "communication", "optimizer", "other")


@dataclass(frozen=True)
class StepTimes:
    """The median seconds of a step, over the newest records of a run.

    Attributes:
        step_s: seconds of a step, without pauses for evaluations and saves.
        parts: seconds by the part of the step that they are spent on, as far as the run has measured them.
        tokens_per_s: tokens of all ranks per second; None: not logged.
        mfu: as logged; None: it is not.
        records: number of records that count.
    """

    step_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None
    mfu: float | None = None
    records: int = 0

    def share(self, part: str) -> float:
        """Return the share of a step that a part takes; 0 where it was not measured."""
        return min(1.0, self.parts.get(part, 0.0) / self.step_s)


def step_times(logged: Sequence[Mapping[str, Any]]) -> StepTimes | None:
    """Return the medians over the newest half of these records of metrics.jsonl, at most `RECORDS`; None: there are none.

    The older half is left out, since the first steps take longer: memory is allocated, kernels are chosen or compiled.
    """
    steps = [record for record in logged if (_positive(record.get("step_time_s")) is not None)]
    if not steps:
        return None
    newest = steps[-min(RECORDS, max(1, len(steps) // 2)) :]
    measured = {name: _median(record.get(f"{PREFIX}{name}{SUFFIX}") for record in newest) for name in PARTS}
    parts = {name: value for name, value in measured.items() if value is not None}
    if "data" not in parts and (waited := _median(record.get("data_wait_s") for record in newest)) is not None:
        parts["data"] = waited
    whole = [
        total
        for record in newest
        if _number(record.get(f"{PREFIX}forward_backward{SUFFIX}")) is not None
        and (total := _positive(sum(_number(record.get(f"{PREFIX}{name}{SUFFIX}")) or 0.0 for name in PARTS)))
        is not None
    ]
    step_s = statistics.median(whole) if whole else _positive(newest[-1].get("step_time_s"))
    assert step_s is not None  # all of them have one
    return StepTimes(
        step_s=step_s,
        parts=parts,
        tokens_per_s=_median(record.get("tokens_per_s") for record in newest),
        mfu=_median(record.get("mfu") for record in newest),
        records=len(newest),
    )


@dataclass(frozen=True)
class SaveTimes:
    """The median seconds and bytes of a run's saves.

    Attributes:
        stall_s: seconds for which a save holds training up.
        write_s: seconds until it is complete.
        size: bytes.
    """

    stall_s: float
    write_s: float
    size: int


def save_times(events: Iterable[Mapping[str, Any]]) -> SaveTimes | None:
    """Return what saving has taken, by the events of a run; None: it has recorded no save."""
    saves = [each for each in events if each.get("event") == Event.CHECKPOINT]
    stall = _median(each.get("stall_s") for each in saves)
    write, size = _median(each.get("seconds") for each in saves), _median(each.get("size") for each in saves)
    if stall is None or write is None or not size:
        return None
    return SaveTimes(stall, write, int(size))


def _number(value: object) -> float | None:
    number = records.finite(value)
    return number if number is not None and number >= 0 else None


def _positive(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and SHORTEST_S <= number <= LONGEST_S else None


def _median(values: Iterable[object]) -> float | None:
    found = [number for value in values if (number := _number(value)) is not None and math.isfinite(number)]
    return statistics.median(found) if found else None
