"""What has happened to the numbers of a run, in one phrase, from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slurmtrain.runs.events import Event
from slurmtrain.system import records


def trouble(events: Iterable[Mapping[str, Any]]) -> str:
    """Return a phrase such as "3 updates skipped (the last in step 12)"; an empty one if nothing happened."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        by_name.setdefault(str(event.get("event")), []).append(event)
    skipped, backs, spikes = (
        by_name.get(name, []) for name in (Event.UPDATE_SKIPPED, Event.ROLLED_BACK, Event.LOSS_SPIKE)
    )
    parts = []
    if skipped:
        last = skipped[-1]
        total = last.get("skipped")
        number = total if isinstance(total, int) and records.is_count(total) else len(skipped)
        parts.append(f"{_times(number, 'update')} skipped (the last in step {last.get('step')})")
    if spikes:
        parts.append(f"{_times(len(spikes), 'spike')} of the loss (the last in step {spikes[-1].get('step')})")
    if backs:
        last = backs[-1]
        many = "once" if len(backs) == 1 else f"{len(backs)} times"
        parts.append(f"went back {many} (the last time from step {last.get('from_step')} to {last.get('step')})")
    return ", ".join(parts)


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
