"""report: a run or a sweep as one HTML page and as pictures; or the page served on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slurmtrain.cli.json_output import print_json, report_object
from slurmtrain.cli.status import run_or_sweep
from slurmtrain.cli.units import format_size
from slurmtrain.errors import UsageError
from slurmtrain.report import collect
from slurmtrain.report.page.contents import Page
from slurmtrain.report.page.render import render
from slurmtrain.report.table_files import write_whole
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.sweep.jobs import states_of
from slurmtrain.system.paths import runs_root
from slurmtrain.system.records import printable
from slurmtrain.system.redaction import SECRET_VARIABLE, hide


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    _check(options)
    hide({name: value for name, value in os.environ.items() if SECRET_VARIABLE.search(name)})
    make = _page_of(options)
    if options.serve:
        from slurmtrain.report.page.serve import serve

        return serve(make, port=options.port or 0, every_s=options.every)
    page = make()
    return _write(page, options)


def _check(options: argparse.Namespace) -> None:
    if options.port is not None and not options.serve:
        raise UsageError("--port needs --serve", hint="add --serve, or leave it out")
    if options.port is not None and not 1024 <= options.port <= 65535:
        raise UsageError(f"--port {options.port}: expected a port from 1024 to 65535")
    if options.serve and (options.out or options.png or options.json):
        raise UsageError("--serve does not write files", hint="without it, --out and --png do")
    if options.out == "-" and options.json:
        raise UsageError("--out - and --json both print on standard output", hint="give --out a file")


def _page_of(options: argparse.Namespace) -> Callable[[], Page]:
    """Return what makes the page, each time from the files as they are then."""
    found = run_or_sweep(options.what, runs_root())
    if isinstance(found, Sweep):
        return lambda: _sweep_page(found, options)
    if options.metric or options.mode:
        raise UsageError("--metric and --mode are for a sweep", hint=f"{found.id} is a run")

    def run_page_now() -> Page:
        from slurmtrain.report.page.run_facts import read_run
        from slurmtrain.report.page.run_page import run_page

        return run_page(read_run(found, now=time.time()))

    return run_page_now


def _sweep_page(sweep: Sweep, options: argparse.Namespace) -> Page:
    from slurmtrain.report.page.sweep_page import SweepFacts, sweep_page

    now = states_of(sweep)
    points = []
    for point in sweep.points():
        run_dir = sweep.run_dir(point.run_id)
        there = run_dir if run_dir.info_file.exists() else None
        points.append(collect.Point(point.number, point.varied, there, now[point.run_id].status))
    table = collect.table_of(points, metric=options.metric, mode=options.mode)
    states = {point.number: now[point.run_id] for point in sweep.points()}
    return sweep_page(SweepFacts(sweep.id, sweep.info(), tuple(points), states, table, time.time()))


def _write(page: Page, options: argparse.Namespace) -> int:
    content = render(page).encode()
    if options.out == "-":
        sys.stdout.write(content.decode())
    path = Path(options.out or f"report-{page.slug}.html")
    written: list[Path] = []
    if options.out != "-":
        if path.is_dir():
            raise UsageError(
                f"--out {path} is a folder", hint=f"give a file, such as {path / f'report-{page.slug}.html'}"
            )
        write_whole(path, content)
        written.append(path)
    if options.png is not None:
        from slurmtrain.report.page.pictures import draw_all

        written += draw_all(page, Path(options.png))
    if options.json:
        print_json(report_object(page, written))
    elif options.out != "-":
        print(f"{printable(str(path))}: {format_size(len(content))}; open it in a browser; it needs no network")
        if options.what == "last" and page.sweep:
            print(f"it is a point of a sweep: `report {printable(page.sweep)}` shows all of its points")
        if len(written) > 1:
            print(f"{len(written) - 1} pictures in {options.png}")
    return 0
