"""The trials of a search: their log on disk, and what is to be done next, as functions of plain values.

`trials.jsonl` in the folder of the sweep has a line for everything that the sampler or the pruner was asked or told, in
that order. Another process gives them the same lines again, and is then where the first one was.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from slurmtrain.errors import UnreadableRecordError
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
    VALUE = "value"  # an intermediate value
    PRUNING = "pruning"  # it is to be stopped
    TOLD = "told"


@dataclass(frozen=True)
class Spent:
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
        values: intermediate values by step.
        pruned_at: the step at which it was decided to prune it; None if it was not.
        state: its state.
        value: its result; None before it has one, or if it has none.
        run_id: the run that computes it; None if it was refused before.
        steps: the last step that it has logged.
        steps_planned: the steps of the whole run; None if that is not known.
        spent: what it has cost.
        why: why it has failed.
    """

    number: int
    overrides: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[int, float] = field(default_factory=dict)
    pruned_at: int | None = None
    state: TrialState = TrialState.RUNNING
    value: float | None = None
    run_id: str | None = None
    steps: int | None = None
    steps_planned: int | None = None
    spent: Spent = Spent()
    why: str = ""

    @property
    def last_step(self) -> int:
        """The step of its last intermediate value; -1 without one."""
        return max(self.values, default=-1)


class TrialLog:
    """The log on disk, and the trials that it tells of. One process at a time writes it."""

    def __init__(self, path: Path):
        self._path = path
        self.lines = read_log(path)
        self.trials: list[Trial] = []
        try:
            for line in self.lines:
                apply(self.trials, line)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnreadableRecordError(
                f"{path}: a line of it cannot be used ({type(error).__name__}: {error})"
            ) from None

    def add(self, event: LogEvent, trial: int, **facts: Any) -> Trial:
        """Write a line, and return the trial as it is then.

        Raises:
            OSError: it could not be written.
        """
        line = {"event": event, "trial": trial, **facts}
        text = json.dumps(line)
        records.append_line(self._path, text + "\n")
        line = json.loads(text)  # as another process will read it
        self.lines.append(line)
        apply(self.trials, line)
        return self.trials[trial]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the log; a last one that a kill has torn is left out, and so are lines that are none.

    Raises:
        UnreadableRecordError: it is not a regular file, or its lines contradict each other.
    """
    try:
        text = records.read_bytes(path, at_most=records.METRICS_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    asked = 0
    for line in text.splitlines():
        values = records.parse(line)
        if not isinstance(values, dict) or values.get("event") not in tuple(LogEvent):
            continue  # a torn line, after which another process has gone on
        number = values.get("trial")
        new = values["event"] == LogEvent.ASKED
        if not records.is_count(number) or (number != asked if new else number >= asked):  # type: ignore[operator]
            raise UnreadableRecordError(f"{path}: a line is about trial {number!r}, of which no line before tells")
        asked += new
        found.append(values)
    return found


def apply(trials: list[Trial], line: Mapping[str, Any]) -> None:
    """Change the trials as a line of the log says."""
    number, event = line["trial"], line["event"]
    if event == LogEvent.ASKED:
        trials.append(Trial(number, tuple(line["overrides"]), line.get("params") or {}, line.get("attributes") or {}))
        return
    trial = trials[number]
    if event == LogEvent.VALUE:
        trial = replace(trial, values={**trial.values, int(line["step"]): float(line["value"])})
    elif event == LogEvent.PRUNING:
        trial = replace(trial, pruned_at=int(line["step"]))
    else:
        trial = replace(
            trial,
            state=TrialState(line["state"]),
            value=line.get("value"),
            run_id=line.get("run"),
            steps=line.get("steps"),
            steps_planned=line.get("steps_planned"),
            spent=Spent(**line["spent"]) if line.get("spent") else Spent(),
            why=str(line.get("why") or ""),
        )
    trials[number] = trial


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


def _hours(spent: Spent, seconds: float) -> float:
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
