"""usage: where the hours of runs went, by run, by person or by node."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.columns import one_line, print_table
from slurmtrain.cli.json_output import print_json, usage_object
from slurmtrain.cli.status import runs_or_refuse
from slurmtrain.cli.time_use import complaints, hours_of, percent, why_lost
from slurmtrain.errors import UsageError
from slurmtrain.report.goodput.causes import Cause
from slurmtrain.report.usage import Grouping, Row, Usage, usage_of
from slurmtrain.runs import lookup
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system.records import LATEST

log = logging.getLogger(__name__)

UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
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


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser.of(verb)
    parser.add_argument("name", nargs="?", metavar="RUN|SWEEP", help="a run or a sweep; default: all runs here")
    parser.add_argument(
        "--since", metavar="TIME", help="count from this time on: 90m, 12h, 7d, 4w ago, or a day: 2026-01-31"
    )
    parser.add_argument(
        "--by",
        choices=[*Grouping],
        type=str,
        help="one row per user, run or node; default: user, or run if you name a run or sweep",
    )
    parser.add_argument("--json", action="store_true", help="print an object for a program")
    options = parser.parse_args(words)
    now = time.time()
    since = moment_of(options.since, now) if options.since is not None else None
    runs = _runs(options.name, lookup.runs_root())
    by = Grouping(options.by or (Grouping.USER if options.name is None else Grouping.RUN))
    with _without_garbage_collection():
        found = usage_of(runs, by=by, since=since, now=now)
        _print(found, by, since, as_json=options.json)
    return 0


def _print(found: Usage, by: Grouping, since: float | None, *, as_json: bool) -> None:
    if as_json:
        rows, total = [usage_object(row) for row in found.rows], usage_object(found.total)
        left_out = {"left_out": list(found.unreadable), "no_accounting": found.no_accounting}
        print_json({"by": by, "since": since, "rows": rows, "total": total, **left_out})
        return
    print_table(*table_of(found, by))
    for sentence in found.unreadable:
        log.warning("left out: %s", one_line(sentence))


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Let no garbage collection run: it would visit what is kept of thousands of runs again and again, a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def moment_of(text: str, now: float) -> float:
    """Return the moment, in unix seconds, that "7d", "12h", "90m", "2w" or "2026-01-31" means.

    Raises:
        UsageError: it means none.
    """
    match = re.fullmatch(r"([0-9]{1,6}) ?([mhdwHDW])", text.strip())  # an M may mean months
    if match is not None:
        return max(0.0, now - int(match[1]) * UNITS[match[2].lower()])
    try:
        moment = time.mktime(time.strptime(text, "%Y-%m-%d"))
    except (ValueError, OverflowError):
        moment = LATEST
    if not 0 <= moment <= now:
        raise UsageError(
            f"--since {one_line(text)[:40]} is not a time in the past", hint="7d, 12h, 90m, 2w, or a day: 2026-01-31"
        )
    return moment


def _runs(name: str | None, root: Path) -> list[RunDir]:
    """Return the runs that are meant: all of them, one, or those of a sweep."""
    if name is None:
        return runs_or_refuse(root)
    sweep = _sweep(name, root)
    if sweep is not None:
        return [run_dir for run_dir in sweep.run_dirs().values() if run_dir.info_file.exists()]
    return [lookup.find(name, root)]


def _sweep(name: str, root: Path) -> Sweep | None:
    """Return the sweep of this name, or at this path; None if there is none. `last` is a run."""
    from slurmtrain.sweep.folder import all_sweeps, find

    if lookup.is_sweep(name) or any(sweep.id == name for sweep in (all_sweeps(root) if name != "last" else ())):
        return find(name, root)
    return None


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
