"""sweep: show the state of a sweep, and control it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.choices import Backend
from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.collect import add_collect_options, print_collected
from slurmtrain.cli.columns import (
    PROGRESS,
    counts,
    doubts,
    print_table,
    progress_cells,
    remark,
    summary,
    table_lines,
    terminal_width,
    urgency,
)
from slurmtrain.cli.json_output import point_object, print_json
from slurmtrain.cli.multirun import run_on_this_machine
from slurmtrain.cli.status import say_doubts, say_unreadable
from slurmtrain.cli.watch import View, add_watch_options, check_watch_options, watch
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.report import collect
from slurmtrain.report.progress import eta_of_all, lowest, roughly
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs import lookup
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Point, Sweep
from slurmtrain.sweep import folder as sweeps
from slurmtrain.sweep import jobs
from slurmtrain.sweep.jobs import add_retry, check_submitted, submit_arrays
from slurmtrain.system.file_claims import is_claimed


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser.of(verb)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|status|collect|retry|cancel")
    for name, text in {
        "list": "list all sweeps",
        "status": "show every point: what varies, its state, step and loss",
        "collect": "print a table of all points with their metrics, or draw a metric over what varies",
        "retry": "submit again what failed, was stopped or lost, and what has not been submitted yet",
        "cancel": "cancel all points that have not ended",
    }.items():
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name != "list":
            action.add_argument("sweep", metavar="SWEEP", help="the name of a sweep, a part of it, a path, or last")
        if name == "collect":
            add_collect_options(action)
        else:
            action.add_argument("--json", action="store_true", help="print the answer as JSON, for a program")
        if name == "status":
            add_watch_options(action)
    options = parser.parse_args(words)
    runs = lookup.runs_root()
    if options.action == "list":
        return _list(runs, as_json=options.json)
    sweep = sweeps.find(options.sweep, runs)
    if options.action == "status":
        return _status(sweep, options)
    if options.action == "collect":
        return _collect(sweep, options)
    sweeps.require_own(sweep)
    return {"retry": _retry, "cancel": _cancel}[options.action](sweep, as_json=options.json)


def _list(runs: Path, *, as_json: bool) -> int:
    say_unreadable(runs)
    rows = [(sweep, sweep.info(), counts(now.values())) for sweep, now in sweeps.states_of_all(sweeps.all_sweeps(runs))]
    if as_json:
        print_json([{"sweep": s.id, "path": str(s.path), "points": s.point_count(), "states": c} for s, _, c in rows])
        return 0
    if not rows:
        raise UsageError(f"there are no sweeps under {runs.resolve()}", hint="python -m slurmtrain -m key=1,2 submit")
    print_table(
        ["sweep", "submitted", "points", "states", "overrides"],
        [
            [
                sweep.id,
                time.strftime("%m-%d %H:%M", time.localtime(info["created"])),
                str(sweep.point_count()),
                summary(states),
                " ".join(info["overrides"]),
            ]
            for sweep, info, states in rows
        ],
    )
    return 0


def _status(sweep: Sweep, options: argparse.Namespace) -> int:
    check_watch_options(options)
    if options.watch:
        return watch(lambda: _view(sweep), options.every)
    points, now = sweep.points(), sweeps.states_of(sweep)
    if options.json:
        print_json(
            {
                "sweep": sweep.id,
                "states": counts(now.values()),
                "points": [point_object(p, now[p.run_id]) for p in points],
            }
        )
        return 0
    print(f"{_headline(sweep, points, now)}\n")
    print_table(_header(points), [_row(point, now[point.run_id]) for point in points])
    say_doubts(now.values())
    return 0


def _view(sweep: Sweep) -> View:
    """Return all points, first those that run, then those that wait, then those that have ended."""
    points, now = sweep.points(), sweeps.states_of(sweep)
    headline = _headline(sweep, points, now)
    points.sort(key=lambda point: urgency(now[point.run_id]))
    lines = table_lines(_header(points), [_row(point, now[point.run_id]) for point in points], terminal_width())
    # A process that waits for its points may be about to begin the next ones.
    over = not any(state.alive for state in now.values()) and not is_claimed(sweep.path)
    return View([headline, "", *lines], doubts(now.values()), over)


def _header(points: Sequence[Point]) -> list[str]:
    return ["point", *(points[0].varied if points else ()), "state", *PROGRESS, "attempts", "run", ""]


def _row(point: Point, now: RunState) -> list[str]:
    attempts = str(len(now.attempts))
    return [
        str(point.number),
        *point.varied.values(),
        now.status,
        *progress_cells(now),
        attempts,
        point.run_id,
        remark(now),
    ]


def _headline(sweep: Sweep, points: Sequence[Point], now: dict[str, RunState]) -> str:
    """Return the number of points in each state, the time left for all of them, and the best loss so far."""
    running = [state.progress for state in now.values() if state.status == RunStatus.RUNNING]
    # Prepared runs are started later on this machine, or when there is room for more jobs.
    waiting = [
        each
        for each in now.values()
        if each.status == RunStatus.PREPARED or (each.alive and each.status != RunStatus.RUNNING)
    ]
    words = [f"{sweep.id}: {summary(counts(now.values())) or 'no points yet'}"]
    eta_s = eta_of_all([each.progress for each in waiting], running)
    if eta_s is not None:
        words.append(f"about {roughly(eta_s)} left")
    best = lowest((point.number, now[point.run_id].progress) for point in points)
    if best is not None:
        words.append(f"lowest {best.metric} {best.value:.4f} (point {best.point})")
    if sweep.cancelled_file.exists():
        words.append(f"cancelled, sweep retry {sweep.id} goes on")
    return "; ".join(words)


def _collect(sweep: Sweep, options: argparse.Namespace) -> int:
    now = sweeps.states_of(sweep)
    points = [
        collect.Point(
            point.number,
            {key: collect.value_of(text) for key, text in point.varied.items()},
            _run_dir_of(sweep, point),
            now[point.run_id].status,
        )
        for point in sweep.points()
    ]
    print_collected(collect.table_of(points, metric=options.metric, mode=options.mode), options)
    return 0


def _run_dir_of(sweep: Sweep, point: Point) -> RunDir | None:
    run_dir = sweep.run_dir(point.run_id)
    return run_dir if run_dir.info_file.exists() else None


def _retry(sweep: Sweep, *, as_json: bool) -> int:
    if sweep.info()["backend"] == Backend.LOCAL:
        return run_on_this_machine(sweep, sweep.info()["parallelism"] or sweep.pack, as_json=as_json)
    chosen = add_retry(sweep)
    submission = submit_arrays(sweep, sweeps.client_of(sweep))
    now = sweeps.states_of(sweep)
    ending = jobs.still_ending(sweep, now)
    if as_json:
        print_json({"sweep": sweep.id, "runs": chosen, "job_ids": submission.submitted, "still_ending": ending})
    elif submission.submitted:
        again = f"{len(chosen)} runs of {sweep.id} are" if chosen else f"what was missing of {sweep.id} is"
        print(f"{again} submitted: job {', '.join(submission.submitted)}")
    elif submission.limit is None:
        print(f"there is nothing to retry in {sweep.id}: {summary(counts(now.values()))}")
    if ending and not as_json:
        one = len(ending) == 1
        which, then = ("1 cancelled run has", "it has") if one else (f"{len(ending)} cancelled runs have", "they have")
        print(f"{which} not ended yet; when {then}, `sweep retry {sweep.id}` submits {'it' if one else 'them'}")
    check_submitted(submission)
    return 0


def _cancel(sweep: Sweep, *, as_json: bool) -> int:
    if sweep.info()["backend"] == Backend.LOCAL:
        raise ClusterError(
            f"{sweep.id} runs in the foreground, if at all", hint="Ctrl-C there; cancel RUN ends a single point"
        )
    count = jobs.cancel(sweep, sweeps.client_of(sweep))
    if as_json:
        print_json({"sweep": sweep.id, "cancelled": count})
    else:
        print(
            f"{count} runs of {sweep.id} are told to end" if count else f"nothing of {sweep.id} is running or waiting"
        )
    return 0
