"""status: all runs, or one of them attempt by attempt."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from slurmtrain.cli.columns import (
    PROGRESS,
    View,
    check_watch_options,
    counts,
    doubts,
    one_line,
    print_doubts,
    progress_cells,
    progress_sentence,
    remark,
    sentence_lines,
    show,
    summary,
    table_lines,
    terminal_width,
    urgency,
)
from slurmtrain.cli.json_output import evaluation_object, fields_of, goodput_object, print_json, run_object
from slurmtrain.cli.time_use import gpus_in_a_line, in_a_line
from slurmtrain.cli.units import format_size
from slurmtrain.errors import UnreadableRecordError, UsageError
from slurmtrain.report.goodput.run import goodput_of
from slurmtrain.report.preflight import in_words, read_preflight
from slurmtrain.report.progress import lowest
from slurmtrain.report.status.look import states, states_by_path
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.report.trouble import slow_ranks, trouble, trouble_of_checkpoints, trouble_of_ranks
from slurmtrain.runs import lookup
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.gpu_use import read_gpu_use, total_of
from slurmtrain.runs.node_blame import left_out_of
from slurmtrain.runs.reasons import Reason
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system.files import disk_usage
from slurmtrain.system.paths import runs_root
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

HEADER = ("run", "name", "state", *PROGRESS, "attempts", "")
EVALUATIONS_HEADER = ("evaluation", "job", "state", "measured", "")
ATTEMPTS_HEADER = ("attempt", "job", "started", "took", "nodes", "steps", "reason", "then")
LEAST_ROWS, AROUND_ROWS = 10, 5  # rows on a terminal that is low; lines around the rows, with the prompt


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    check_watch_options(arguments)
    root = runs_root()
    if arguments.run is None:
        runs = runs_or_refuse(root)
        if arguments.json:
            return _json_of_all(runs, arguments)
        return show(lambda: _all(lookup.all_runs(root) if arguments.watch else runs, arguments), arguments)
    found = run_or_sweep(arguments.run, root)
    if isinstance(found, Sweep):
        from slurmtrain.cli import sweep

        return sweep.main(argparse.Namespace(**{**vars(arguments), "action": "status", "sweep": str(found.path)}))
    if arguments.json:
        return _json_of_one(found)
    return show(lambda: _one(found), arguments)


def run_or_sweep(reference: str, root: Path) -> RunDir | Sweep:
    """Return the run, or if there is none, the sweep that a person means; `last` is a run.

    Raises:
        UsageError: it is neither.
    """
    if lookup.is_sweep(reference):
        return lookup.find_sweep(reference, root)
    try:
        return lookup.find(reference, root)
    except UsageError as error:
        if any(reference in sweep.id for sweep in lookup.all_sweeps(root)):
            return lookup.find_sweep(reference, root)
        raise UsageError(error.message, hint=error.hint) from None


# All runs.


class Row(NamedTuple):
    """What a row of the table is about: a run, or the runs of a sweep, newest first."""

    runs: list[RunDir]
    sweep: Sweep | None

    def cells(self, found: Mapping[Path, RunState]) -> list[str]:
        first = self.runs[0]
        if self.sweep is None:
            now = found[first.path]
            progress, attempts = progress_cells(now), str(len(now.attempts))
            return [first.id, first.path.parent.name, now.status, *progress, attempts, remark(now)]
        best = lowest(enumerate(found[run.path].progress for run in self.runs))
        words = f"{len(self.runs)} points: {summary(counts(found[run.path] for run in self.runs))}"
        words += f"; lowest {best.metric} {best.value:.4f} in {self.runs[best.point].id}" if best is not None else ""
        return [self.sweep.id, "", "sweep", *[""] * len(PROGRESS), "", words]

    def size(self) -> str:
        return format_size(sum(disk_usage(run.path) for run in self.runs))

    def urgency(self, found: Mapping[Path, RunState]) -> int:
        return min(urgency(found[run.path]) for run in self.runs)


def rows_of(runs: Iterable[RunDir]) -> list[Row]:
    """Return a row for each run that is no point of a sweep, and for each sweep; newest first if the last run is the newest."""
    sweeps: dict[Path, Row | None] = {}
    rows = []
    for run in reversed(list(runs)):
        folder = run.path.parent
        if folder not in sweeps:
            sweeps[folder] = Row([], Sweep(folder)) if lookup.is_sweep(folder) else None
            rows += [row] if (row := sweeps[folder]) is not None else []
        if (row := sweeps[folder]) is not None:
            row.runs.append(run)
        else:
            rows.append(Row([run], None))
    return rows


def _chosen(runs: list[RunDir], arguments: argparse.Namespace) -> tuple[list[Row], dict[Path, RunState], int]:
    """Return the rows that were asked for, newest first, the states of their runs, and how many rows there are in all.

    SLURM is asked about the runs that are shown, and about all if that decides which ones these are.
    """
    state, limit = arguments.state, arguments.limit
    if arguments.name is not None:
        runs = [run for run in runs if fnmatch.fnmatch(run.path.parent.name, arguments.name)]
    if arguments.since is not None:
        runs = [run for run in runs if lookup.submitted_at(run)[0] >= arguments.since]
    rows = rows_of(runs)
    if arguments.watch:
        limit = None  # --watch puts those that run first
    elif limit is None and sys.stdout.isatty() and not arguments.json:
        limit = max(LEAST_ROWS, shutil.get_terminal_size().lines - AROUND_ROWS)
    if state is None:
        shown = rows[:limit]
        return shown, states_by_path([run for row in shown for run in row.runs]), len(rows)
    found = states_by_path(runs)
    rows = [row for row in rows if state in {found[run.path].status for run in row.runs}]
    return rows[:limit], found, len(rows)


def _json_of_all(runs: list[RunDir], arguments: argparse.Namespace) -> int:
    rows, found, _ = _chosen(runs, arguments)
    chosen = {run.path for row in rows for run in row.runs if arguments.state in (None, found[run.path].status)}
    runs = [run for run in runs if run.path in chosen]
    sizes = {run.path: {"size_bytes": disk_usage(run.path)} for run in runs} if arguments.size else {}
    print_json([{**run_object(run, found[run.path]), **sizes.get(run.path, {})} for run in runs])
    return 0


def _all(runs: list[RunDir], arguments: argparse.Namespace) -> View:
    """Return all runs, the newest first; with --watch those that run before those that wait and those that have ended."""
    rows, found, count = _chosen(runs, arguments)
    if arguments.watch:
        rows.sort(key=lambda row: row.urgency(found))
    header, cells = list(HEADER), [row.cells(found) for row in rows]
    if arguments.size:
        header.insert(-1, "size")
        cells = [[*each[:-1], row.size(), each[-1]] for each, row in zip(cells, rows, strict=True)]
    lines = table_lines(header, cells, terminal_width())
    if arguments.watch:
        lines = [summary(counts(found.values())), "", *lines]
    if len(rows) < count:
        lines += ["", f"{count - len(rows)} more: --limit {count} shows all; --name, --state and --since choose"]
    return View(lines, doubts(found.values()), over=not any(now.alive for now in found.values()))


def runs_or_refuse(root: Path) -> list[RunDir]:
    """Return all runs under `root`, oldest first.

    Raises:
        UsageError: there are none.
    """
    runs = lookup.all_runs(root)
    say_unreadable(root)
    if not runs:
        raise lookup.nothing_under(root, "runs")
    return runs


def say_unreadable(root: Path) -> None:
    """Log how many folders are left out because they belong to another user."""
    closed = lookup.unreadable(root)
    if closed:
        what = "1 folder is" if len(closed) == 1 else f"{len(closed)} folders are"
        first = printable(str(closed[0]))
        log.warning("%s not shown, being somebody else's: %s cannot be read", what, first)


def _json_of_one(run_dir: RunDir) -> int:
    evaluations, found = _look(run_dir)
    now = found[run_dir.id]
    print_json(
        {
            **run_object(run_dir, now),
            "evaluations": [evaluation_object(each, found[each.id]) for each in evaluations],
            "left_out": [fields_of(each, "node why until") for each in left_out_of(run_dir, now.job_id)],
            "slow_ranks": [dataclasses.asdict(each) for each in slow_ranks(run_dir.events())],
            "next_change": _next_change(run_dir, now),
            "goodput": goodput_object(goodput_of(run_dir, alive=_alive(now))),
        }
    )
    return 0


def _look(run_dir: RunDir) -> tuple[list[RunDir], dict[str, RunState]]:
    """Return the evaluations of a run, and the states of all."""
    evaluations = run_dir.all_evaluations()
    found = states([run_dir, *evaluations])
    if found[run_dir.id].status == RunStatus.UNREADABLE:
        raise UnreadableRecordError(found[run_dir.id].explanation)
    return evaluations, found


def _one(run_dir: RunDir) -> View:
    evaluations, found = _look(run_dir)
    now = found[run_dir.id]
    lines = _lines(run_dir, now)
    for header, rows in (
        (ATTEMPTS_HEADER, [_attempt_row(attempt, now) for attempt in now.attempts]),
        (EVALUATIONS_HEADER, [_evaluation_row(each, found[each.id]) for each in evaluations]),
    ):
        lines += ["", *table_lines(header, rows, terminal_width())] if rows else []
    return View(lines, doubts([now]), over=not any(each.alive for each in found.values()))


def _evaluation_row(evaluation: RunDir, now: RunState) -> list[str]:
    found = evaluation.measured() if now.status != RunStatus.UNREADABLE else {}
    losses = {name: value for name, value in found.items() if name.endswith("_loss")}
    measured = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
    return [evaluation.path.name, now.job_id or "-", now.status, measured or "-", now.explanation]


def _lines(run_dir: RunDir, now: RunState) -> list[str]:
    """Return what there is to say of one run, without its attempts."""
    info, events = run_dir.info(), run_dir.events()
    facts = {
        "goodput": _or_nothing(lambda: in_a_line(goodput_of(run_dir, alive=_alive(now)))),
        "GPUs": gpus_in_a_line(
            total_of(node for each in now.attempts for node in read_gpu_use(run_dir.attempt(each.number)))
        ),
        "numbers": trouble(events),
        "slow ranks": trouble_of_ranks(events),
        "checkpoints": trouble_of_checkpoints(events),
        "preflight": _or_nothing(lambda: _preflight(run_dir, now)),
        "left out": "; ".join(each.sentence(time.time()) for each in left_out_of(run_dir, now.job_id))
        if now.alive and now.job_id is not None
        else "",
        "next attempt": f"with {' '.join(change)}" if (change := _next_change(run_dir, now)) else "",
        "stacks": _hang_page(run_dir, now),
    }
    jobs = f" as job {', '.join(info['job_ids'])}" if info["job_ids"] else ""
    sentences = [
        f"run {run_dir.id} ({one_line(info['name'])}): {now.status}",
        f"  {printable(now.explanation)}",
        *([f"  {progress}"] if (progress := progress_sentence(now, time.time())) else []),
        *(f"  {label}: {one_line(text)}" for label, text in facts.items() if text),
        f"  submitted {_time(info['created'])} by {one_line(info['user'])} on {one_line(info['host'])}{jobs}",
        *([f"  {one_line(place)}"] if (place := _or_nothing(lambda: _place_in_sweep(run_dir))) else []),
    ]
    width = terminal_width()
    return [
        *(line for sentence in sentences for line in sentence_lines(sentence, 4, width)),
        f"  overrides: {one_line(' '.join(info['overrides'])) or 'none'}",  # whole, to be copied
        f"  {one_line(str(run_dir.path))}",
    ]


def _place_in_sweep(run_dir: RunDir) -> str:
    """Say which point of its sweep a run is, since the overrides are those of all points; "" if it is not in a sweep."""
    if not lookup.is_sweep(run_dir.path.parent):
        return ""
    sweep = Sweep(run_dir.path.parent)
    found = [point for point in sweep.points() if point.run_id == run_dir.id]
    values = " ".join(f"{key}={value}" for key, value in found[0].varied.items()) if found else ""
    return f"point {found[0].number} of {sweep.id}: {values or 'nothing varies'}" if found else ""


def _or_nothing(say: Callable[[], str]) -> str:
    """Return a phrase, or "" if the records that it is about cannot be read."""
    try:
        return say()
    except UnreadableRecordError:
        return ""


def _preflight(run_dir: RunDir, now: RunState) -> str:
    """Say in a line what the checks of the last attempt have found; "" if nothing."""
    found = read_preflight(run_dir.attempt(now.attempts[-1].number)) if now.attempts else None
    return in_words(found.findings) if found is not None else ""


def _alive(now: RunState) -> bool | None:
    """Return whether a run is alive; None if SLURM, or its host, could not be asked."""
    return None if now.status == RunStatus.UNKNOWN else now.alive


def _next_change(run_dir: RunDir, now: RunState) -> list[str]:
    """Return what `requeue RUN KEY=VALUE` has set for the next attempt of a run that has not ended."""
    if not now.alive or not run_dir.next_change_file.exists():
        return []
    from slurmtrain.launch.changes import kept_for_next_attempt

    return kept_for_next_attempt(run_dir)


def _hang_page(run_dir: RunDir, now: RunState) -> str:
    """Return the page on the newest attempt that hung; "" if none did."""
    hung = [each.number for each in now.attempts if each.reason == Reason.HANG]
    page = run_dir.attempt(hung[-1]).hang_page if hung else None
    return str(page) if page is not None and page.exists() else ""


def say_doubts(found: Iterable[RunState]) -> None:
    """Print why SLURM could not be asked, each reason once."""
    print_doubts(doubts(found))


def _attempt_row(attempt: Attempt, now: RunState) -> list[str]:
    waits = now.waits
    current = attempt is now.attempts[-1] and now.alive and not waits and attempt.ended is None
    # Before it has begun, the run's step is that of an earlier one.
    last = now.step if current and attempt.started else attempt.last_step
    end = attempt.ended or (time.time() if current else None)
    nodes = ",".join(attempt.nodes[:4]) + (f" +{len(attempt.nodes) - 4}" if len(attempt.nodes) > 4 else "")
    return [
        str(attempt.number),
        attempt.job_id or "-",
        _time(attempt.started) if attempt.started else "-",
        f"{end - attempt.started:.0f} s" if end and attempt.started else "-",
        nodes or "-",
        "-".join("?" if step is None else str(step) for step in (attempt.first_step, last)),
        attempt.reason or (now.status if current else "?"),
        attempt.sentence or "",
    ]


def _time(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
