"""usage: where the hours of runs went, by run or by person; and the same of one run in a line, for `status`."""

from __future__ import annotations

import argparse
import logging
import time
from typing import TYPE_CHECKING

from slurmtrain.choices import Grouping
from slurmtrain.cli.columns import one_line, print_table
from slurmtrain.cli.json_output import print_json, usage_object
from slurmtrain.cli.status import run_or_sweep, runs_or_refuse
from slurmtrain.report.goodput import HOLDS_NO_GPUS, Cause, Goodput
from slurmtrain.report.page.units import hours, percent
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.paths import runs_root
from slurmtrain.system.texts import roughly

if TYPE_CHECKING:
    from slurmtrain.report.usage import Usage

log = logging.getLogger(__name__)

UNPRODUCTIVE = [cause for cause in Cause if cause is not Cause.PRODUCTIVE and cause not in HOLDS_NO_GPUS]
NAMES = {cause: cause.replace("_", " ") for cause in Cause}
REASONS_SHOWN = 3  # in a line
LEAST_SHOWN = 0.005  # share of the held time below which a cause is not worth a word


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    from slurmtrain.report.usage import usage_of  # `status` loads this module, too

    if options.name is None:
        runs = runs_or_refuse(runs_root())
    else:
        named = run_or_sweep(options.name, runs_root())
        members = [named] if isinstance(named, RunDir) else named.run_dirs().values()
        runs = [run for run in members if run.info_file.exists()]
    by = Grouping(options.by or (Grouping.USER if options.name is None else Grouping.RUN))
    found = usage_of(runs, by=by, since=options.since, now=time.time())
    if options.json:
        rows, total = [usage_object(row) for row in found.rows], usage_object(found.total)
        print_json({"by": by, "since": options.since, "rows": rows, "total": total, "left_out": found.unreadable})
        return 0
    print_table(*table_of(found, by))
    for sentence in found.unreadable:
        log.warning("left out: %s", one_line(sentence))
    return 0


def table_of(found: Usage, by: Grouping) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the header and the rows of the table, without empty columns; below several rows the total."""
    rows = [*found.rows, *([found.total] if len(found.rows) != 1 else [])]
    spent = [row.goodput for row in rows]
    gpus = bool(found.total.goodput.gpu_seconds)
    columns = {
        str(by): [row.who for row in rows],
        "runs": ["" if by is Grouping.RUN else str(row.runs) for row in rows],
        "GPU h" if gpus else "hours": [hours(3600 * each.gpu_hours if gpus else each.held_s) for each in spent],
        "goodput": [_percent(each.share) or "?" for each in spent],
        **{NAMES[cause]: [_percent(each.shares.get(cause)) for each in spent] for cause in UNPRODUCTIVE},
        "queue h": [hours(each.seconds.get(Cause.QUEUE, 0.0)) for each in spent],
        "lost GPU h" if gpus else "lost h": [hours(lost) if (lost := _lost_s(each)) else "" for each in spent],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    columns[""] = [_why_lost(each) for each in spent]
    return [*columns], [*zip(*columns.values(), strict=True)]


def in_a_line(found: Goodput) -> str:
    """Return a sentence such as "91 % of 2 h 10 min on 8 GPUs (17.3 GPU h): startup 4 %, ...; queue 12 min"."""
    parts = []
    if found.held_s > 0:
        held, shares = roughly(found.held_s), found.shares
        if found.gpu_seconds:
            held += f" on {found.gpu_count:.3g} GPU{'' if found.gpu_count == 1 else 's'}"
            held += f" ({hours(3600 * found.gpu_hours)} GPU h)"
        others = [
            f"{NAMES[each]} {percent(shares[each])}" for each in UNPRODUCTIVE if shares.get(each, 0) >= LEAST_SHOWN
        ]
        if others == ["unknown 100 %"]:
            parts.append(f"not known of {held}: the program reports no steps")
        else:
            known = "?" if found.share is None else percent(found.share)
            parts.append(": ".join(filter(None, [f"{known} of {held}", ", ".join(others)])))
    waited = {cause: found.seconds.get(cause, 0.0) for cause in (Cause.QUEUE, Cause.STOPPED)}
    parts.append(", ".join(f"{cause} {roughly(seconds)}" for cause, seconds in waited.items() if seconds >= 0.5))
    if lost := _lost_s(found):
        unit = "GPU h" if found.lost_gpu_seconds else "h"
        parts.append(f"lost {hours(lost)} {unit}: {_why_lost(found, at_most=REASONS_SHOWN)}")
    return "; ".join(filter(None, parts))


def _lost_s(found: Goodput) -> float:
    """Return GPUs x seconds that interruptions have cost; without GPUs the seconds."""
    return sum((found.lost_gpu_seconds or found.lost_s).values())


def _why_lost(found: Goodput, at_most: int | None = None) -> str:
    """Return the GPU hours lost by cause, the greatest first; without GPUs, the hours."""
    amounts = sorted((found.lost_gpu_seconds or found.lost_s).items(), key=lambda pair: -pair[1])
    return ", ".join(f"{one_line(why)} {hours(seconds)}" for why, seconds in amounts[:at_most] if seconds > 0)


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share)
