"""sweep: show the state of a sweep, collect its metrics, retry and cancel it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from slurmtrain.choices import Backend
from slurmtrain.cli import columns
from slurmtrain.cli.json_output import emit, point_object, print_json
from slurmtrain.cli.multirun import run_on_this_machine
from slurmtrain.cli.stop import say_which
from slurmtrain.errors import ClusterError
from slurmtrain.report import collect
from slurmtrain.report.collect import format_of, short, table_bytes, write_whole
from slurmtrain.report.page.units import plural
from slurmtrain.report.progress import eta_of_all, lowest
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs import lookup
from slurmtrain.runs.sweep_dir import Point, Sweep
from slurmtrain.sweep import jobs
from slurmtrain.sweep.jobs import states_of
from slurmtrain.system.paths import runs_root
from slurmtrain.system.records import printable
from slurmtrain.system.texts import roughly

log = logging.getLogger(__name__)


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    sweep = lookup.find_sweep(options.sweep, runs_root())
    if options.action == "status":
        show_status(sweep, as_json=options.json)
        return 0
    if options.action == "collect":
        return _collect(sweep, options)
    jobs.require_own(sweep)
    say_which(options.sweep, sweep)
    return {"retry": _retry, "cancel": _cancel}[options.action](sweep, as_json=options.json)


def show_status(sweep: Sweep, *, as_json: bool) -> None:
    """Print all points."""
    points, now = sweep.points(), states_of(sweep)
    if as_json:
        rows = [point_object(point, now[point.run_id]) for point in points]
        print_json({"sweep": sweep.id, "states": columns.counts(now.values()), "points": rows})
        return
    print(f"{_headline(sweep, points, now)}\n")
    varied = dict.fromkeys(key for point in points for key in point.varied)
    header = ["point", *varied, "state", *columns.PROGRESS, "attempts", "run", ""]
    lines = []
    for point in points:
        its = now[point.run_id]
        about = [*(point.varied.get(key, "") for key in varied), its.status, *columns.progress_cells(its)]
        lines.append([str(point.number), *about, str(len(its.attempts)), point.run_id, columns.remark(its)])
    columns.print_table(header, lines)
    columns.print_doubts(now.values())


def _headline(sweep: Sweep, points: Sequence[Point], now: Mapping[str, RunState]) -> str:
    """Return the number of points in each state, the time left for all of them, and the best loss so far."""
    running = [its.progress for its in now.values() if its.status == RunStatus.RUNNING]
    # Prepared runs are started later on this machine, or when there is room for more jobs.
    begins = [its for its in now.values() if its.alive or its.status == RunStatus.PREPARED]
    waiting = [its.progress for its in begins if its.status != RunStatus.RUNNING]
    words = [f"{sweep.id}: {columns.summary(columns.counts(now.values())) or 'no points yet'}"]
    eta_s = eta_of_all(waiting, running)
    if eta_s is not None:
        words.append(f"about {roughly(eta_s)} left")
    best = lowest((point.number, now[point.run_id].progress) for point in points)
    if best is not None:
        words.append("lowest {} {:.4f} (point {})".format(*best))
    if sweep.cancelled_file.exists():
        words.append(f"cancelled, sweep retry {sweep.id} goes on")
    return "; ".join(words)


def collected(sweep: Sweep, options: argparse.Namespace) -> tuple[list[collect.Point], collect.Table]:
    """Return the points of a sweep as they are now, and the table of their metrics."""
    now, points = states_of(sweep), []
    for point in sweep.points():
        run_dir = sweep.run_dir(point.run_id)
        varied = {key: collect.value_of(text) for key, text in point.varied.items()}
        there = run_dir if run_dir.info_file.exists() else None
        points.append(collect.Point(point.number, varied, there, now[point.run_id]))
    return points, collect.table_of(points, metric=options.metric, mode=options.mode)


def _collect(sweep: Sweep, options: argparse.Namespace) -> int:
    """Print or write the points and their metrics as a table."""
    _, table = collected(sweep, options)
    if options.output is not None:
        output = Path(options.output)
        write_whole(output, table_bytes(table, options.format or format_of(output)))
        print(f"{options.output}: {plural(len(table.rows), 'point')}, {len(table.columns)} columns")
    elif options.format is not None:
        sys.stdout.write(table_bytes(table, options.format).decode())
    else:
        _print_collected(table)
    return 0


def _print_collected(table: collect.Table) -> None:
    """Print the columns up to the metric by which points are compared, and as many others as the terminal has room for."""
    header = [printable(name) for name in table.columns]
    rows = [[printable(short(cell)) for cell in row] for row in table.rows]
    wanted = len(table.varied) + 4 if table.goal is None else table.columns.index(table.goal.column) + 1
    widths = [max(map(len, column)) + columns.GAP for column in zip(header, *rows, strict=True)]
    width = columns.terminal_width()
    while wanted < len(header) and (width is None or sum(widths[: wanted + 1]) - columns.GAP <= width):
        wanted += 1
    columns.print_table(header[:wanted], [row[:wanted] for row in rows])
    if left_out := header[wanted:]:
        print(f"\n{len(left_out)} more columns have no room: {', '.join(left_out)}")


def _retry(sweep: Sweep, *, as_json: bool) -> int:
    if sweep.info()["backend"] == Backend.LOCAL:
        if not as_json:
            _say_what_fails_again(sweep, sweep.run_dirs())
        return run_on_this_machine(sweep, sweep.info()["parallelism"] or sweep.pack, as_json=as_json)
    submission = jobs.submit_again(sweep, jobs.trusted_client(sweep))
    if as_json:
        print_json({"sweep": sweep.id, "runs": submission.runs, "job_ids": submission.submitted})
    elif submission.submitted:
        print(f"submitted {plural(len(submission.runs), 'run')} of {sweep.id}: job {', '.join(submission.submitted)}")
        _say_what_fails_again(sweep, submission.runs)
    elif submission.limit is None:
        print(f"there is nothing to retry in {sweep.id}: {columns.summary(columns.counts(states_of(sweep).values()))}")
    submission.check()
    return 0


def _say_what_fails_again(sweep: Sweep, run_ids: Iterable[str]) -> None:
    """Say which points will fail for the same reason again, and what helps."""
    reasons = jobs.will_fail_again(sweep, set(run_ids))
    for why, points in reasons.items():
        which = f"point {points[0]}" if len(points) == 1 else f"points {', '.join(map(str, points))}"
        print(f"{which} will probably fail again for the same reason: {why}")
    if reasons:
        code = "" if sweep.info()["workdir"].startswith("/") else " or code, which is a snapshot"
        print(f"  they keep their config{code}; after a change of it, submit another sweep: -m ... submit --again")


def _cancel(sweep: Sweep, *, as_json: bool) -> int:
    if sweep.info()["backend"] == Backend.LOCAL:
        raise ClusterError(
            f"{sweep.id} runs in the foreground, if at all", hint="Ctrl-C there; cancel RUN ends a single point"
        )
    count = jobs.cancel(sweep, jobs.trusted_client(sweep))
    ends = f"told {plural(count, 'run')} of {sweep.id} to end"
    said = ends if count else f"nothing of {sweep.id} is running or waiting"
    emit({"sweep": sweep.id, "cancelled": count}, said, as_json=as_json)
    return 0
