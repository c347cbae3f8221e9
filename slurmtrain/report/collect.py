"""From a set of runs to one table: a row for every point, a column for every varied key and every metric.

It reads each run's metrics.jsonl and evaluations.jsonl alone, while runs go on as well as afterwards. It knows nothing
of how points are made or submitted.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.choices import BestMode
from slurmtrain.errors import UnreadableRecordError, UsageError, nearest
from slurmtrain.observe.metrics import is_detail, read_evaluations, read_metrics
from slurmtrain.report.status.state import RunState
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import write_where_named
from slurmtrain.system.texts import json_text

Cell = int | float | str | bool | None
LOSS_LIKE = re.compile(r"loss|perplexity|error|nll", re.IGNORECASE)  # low is good


@dataclass(frozen=True)
class Point:
    """One run of a set, or one that does not exist yet.

    Attributes:
        number: its number in the set.
        varied: the config keys in which the points differ, dotted, with this point's values.
        run_dir: its run directory; None before it was prepared.
        state: what it does.
    """

    number: int
    varied: Mapping[str, Cell]
    run_dir: RunDir | None
    state: RunState


@dataclass(frozen=True)
class Goal:
    """The metric by which points are compared, and which values of it are good."""

    metric: str
    mode: str  # "min" or "max"

    @property
    def column(self) -> str:
        return f"best_{self.metric}"

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of the values; None when there is none. NaN and infinite values are never the best."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return None
        return min(finite) if self.mode == BestMode.MIN else max(finite)


@dataclass(frozen=True)
class Table:
    """A table of points.

    Attributes:
        columns: names, each once.
        rows: a cell for every column; None if nothing is known.
        varied: the columns that are varied keys.
        goal: the metric that points are compared by, which has a column; None when no point has logged a metric.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    varied: tuple[str, ...] = ()
    goal: Goal | None = None

    def column(self, name: str) -> list[Cell]:
        place = self.columns.index(name)
        return [row[place] for row in self.rows]


def table_of(points: Sequence[Point], *, metric: str | None = None, mode: str | None = None) -> Table:
    """Return the table of these points, in their order.

    Columns: point, run, state; the varied keys in the order of their first appearance; step, the last that was logged;
    `best_<metric>` for one metric, its best value over the whole run; then every scalar metric by its own name, with
    the value that was logged last, and at the end those that only explain another. A point that never ran or logged
    nothing has a row with empty cells.

    The one metric is `metric`; else checkpoint.best_metric of the runs' config; else, if that was never logged, "loss".
    Which values of it are good is `mode`; else checkpoint.best_mode, if it is the config's metric; else "min", if its
    name is that of a loss or an error.

    Raises:
        UsageError: no run has logged `metric`; or it is not known which values of it are good.
    """
    candidates = _candidates(points, metric, mode)
    logs = [_read(point.run_dir, candidates) for point in points]
    logged = sorted(dict.fromkeys(name for log in logs for name in log.last), key=is_detail)
    if metric is not None and logged and metric not in logged:
        raise UsageError(f"no run has logged the metric {metric!r}", hint=nearest(metric, logged))
    goal = next((goal for goal in candidates if goal.metric in logged), candidates[0] if metric is not None else None)
    varied = tuple(dict.fromkeys(key for point in points for key in point.varied))
    columns = ["point", "run", "state", *varied, "step"]
    if goal is not None:
        columns.append(goal.column)
        logged = [goal.metric, *(name for name in logged if name != goal.metric)]
    for name in logged:
        columns.append(f"metric.{name}" if name in columns else name)

    rows = []
    for point, log in zip(points, logs, strict=True):
        row: list[Cell] = [point.number, point.run_dir.id if point.run_dir is not None else None, point.state.status]
        row += [point.varied.get(key) for key in varied]
        row.append(log.step)
        if goal is not None:
            row.append(log.best.get(goal.metric))
        row += [log.last.get(name) for name in logged]
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), varied, goal)


def metrics_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the records of a run's metrics and of its evaluation jobs, by step, each value once, as it counts.

    Raises:
        UnreadableRecordError: a file of metrics cannot be used.
    """
    found = [*read_evaluations(run_dir.evaluations_file), *without_repeated(read_metrics(run_dir.metrics_file))]
    return sorted(found, key=lambda record: record["step"])


def without_repeated(logged: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records in the order of the log, without those that were logged again.

    A resumed run repeats the steps after its checkpoint: a record of an earlier step replaces all records of later steps,
    and those of the same step that have a value of the same name.
    """
    kept: list[dict[str, Any]] = []
    for record in logged:
        names, same = record.keys() - {"step"}, []
        while kept and kept[-1]["step"] >= record["step"]:
            last = kept.pop()
            if last["step"] == record["step"] and names.isdisjoint(last):
                same.append(last)
        kept += [*reversed(same), record]
    return kept


class _Log(NamedTuple):
    """The part of one run's log that the table needs, so that a thousand logs need not be held at once."""

    step: int | None
    last: Mapping[str, float]
    best: Mapping[str, float | None]  # best value of each candidate


def _read(run_dir: RunDir | None, candidates: Sequence[Goal]) -> _Log:
    logged: list[dict[str, Any]] = []
    if run_dir is not None:
        with contextlib.suppress(UnreadableRecordError):  # the point's state says so, and the others get their rows
            logged = metrics_of(run_dir)
    step, last = None, dict[str, float]()
    values: dict[str, dict[int, float]] = {goal.metric: {} for goal in candidates}
    for record in logged:  # of a step, what the run itself logged comes last
        scalars = {name: value for name, value in record.items() if name != "step" and records.is_scalar(value)}
        last |= scalars
        step = record["step"] if scalars else step
        for name in values.keys() & scalars.keys():
            values[name][record["step"]] = scalars[name]
    return _Log(step, last, {goal.metric: goal.best(values[goal.metric].values()) for goal in candidates})


def _candidates(points: Sequence[Point], metric: str | None, mode: str | None) -> list[Goal]:
    """Return the metrics that the points may be compared by, in order of preference."""
    configured = _configured(points)
    if metric is None:
        wanted, loss = Goal(configured.metric, mode or configured.mode), Goal("loss", mode or "min")
        return [wanted] if wanted.metric == loss.metric else [wanted, loss]
    if mode is None and metric == configured.metric:
        mode = configured.mode
    if mode is None and not LOSS_LIKE.search(metric):
        raise UsageError(f"it is unknown whether high or low {metric} is better", hint="add --mode max or --mode min")
    return [Goal(metric, mode or "min")]


def _configured(points: Sequence[Point]) -> Goal:
    """Return the metric by which the first config keeps checkpoints.

    Runs with different metrics cannot be compared.
    """
    for point in points:
        if point.run_dir is not None and os.path.isfile(point.run_dir.config_file):
            try:
                settings = point.run_dir.config_values()["checkpoint"]
                return Goal(str(settings["best_metric"]), "max" if settings["best_mode"] == "max" else "min")
            except (UnreadableRecordError, TypeError, KeyError):
                break
    return Goal(Keep.metric, Keep.mode)


def value_of(text: str) -> Cell:
    """Return the value of a varied key, which a sweep keeps as text: a number, true or false, else the text itself."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            value = number(text)
            return value if abs(value) < math.inf else text
    return {"true": True, "false": False}.get(text.lower(), text)


# The table as text.

SUFFIXES = {".csv": "csv", ".json": "json"}


def format_of(path: Path) -> str:
    """Return the format that a file's name asks for.

    Raises:
        UsageError: the name has no known suffix.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"the name {path.name!r} does not say how to write the table",
            hint=f"end it in {', '.join(SUFFIXES)}, or add --format",
        )
    return SUFFIXES[path.suffix.lower()]


def table_bytes(table: Table, kind: str) -> bytes:
    """Return the content of a file of that format.

    CSV is as RFC 4180 has it, with a header; JSON is one object per row, in which an unknown value is null, and not a number
    is "NaN".
    """
    out = io.StringIO()
    if kind == "csv":
        csv.writer(out).writerows([table.columns, *([plain(cell) for cell in row] for row in table.rows)])
    else:
        out.write(json_text([dict(zip(table.columns, row, strict=True)) for row in table.rows]))
    return out.getvalue().encode("utf-8", errors="backslashreplace")  # a path may hold bytes that are no Unicode


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old or the new one, never half of it.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_where_named(path, content)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            hint="name a file in a folder that exists and that you may write to",
        ) from None


def short(cell: Cell) -> str:
    """Format a cell for a person: five digits of a number, nothing for an unknown value."""
    if isinstance(cell, float):
        return f"{cell:.5g}"
    return plain(cell)


def plain(cell: Cell) -> str:
    """Format a cell with all its digits: reading them gives the same bits. An unknown value is empty."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return repr(cell) if isinstance(cell, float) else str(cell)


# How long the steps and the saves of a run take. What is not a finite number counts as missing.

RECORDS = 50  # newest records that count
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
    """

    step_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None
    mfu: float | None = None

    def share(self, part: str) -> float:
        """Return the share of a step that a part takes; 0 where it was not measured."""
        return min(1.0, self.parts.get(part, 0.0) / self.step_s)


def step_times(logged: Sequence[Mapping[str, Any]]) -> StepTimes | None:
    """Return the medians over the newest half of these records of metrics.jsonl, at most `RECORDS`; None: there are none.

    The older half is left out, since the first steps take longer: memory is allocated, kernels are chosen or compiled.
    """
    steps = [each for each in logged if SHORTEST_S <= (records.finite(each.get("step_time_s")) or 0.0) <= LONGEST_S]
    if not steps:
        return None
    newest = steps[-min(RECORDS, max(1, len(steps) // 2)) :]
    measured = {name: _median(newest, f"time_{name}_s") for name in PARTS}
    if measured["data"] is None:
        measured["data"] = _median(newest, "data_wait_s")
    parts = {name: seconds for name, seconds in measured.items() if seconds is not None}
    whole = sum(parts.values()) if "forward_backward" in parts else 0.0
    step_s = whole if SHORTEST_S <= whole <= LONGEST_S else float(newest[-1]["step_time_s"])
    return StepTimes(step_s, parts, _median(newest, "tokens_per_s"), _median(newest, "mfu"))


def save_times(events: Iterable[Mapping[str, Any]]) -> tuple[float, float, float] | None:
    """Return the median bytes of a save, seconds until it is complete, and seconds for which it holds training up."""
    saves = [each for each in events if each.get("event") == Event.CHECKPOINT]
    size, write_s, stall_s = (_median(saves, name) for name in ("size", "seconds", "stall_s"))
    return (size, write_s, stall_s) if size and write_s is not None and stall_s is not None else None


def _median(found: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [value for each in found if (value := records.finite(each.get(name))) is not None and value >= 0]
    return statistics.median(values) if values else None
