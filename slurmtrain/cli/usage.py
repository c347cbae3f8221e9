"""usage: where the hours of runs went, by run, by person or by node."""

from __future__ import annotations

import argparse
import gc
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.cli.columns import one_line, print_table
from slurmtrain.cli.json_output import print_json, usage_object
from slurmtrain.cli.status import run_or_sweep, runs_or_refuse
from slurmtrain.cli.time_use import complaints, why_lost
from slurmtrain.cli.units import hours_of, percent
from slurmtrain.report.goodput.causes import Cause
from slurmtrain.report.usage import Grouping, Row, Usage, usage_of
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.paths import runs_root

log = logging.getLogger(__name__)

# Columns of shares; a column in which every row is empty is left out.
SHARES = {
    "start-up": (Cause.STARTUP,),
    "checkpoints": (Cause.CHECKPOINT,),
    "evaluation": (Cause.EVALUATION,),
    "redone": (Cause.REDONE,),
    "hung": (Cause.HUNG,),
    "lost steps": (Cause.LOST,),
    "idle": (Cause.IDLE_END, Cause.BETWEEN),
    "unknown": (Cause.UNKNOWN,),
}


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    runs = _runs(options.name, runs_root())
    by = Grouping(options.by or (Grouping.USER if options.name is None else Grouping.RUN))
    was_on = gc.isenabled()
    gc.disable()  # it would visit what is kept of thousands of runs again and again, a sixth of the time
    try:
        found = usage_of(runs, by=by, since=options.since, now=time.time())
    finally:
        if was_on:
            gc.enable()
    if options.json:
        rows, total = [usage_object(row) for row in found.rows], usage_object(found.total)
        left_out = {"left_out": list(found.unreadable), "no_accounting": found.no_accounting}
        print_json({"by": by, "since": options.since, "rows": rows, "total": total, **left_out})
        return 0
    print_table(*table_of(found, by))
    for sentence in found.unreadable:
        log.warning("left out: %s", one_line(sentence))
    return 0


def _runs(name: str | None, root: Path) -> list[RunDir]:
    """Return the runs that are meant: all of them, one, or those of a sweep."""
    if name is None:
        return runs_or_refuse(root)
    found = run_or_sweep(name, root)
    if isinstance(found, RunDir):
        return [found]
    return [run_dir for run_dir in found.run_dirs().values() if run_dir.info_file.exists()]


def table_of(found: Usage, by: Grouping) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table: a row for each of `found`, and the total below several."""
    shown = [*found.rows, *([found.total] if len(found.rows) != 1 else [])]
    held_gpus = bool(found.total.goodput.gpu_seconds)
    shares = [row.goodput.shares for row in shown]
    columns = {name: [percent(_sum(each, causes)) for each in shares] for name, causes in SHARES.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    header = [str(by), *([] if by is Grouping.RUN else ["runs"]), "GPU h" if held_gpus else "hours", "goodput"]
    idle, accounted = found.total.gpus.sampled_s > 0, found.total.accounted_gpu_s is not None
    header += [*columns, *(["queue h"] if by is not Grouping.NODE else []), *(["GPUs idle"] if idle else [])]
    header += [*(["by SLURM"] if accounted else []), f"lost {'GPU ' if held_gpus else ''}h", ""]
    rows = []
    for place, row in enumerate(shown):
        goodput = row.goodput
        cells = [row.who, *([] if by is Grouping.RUN else [str(row.runs)])]
        cells += [hours_of(goodput.gpu_hours if held_gpus else goodput.held_s / 3600), percent(goodput.share) or "?"]
        cells += [values[place] for values in columns.values()]
        if by is not Grouping.NODE:
            cells.append(hours_of(goodput.seconds.get(Cause.QUEUE, 0.0) / 3600))
        cells += [percent(row.gpus.idle_share)] if idle else []
        cells += ["" if row.accounted_gpu_s is None else hours_of(row.accounted_gpu_s / 3600)] if accounted else []
        lost = goodput.lost_gpu_seconds if held_gpus else goodput.lost_s
        cells += [hours_of(sum(lost.values()) / 3600) if lost else "", _remark(row)]
        rows.append(cells)
    return header, rows


def _sum(shares: Mapping[Cause, float], causes: tuple[Cause, ...]) -> float | None:
    found = [shares[cause] for cause in causes if cause in shares]
    return sum(found) if found else None


def _remark(row: Row) -> str:
    """Return the last cell: why hours were lost, and what the GPUs have complained about."""
    return "; ".join(part for part in (why_lost(row.goodput), *complaints(row.gpus)) if part)
