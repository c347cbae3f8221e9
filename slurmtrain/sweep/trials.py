"""The trials of a search: their log on disk, and what is to be done next, as functions of plain values.

`trials.jsonl` in the folder of the sweep has a line for everything that the sampler or the pruner was asked or told, in
that order. Another process gives them the same lines again, and is then where the first one was.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from slurmtrain.errors import ClusterError
from slurmtrain.system import records

EVERY_STEP_UP_TO = 100  # from then on values are at least 1 % of the steps apart, so that a long log stays cheap
STEPS_APART = 1.01


class TrialState(StrEnum):
    """The state of a trial, in Optuna's words."""

    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAIL = "fail"


class LogEvent(StrEnum):
    """What a line of the log is about."""

    ASKED = "asked"
    STARTED = "started"  # its run exists, and is to be submitted
    VALUE = "value"  # an intermediate value
    PRUNING = "pruning"  # it is to be stopped
    TOLD = "told"


@dataclass(frozen=True)
class TrialCost:
    """What a trial has cost.

    Attributes:
        gpus: GPUs that it held; 0 on CPUs.
        held_s: wall-clock seconds in which it held them.
        trained_s: the part of that in which it trained.
    """

    gpus: float = 0.0
    held_s: float = 0.0
    trained_s: float = 0.0


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        number: its number in the search, from 0 on.
        overrides: what was chosen for it, as KEY=VALUE.
        params: the same as the sampler has it.
        attributes: what the sampler needs to know of it again.
        values: intermediate values by step, in the order of the steps.
        pruned_at: the step at which it was decided to prune it; None if it was not.
        state: its state.
        value: its result; None before it has one, or if it has none.
        run_id: the run that computes it; None if it was refused, or has not been started yet.
        steps: the last step that it has logged.
        steps_planned: the steps of the whole run; None if that is not known.
        spent: what it has cost.
        why: why it has failed.
    """

    number: int
    overrides: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)
    pruned_at: int | None = None
    state: TrialState = TrialState.RUNNING
    value: float | None = None
    run_id: str | None = None
    steps: int | None = None
    steps_planned: int | None = None
    spent: TrialCost = TrialCost()
    why: str = ""

    @property
    def last_step(self) -> int:
        """The step of its last intermediate value; -1 without one."""
        return next(reversed(self.values), -1)


class TrialLog:
    """The log on disk, and the trials that it tells of. One process at a time writes it.

    Attributes:
        lines: the lines that count.
        trials: the trials so far.
        ignored: why other lines are left out, by their numbers in the file, from 1 on.

    Raises:
        UnreadableRecordError: it is not a regular file, or cannot be read.
    """

    def __init__(self, path: Path):
        self._path = path
        self.lines: list[dict[str, Any]] = []
        self.trials: list[Trial] = []
        self.ignored: dict[int, str] = {}
        try:
            data = records.read_bytes(path, at_most=records.METRICS_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            data = b""
        self._size = len(data)
        for number, text in enumerate(data.split(b"\n"), 1):
            if not text:
                continue
            line = records.parse(text)
            why = why_ignored(self.trials, line)
            if why is None:
                self.lines.append(line)
                apply(self.trials, line)
            else:
                self.ignored[number] = why

    @property
    def remark(self) -> str | None:
        """One sentence about the lines that are left out; None if there are none."""
        if not self.ignored:
            return None
        number, why = next(iter(self.ignored.items()))
        count = len(self.ignored)
        what = f"line {number}" if count == 1 else f"{count} lines, the first of them line {number},"
        return f"the search ignores {what} of {self._path}: {why}"

    def add(self, event: LogEvent, trial: int, **facts: Any) -> Trial:
        """Write a line, and return the trial as it is then.

        Raises:
            ClusterError: another process has written to the log, so it is at this search now.
            OSError: the line could not be written.
        """
        if self._size_on_disk() != self._size:  # it was suspended for so long that another one took it for dead
            raise ClusterError(
                f"another process has written to {self._path}, so this one exits",
                hint="the other process continues the search",
            )
        text = json.dumps({"event": event, "trial": trial, **facts})
        records.append_line(self._path, text + "\n")
        self._size = self._size_on_disk()
        line = json.loads(text)  # as another process will read it
        self.lines.append(line)
        apply(self.trials, line)
        return self.trials[trial]

    def _size_on_disk(self) -> int:
        try:
            return os.stat(self._path).st_size
        except FileNotFoundError:
            return 0


def why_ignored(trials: Sequence[Trial], line: Any) -> str | None:
    """Say why a line of the log does not count after those that made `trials`; return None if it counts.

    No line can make the log useless: a kill or a full disk tears one, a newer version writes kinds that this one does not
    know, and where a process was suspended for long, two have written.
    """
    if not isinstance(line, dict):
        return "it is torn"
    event, number = line.get("event"), line.get("trial")
    if event not in tuple(LogEvent):
        return f"this version does not know the event {event!r}"
    if not _is_count(number):
        return f"it names no trial, but {number!r}"
    if event == LogEvent.ASKED:
        return _why_not_asked(len(trials), line)
    if number >= len(trials):
        return f"no line before it asks for trial {number}"
    trial = trials[number]
    if event == LogEvent.TOLD:
        return _why_not_told(trial, line)
    if trial.state != TrialState.RUNNING:
        return f"trial {number} had ended before"
    if event == LogEvent.STARTED:
        if trial.run_id is not None:
            return f"trial {number} had been started before"
        return None if _is_run(line.get("run")) else f"it names no run, but {line.get('run')!r}"
    if not _is_count(line.get("step")):
        return f"it names no step, but {line.get('step')!r}"
    if event == LogEvent.PRUNING:
        return f"trial {number} had been pruned before" if trial.pruned_at is not None else None
    if not _is_number(line.get("value")):
        return f"its value is no number, but {line.get('value')!r}"
    return f"trial {number} had come further before" if line["step"] <= trial.last_step else None


def _why_not_asked(asked: int, line: Mapping[str, Any]) -> str | None:
    number, overrides = line["trial"], line.get("overrides")
    if number != asked:
        return f"it asks for trial {number}, and the next one is {asked}"
    if not isinstance(overrides, list) or not all(isinstance(word, str) for word in overrides):
        return f"it has no overrides for trial {number}, but {overrides!r}"
    if not all(isinstance(line.get(name) or {}, dict) for name in ("params", "attributes")):
        return f"the parameters of trial {number} are not given by name"
    return None


def _why_not_told(trial: Trial, line: Mapping[str, Any]) -> str | None:
    end, value, run = line.get("state"), line.get("value"), line.get("run")
    if end not in tuple(TrialState) or end == TrialState.RUNNING:
        return f"this version does not know the end {end!r}"
    if not (value is None or _is_number(value)) or (end == TrialState.COMPLETE and value is None):
        return f"the result of trial {trial.number} is no number, but {value!r}"
    if not (run is None or _is_run(run)):
        return f"it names no run, but {run!r}"
    tried_again = trial.state == TrialState.FAIL and end == TrialState.COMPLETE
    if trial.state != TrialState.RUNNING and not tried_again:
        return f"trial {trial.number} had ended before"
    if None not in (run, trial.run_id) and run != trial.run_id:
        return f"it is about run {run}, and trial {trial.number} is run {trial.run_id}"
    return None


def _is_run(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and "/" not in value


def _is_count(value: object) -> TypeGuard[int]:
    return records.is_count(value) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def apply(trials: list[Trial], line: Mapping[str, Any]) -> None:
    """Change the trials as a line that counts says."""
    number, event = line["trial"], line["event"]
    if event == LogEvent.ASKED:
        trials.append(Trial(number, tuple(line["overrides"]), line.get("params") or {}, line.get("attributes") or {}))
        return
    trial = trials[number]
    if event == LogEvent.VALUE:
        trial.values[int(line["step"])] = float(line["value"])  # in place: there may be hundreds of thousands
    elif event == LogEvent.STARTED:
        trials[number] = replace(trial, run_id=line["run"])
    elif event == LogEvent.PRUNING:
        trials[number] = replace(trial, pruned_at=int(line["step"]))
    else:
        trials[number] = replace(
            trial,
            state=TrialState(line["state"]),
            value=line.get("value"),
            run_id=line.get("run") or trial.run_id,
            steps=_count(line.get("steps")),
            steps_planned=_count(line.get("steps_planned")),
            spent=_spent(line.get("spent")),
            why=str(line.get("why") or ""),
        )


def _count(value: Any) -> int | None:
    return int(value) if _is_count(value) else None


def _spent(values: Any) -> TrialCost:
    known = values if isinstance(values, dict) else {}
    return TrialCost(**{each.name: known[each.name] for each in fields(TrialCost) if _is_number(known.get(each.name))})


def to_ask(*, asked: int, wanted: int, running: int, slots: int, pack: int = 1) -> int:
    """Return how many trials are to be asked for now, so that `slots` always run or wait.

    Args:
        asked: number of trials so far.
        wanted: number of trials of the whole search.
        running: number of those that have not ended.
        pack: runs that share a job; they start together, so as many slots have to be free.
    """
    free, left = max(0, slots - running), max(0, wanted - asked)
    if free >= left:
        return left
    return free - free % min(pack, slots)


def to_report(values: Iterable[tuple[int, float]], last: int) -> list[tuple[int, float]]:
    """Return the logged (step, value) pairs that a pruner is told, given the last step that it was told.

    Steps go up: what a resumed run repeats is told once. All trials log the same steps, so all are judged at the same
    ones.
    """
    found = []
    for step, value in values:
        if step > last and (step <= EVERY_STEP_UP_TO or step >= last * STEPS_APART):
            found.append((step, value))
            last = step
    return found


def state_of_end(*, finished: bool, pruned: bool, value: float | None) -> TrialState:
    """Return the state of a trial whose run has ended.

    A run that had finished before it could be stopped counts with its result.
    """
    if finished:
        return TrialState.COMPLETE if value is not None else TrialState.FAIL
    return TrialState.PRUNED if pruned else TrialState.FAIL


class Row(NamedTuple):
    """A row of the table at the end.

    Attributes:
        held_h: hours x GPUs; hours where there are no GPUs.
        saved_h: what pruning has saved of them, by estimate; None if it was not pruned, or that is not known.
    """

    trial: Trial
    held_h: float
    saved_h: float | None


def table(trials: Sequence[Trial]) -> list[Row]:
    """Return the trials with what they have cost, and what was saved.

    A pruned trial would have trained on at the pace that it had, up to the steps of its config; where the config does
    not say how many (job=command), up to the median of the trials that were complete.
    """
    complete = [trial.steps for trial in trials if trial.state == TrialState.COMPLETE and trial.steps]
    usual = statistics.median(complete) if complete else None
    return [Row(trial, _hours(trial.spent, trial.spent.held_s), _saved_h(trial, usual)) for trial in trials]


def _saved_h(trial: Trial, usual: float | None) -> float | None:
    planned = trial.steps_planned or usual
    if trial.state != TrialState.PRUNED or not planned or not trial.steps:
        return None
    return _hours(trial.spent, trial.spent.trained_s * max(0.0, planned / trial.steps - 1))


def _hours(spent: TrialCost, seconds: float) -> float:
    return seconds * (spent.gpus or 1.0) / 3600


def best_of(trials: Iterable[Trial], *, maximize: bool) -> Trial | None:
    """Return the complete trial with the best result; None when there is none."""
    complete = [
        (trial.value, trial)
        for trial in trials
        if trial.state == TrialState.COMPLETE and trial.value is not None and math.isfinite(trial.value)
    ]
    if not complete:
        return None
    return (max if maximize else min)(complete, key=lambda pair: pair[0])[1]
