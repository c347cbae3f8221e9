"""report: a run or a sweep as one HTML page; or the page served on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

from slurmtrain.cli.json_output import fields_of, print_json
from slurmtrain.cli.status import run_or_sweep
from slurmtrain.cli.units import format_size
from slurmtrain.errors import UsageError
from slurmtrain.report.collect import write_whole
from slurmtrain.report.page.render import Page, render
from slurmtrain.report.status.state import state
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system.paths import runs_root
from slurmtrain.system.records import printable
from slurmtrain.system.redaction import SECRET_VARIABLE, hide

EVERY_S = 5.0  # seconds between updates of a page that is served


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code.

    `--json` prints

    file         path of the page that was written
    state        one word on the run; of a sweep, how many points are in which state
    sentences    what it is, how far it got, what was lost and why
    advice       what to do
    """
    _check(options)
    hide({name: value for name, value in os.environ.items() if SECRET_VARIABLE.search(name)})
    found = run_or_sweep(options.what, runs_root())
    if isinstance(found, RunDir) and (options.metric or options.mode):
        raise UsageError("--metric and --mode are for a sweep", hint=f"{found.id} is a run")
    if options.serve:
        from slurmtrain.report.page.serve import serve

        return serve(partial(_page, found, options), port=options.port or 0, every_s=EVERY_S)
    page = _page(found, options)
    content = render(page).encode()
    beside = found.path if os.access(found.path, os.W_OK) else Path()  # in the work tree, a snapshot would copy it
    path = Path(options.out or beside / f"report-{page.slug}.html")
    if options.out == "-":
        sys.stdout.write(content.decode())
    elif path.is_dir():
        raise UsageError(f"--out {path} is a folder", hint=f"give a file, such as {path / f'report-{page.slug}.html'}")
    else:
        write_whole(path, content)
    if options.json:
        print_json({"file": path, **fields_of(page, "state sentences advice")})
    elif options.out != "-":
        print(f"{printable(str(path))}: {format_size(len(content))}; open it in a browser; it needs no network")
        if options.what == "last" and page.sweep:
            print(f"it is a point of a sweep: `report {printable(page.sweep)}` shows all of its points")
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.port is not None and not options.serve:
        raise UsageError("--port needs --serve", hint="add --serve, or leave it out")
    if options.port is not None and not 1024 <= options.port <= 65535:
        raise UsageError(f"--port {options.port}: expected a port from 1024 to 65535")
    if options.serve and (options.out or options.json):
        raise UsageError("--serve does not write files", hint="without it, --out does")
    if options.out == "-" and options.json:
        raise UsageError("--out - and --json both print on standard output", hint="give --out a file")


def _page(found: RunDir | Sweep, options: argparse.Namespace) -> Page:
    """Return the page from the files as they are now."""
    if isinstance(found, RunDir):
        from slurmtrain.report.facts import RunFacts
        from slurmtrain.report.page.run_page import run_page

        return run_page(RunFacts(found, state(found), time.time()))
    from slurmtrain.cli.sweep import collected
    from slurmtrain.report.page.sweep_page import SweepFacts, sweep_page

    points, table = collected(found, options)
    return sweep_page(SweepFacts(found.id, found.info(), tuple(points), table, time.time()))
