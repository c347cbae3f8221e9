"""status: all runs, or one of them attempt by attempt."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import logging
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmtrain.cli import columns
from slurmtrain.cli.columns import PROGRESS, one_line, print_table, terminal_width
from slurmtrain.cli.json_output import evaluation_object, goodput_object, print_json, run_object
from slurmtrain.errors import UnreadableRecordError, UsageError
from slurmtrain.report.page.units import plural
from slurmtrain.report.progress import lowest
from slurmtrain.report.status.state import ATTEMPT_HEADER, RunState, states
from slurmtrain.runs import lookup
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.paths import runs_root
from slurmtrain.system.records import printable
from slurmtrain.system.texts import roughly

if TYPE_CHECKING:
    from slurmtrain.report.facts import RunFacts
    from slurmtrain.runs.sweep_dir import Sweep

log = logging.getLogger(__name__)

HEADER = ("run", "name", "state", *PROGRESS, "attempts", "")
EVALUATIONS_HEADER = ("evaluation", "job", "state", "measured", "")
OF_PROGRAM = re.compile(r"job=command$|job\.command=")  # overrides that `submit -- PROGRAM` has made
LEAST_ROWS, AROUND_ROWS = 10, 5  # rows on a terminal that is low; lines around the rows, with the prompt


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    root = runs_root()
    if arguments.run is None:
        _show_all(runs_or_refuse(root), arguments)
    elif isinstance(found := run_or_sweep(arguments.run, root), RunDir):
        _show_one(found, as_json=arguments.json)
    else:
        from slurmtrain.cli.sweep import show_status

        show_status(found, as_json=arguments.json)
    return 0


def run_or_sweep(reference: str, root: Path) -> RunDir | Sweep:
    """Return the run, or if there is none, the sweep that a person means; `last` is a run.

    Raises:
        UsageError: it is neither.
    """
    if lookup.is_sweep(reference):
        return lookup.find_sweep(reference, root)
    try:
        return lookup.find(reference, root)
    except UsageError:
        if any(reference in sweep.id for sweep in lookup.all_sweeps(root)):
            return lookup.find_sweep(reference, root)
        raise


def runs_or_refuse(root: Path) -> list[RunDir]:
    """Return all runs under `root`, oldest first.

    Raises:
        UsageError: there are none.
    """
    runs = lookup.all_runs(root)
    if not runs:
        raise lookup.nothing_under(root, "runs")
    return runs


# All runs.


class Row(NamedTuple):
    """What a row of the table is about: a run, or the runs of a sweep, newest first."""

    runs: list[RunDir]
    of_sweep: bool

    def cells(self, found: Mapping[RunDir, RunState]) -> list[str]:
        first = self.runs[0]
        if not self.of_sweep:
            now = found[first]
            progress, attempts = columns.progress_cells(now), str(len(now.attempts))
            return [first.id, first.path.parent.name, now.status, *progress, attempts, columns.remark(now)]
        best = lowest(enumerate(found[run].progress for run in self.runs))
        words = f"{plural(len(self.runs), 'point')}: {columns.summary(columns.counts(found[run] for run in self.runs))}"
        if best is not None:
            metric, value, point = best
            words += f"; lowest {metric} {value:.4f} in {self.runs[point].id}"
        return [first.path.parent.name, "", "sweep", *[""] * len(PROGRESS), "", words]


def _rows_of(runs: Iterable[RunDir]) -> list[Row]:
    """Return a row for each run that is no point of a sweep, and for each sweep; newest first if the last run is the newest."""
    is_sweep, rows = functools.cache(lookup.is_sweep), dict[Path, Row]()
    for run in reversed(list(runs)):
        folder = run.path.parent
        of_sweep = is_sweep(folder)
        rows.setdefault(folder if of_sweep else run.path, Row([], of_sweep)).runs.append(run)
    return [*rows.values()]


def _chosen(runs: list[RunDir], arguments: argparse.Namespace) -> tuple[list[Row], dict[RunDir, RunState], int]:
    """Return the rows that were asked for, newest first, the states of their runs, and how many rows there are in all.

    SLURM is asked about the runs that are shown, and about all if that decides which ones these are.
    """
    if arguments.name is not None:
        runs = [run for run in runs if fnmatch.fnmatch(run.path.parent.name, arguments.name)]
    if arguments.since is not None:
        runs = [run for run in runs if lookup.submitted_at(run)[0] >= arguments.since]
    rows, limit = _rows_of(runs), arguments.limit
    if limit is None and sys.stdout.isatty() and not arguments.json:
        limit = max(LEAST_ROWS, shutil.get_terminal_size().lines - AROUND_ROWS)
    if arguments.state is None:
        found = states(run for row in rows[:limit] for run in row.runs)
    else:
        found = states(runs)
        rows = [row for row in rows if arguments.state in {found[run].status for run in row.runs}]
    return rows[:limit], found, len(rows)


def _show_all(runs: list[RunDir], arguments: argparse.Namespace) -> None:
    """Print all runs, the newest first."""
    rows, found, count = _chosen(runs, arguments)
    if arguments.json:
        chosen = {run.path for row in rows for run in row.runs if arguments.state in (None, found[run].status)}
        print_json([run_object(run, found[run]) for run in runs if run.path in chosen])
        return
    print_table(HEADER, [row.cells(found) for row in rows])
    if len(rows) < count:
        print(f"\n{count - len(rows)} more: --limit {count} shows all; --name, --state and --since choose")
    columns.print_doubts(found.values())


# One run.


def _show_one(run_dir: RunDir, *, as_json: bool) -> None:
    from slurmtrain.report.facts import RunFacts

    evaluations = run_dir.all_evaluations()
    found = states([run_dir, *evaluations])
    now = found[run_dir]
    if not now.readable:
        raise UnreadableRecordError(now.explanation)
    facts = RunFacts(run_dir, now, time.time())
    if as_json:
        about = {
            "evaluations": [evaluation_object(each, found[each]) for each in evaluations],
            "left_out": facts.left_out,
            "slow_ranks": facts.slow_ranks,
            "goodput": goodput_object(facts.goodput) if facts.goodput is not None else None,
        }
        print_json(run_object(run_dir, now) | about)
    else:
        print("\n".join(_lines(facts)))
        tried = [now.attempt_cells(each, facts.now) for each in now.attempts]
        evaluated = [_evaluation_row(each, found[each]) for each in evaluations]
        for header, rows in ((ATTEMPT_HEADER, tried), (EVALUATIONS_HEADER, evaluated)):
            if rows:
                print()
                print_table(header, rows)
        columns.print_doubts([now])
    for trouble in dict.fromkeys(facts.troubles):
        log.warning("left out: %s", one_line(trouble))


def _lines(facts: RunFacts) -> list[str]:
    """Return what there is to say of one run, without its attempts. What cannot be read is left out."""
    from slurmtrain.cli.usage import in_a_line

    run_dir, now, info = facts.run_dir, facts.state, facts.info
    typed = [re.sub(r"^\+job\.args\.", "+", word) for word in info["overrides"] if not OF_PROGRAM.match(word)]
    known = {
        "progress": _progress(now, facts.now),
        "goodput": in_a_line(facts.goodput) if facts.goodput is not None else "",
        **facts.findings,
        "left out": "; ".join(each.sentence(facts.now) for each in facts.left_out) if now.alive else "",
        "stacks": "".join(map(str, [*facts.hang_pages.values()][-1:])),
        "sweep": _place_in_sweep(run_dir, info) if lookup.is_sweep(run_dir.path.parent) else "",
        "program": str(facts.setting("job.command") or "") if len(typed) < len(info["overrides"]) else "",
    }
    sentences = [f"run {run_dir.id} ({one_line(info['name'])}): {now.status}", f"  {printable(now.explanation)}"]
    sentences += [f"  {label}: {one_line(text)}" for label, text in known.items() if text]
    jobs = f" as job {', '.join(info['job_ids'])}" if info["job_ids"] else ""
    by = f"by {one_line(info['user'])} on {one_line(info['host'])}"
    submitted = time.strftime("%m-%d %H:%M:%S", time.localtime(info["created"]))
    sentences.append(f"  submitted {submitted} {by}{jobs}")
    width = terminal_width()
    return [
        *(line for sentence in sentences for line in columns.sentence_lines(sentence, 4, width)),
        f"  overrides: {one_line(shlex.join(typed)) or 'none'}",  # whole, to be pasted
        f"  {one_line(str(run_dir.path))}",
    ]


def _progress(now: RunState, at: float) -> str:
    """Describe the progress of a run in words; "" when it has logged nothing."""
    if now.progress.logged is None:
        return ""
    known = [f"{name} {cell}" for name, cell in zip(PROGRESS, columns.progress_cells(now), strict=True) if cell]
    ago = f"logged {roughly(max(0.0, at - now.progress.logged))} ago"
    return "; ".join([*filter(None, [", ".join(known)]), ago])


def _place_in_sweep(run_dir: RunDir, info: Mapping[str, Any]) -> str:
    """Say which point of its sweep a run is, since the overrides are those of all points."""
    values = " ".join(info.get("varied") or ()) or "nothing varies"
    return f"point {run_dir.id.rpartition('-')[2].lstrip('0') or 0} of {run_dir.path.parent.name}: {values}"


def _evaluation_row(evaluation: RunDir, now: RunState) -> list[str]:
    found = evaluation.measured() if now.readable else {}
    losses = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if name.endswith("_loss"))
    return [evaluation.path.name, now.job_id or "-", now.status, losses or "-", now.explanation]
