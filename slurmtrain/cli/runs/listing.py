"""runs list: a row, or a JSON object, for every run."""

from __future__ import annotations

import argparse
import time

from slurmtrain.cli.columns import format_size, print_table
from slurmtrain.cli.json_output import print_json, run_object
from slurmtrain.cli.status import runs_or_refuse, say_doubts
from slurmtrain.report.status.look import states
from slurmtrain.report.status.state import RunStatus
from slurmtrain.runs import lookup
from slurmtrain.system import files


def list_runs(options: argparse.Namespace) -> int:
    """Print a row, or a JSON object, for every run."""
    runs = runs_or_refuse(lookup.runs_root())
    found = states(runs)
    sizes = {run.id: files.disk_usage(run.path) for run in runs} if options.size else {}
    if options.json:
        size = {run_id: {"size_bytes": size} for run_id, size in sizes.items()}
        print_json([{**run_object(run, found[run.id]), **size.get(run.id, {})} for run in runs])
        return 0
    rows = []
    for run in runs:
        now = found[run.id]
        row = [run.id, run.path.parent.name, now.status, "?" if now.step is None else str(now.step)]
        created = run.info()["created"] if now.status != RunStatus.UNREADABLE else None
        row += [str(len(now.attempts)), _date(created)]
        rows.append(row + ([format_size(sizes[run.id])] if options.size else []))
    print_table(["run", "name", "state", "step", "attempts", "created", *(["size"] if options.size else [])], rows)
    say_doubts(found.values())
    return 0


def _date(seconds: float | None) -> str:
    return "?" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
