"""status: all runs, or one of them attempt by attempt."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from slurmtrain.choices import JobKind
from slurmtrain.cli import columns
from slurmtrain.cli.columns import PROGRESS, one_line, print_table, terminal_width
from slurmtrain.cli.json_output import evaluation_object, goodput_object, print_json, run_object
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import ConfigError, UnreadableRecordError, UsageError
from slurmtrain.report.page.units import plural
from slurmtrain.report.progress import lowest
from slurmtrain.report.status.look import states, states_by_path
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs import lookup
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.reasons import Reason
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system.durations import roughly
from slurmtrain.system.paths import runs_root
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

HEADER = ("run", "name", "state", *PROGRESS, "attempts", "")
EVALUATIONS_HEADER = ("evaluation", "job", "state", "measured", "")
ATTEMPTS_HEADER = ("attempt", "job", "started", "took", "nodes", "steps", "reason", "then")
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


# All runs.


class Row(NamedTuple):
    """What a row of the table is about: a run, or the runs of a sweep, newest first."""

    runs: list[RunDir]
    sweep: Sweep | None

    def cells(self, found: Mapping[Path, RunState]) -> list[str]:
        first = self.runs[0]
        if self.sweep is None:
            now = found[first.path]
            progress, attempts = columns.progress_cells(now), str(len(now.attempts))
            return [first.id, first.path.parent.name, now.status, *progress, attempts, columns.remark(now)]
        best = lowest(enumerate(found[run.path].progress for run in self.runs))
        words = f"{plural(len(self.runs), 'point')}: {columns.summary(columns.counts(found[run.path] for run in self.runs))}"
        words += f"; lowest {best.metric} {best.value:.4f} in {self.runs[best.point].id}" if best is not None else ""
        return [self.sweep.id, "", "sweep", *[""] * len(PROGRESS), "", words]


def _rows_of(runs: Iterable[RunDir]) -> list[Row]:
    """Return a row for each run that is no point of a sweep, and for each sweep; newest first if the last run is the newest."""
    is_sweep, rows = functools.cache(lookup.is_sweep), dict[Path, Row]()
    for run in reversed(list(runs)):
        folder = run.path.parent
        sweep = Sweep(folder) if is_sweep(folder) else None
        rows.setdefault(run.path if sweep is None else folder, Row([], sweep)).runs.append(run)
    return [*rows.values()]


def _chosen(runs: list[RunDir], arguments: argparse.Namespace) -> tuple[list[Row], dict[Path, RunState], int]:
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
        found = states_by_path(run for row in rows[:limit] for run in row.runs)
    else:
        found = states_by_path(runs)
        rows = [row for row in rows if arguments.state in {found[run.path].status for run in row.runs}]
    return rows[:limit], found, len(rows)


def _show_all(runs: list[RunDir], arguments: argparse.Namespace) -> None:
    """Print all runs, the newest first."""
    rows, found, count = _chosen(runs, arguments)
    if arguments.json:
        chosen = {run.path for row in rows for run in row.runs if arguments.state in (None, found[run.path].status)}
        print_json([run_object(run, found[run.path]) for run in runs if run.path in chosen])
        return
    print_table(HEADER, [row.cells(found) for row in rows])
    if len(rows) < count:
        print(f"\n{count - len(rows)} more: --limit {count} shows all; --name, --state and --since choose")
    columns.print_doubts(found.values())


# One run.


def _show_one(run_dir: RunDir, *, as_json: bool) -> None:
    from slurmtrain.report.goodput.run import goodput_of
    from slurmtrain.report.trouble import slow_ranks
    from slurmtrain.runs.node_blame import left_out_of

    evaluations = run_dir.all_evaluations()
    found = states([run_dir, *evaluations])
    now = found[run_dir.id]
    if now.status == RunStatus.UNREADABLE:
        raise UnreadableRecordError(now.explanation)
    if as_json:
        about = {
            "evaluations": [evaluation_object(each, found[each.id]) for each in evaluations],
            "left_out": left_out_of(run_dir, now.job_id),
            "slow_ranks": slow_ranks(run_dir.events()),
            "goodput": goodput_object(goodput_of(run_dir, alive=_alive(now))),
        }
        print_json(run_object(run_dir, now) | about)
        return
    print("\n".join(_lines(run_dir, now)))
    for header, rows in (
        (ATTEMPTS_HEADER, [_attempt_row(attempt, now) for attempt in now.attempts]),
        (EVALUATIONS_HEADER, [_evaluation_row(each, found[each.id]) for each in evaluations]),
    ):
        if rows:
            print()
            print_table(header, rows)
    columns.print_doubts([now])


def _lines(run_dir: RunDir, now: RunState) -> list[str]:
    """Return what there is to say of one run, without its attempts. What cannot be read is left out."""
    from slurmtrain.cli.usage import in_a_line
    from slurmtrain.report import trouble
    from slurmtrain.report.goodput.run import goodput_of

    info, events = run_dir.info(), run_dir.events()
    folders = [run_dir.attempt(each.number) for each in now.attempts]
    hung = [folder.hang_page for folder, each in zip(folders, now.attempts, strict=True) if each.reason == Reason.HANG]
    facts: dict[str, Callable[[], str]] = {
        "progress": lambda: _progress(now),
        "goodput": lambda: in_a_line(goodput_of(run_dir, alive=_alive(now))),
        "GPUs": lambda: _gpus([folder for folder in folders if folder.gpu_files()]),
        "numbers": lambda: trouble.trouble(events),
        "slow ranks": lambda: trouble.trouble_of_ranks(events),
        "checkpoints": lambda: trouble.trouble_of_checkpoints(events),
        "preflight": lambda: "".join(map(_findings, folders[-1:])),
        "left out": lambda: _left_out(run_dir, now.job_id) if now.alive and now.job_id is not None else "",
        "stacks": lambda: "".join(str(page) for page in hung[-1:] if page.exists()),
        "sweep": lambda: _place_in_sweep(run_dir),
        "program": lambda: _program(run_dir),
    }
    sentences = [f"run {run_dir.id} ({one_line(info['name'])}): {now.status}", f"  {printable(now.explanation)}"]
    for label, say in facts.items():
        with contextlib.suppress(UnreadableRecordError, ConfigError):
            sentences += [f"  {label}: {one_line(text)}"] if (text := say()) else []
    jobs = f" as job {', '.join(info['job_ids'])}" if info["job_ids"] else ""
    by = f"by {one_line(info['user'])} on {one_line(info['host'])}"
    sentences.append(f"  submitted {_time(info['created'])} {by}{jobs}")
    width = terminal_width()
    typed = [re.sub(r"^\+job\.args\.", "+", word) for word in info["overrides"] if not OF_PROGRAM.match(word)]
    return [
        *(line for sentence in sentences for line in columns.sentence_lines(sentence, 4, width)),
        f"  overrides: {one_line(shlex.join(typed)) or 'none'}",  # whole, to be pasted
        f"  {one_line(str(run_dir.path))}",
    ]


def _gpus(folders: list[AttemptDir]) -> str:
    """Say how busy the GPUs were, as the attempts with these folders have sampled them."""
    if not folders:
        return ""
    from slurmtrain.cli.usage import gpus_in_a_line
    from slurmtrain.runs.gpu_use import read_gpu_use, total_of

    return gpus_in_a_line(total_of(node for folder in folders for node in read_gpu_use(folder)))


def _findings(folder: AttemptDir) -> str:
    """Say what the checks of an attempt have found."""
    if not os.path.lexists(folder.preflight_file):
        return ""
    from slurmtrain.report.preflight import in_words, read_preflight

    found = read_preflight(folder)
    return in_words(found.findings) if found is not None else ""


def _left_out(run_dir: RunDir, job_id: str) -> str:
    """Say which nodes the job leaves out."""
    from slurmtrain.runs.node_blame import left_out_of

    return "; ".join(each.sentence(time.time()) for each in left_out_of(run_dir, job_id))


def _progress(now: RunState) -> str:
    """Describe the progress of a run in words; "" when it has logged nothing."""
    if now.progress.logged is None:
        return ""
    known = [f"{name} {cell}" for name, cell in zip(PROGRESS, columns.progress_cells(now), strict=True) if cell]
    ago = f"logged {roughly(max(0.0, time.time() - now.progress.logged))} ago"
    return "; ".join([*filter(None, [", ".join(known)]), ago])


def _place_in_sweep(run_dir: RunDir) -> str:
    """Say which point of its sweep a run is, since the overrides are those of all points; "" if it is not in a sweep."""
    if not lookup.is_sweep(run_dir.path.parent):
        return ""
    sweep = Sweep(run_dir.path.parent)
    point = next((point for point in sweep.points() if point.run_id == run_dir.id), None)
    if point is None:
        return ""
    values = " ".join(f"{key}={value}" for key, value in point.varied.items())
    return f"point {point.number} of {sweep.id}: {values or 'nothing varies'}"


def _program(run_dir: RunDir) -> str:
    """Return the words of the user's own program, with the values of this point of a sweep; "" of another job."""
    job = load_frozen(run_dir.config_file, with_secrets=False).job
    return shlex.join(shlex.split(job.command or "")) if job.kind == JobKind.COMMAND else ""


def _alive(now: RunState) -> bool | None:
    """Return whether a run is alive; None if SLURM, or its host, could not be asked."""
    return None if now.status == RunStatus.UNKNOWN else now.alive


def _evaluation_row(evaluation: RunDir, now: RunState) -> list[str]:
    found = evaluation.measured() if now.readable else {}
    losses = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if name.endswith("_loss"))
    return [evaluation.path.name, now.job_id or "-", now.status, losses or "-", now.explanation]


def _attempt_row(attempt: Attempt, now: RunState) -> list[str]:
    current = attempt is now.attempts[-1] and now.alive and not now.waits and attempt.ended is None
    # Before it has begun, the run's step is that of an earlier one.
    last = now.step if current and attempt.started else attempt.last_step
    end = attempt.ended or (time.time() if current else None)
    more = f" +{len(attempt.nodes) - 4}" if len(attempt.nodes) > 4 else ""
    return [
        str(attempt.number),
        attempt.job_id or "-",
        _time(attempt.started) if attempt.started else "-",
        f"{end - attempt.started:.0f} s" if end and attempt.started else "-",
        ",".join(attempt.nodes[:4]) + more or "-",
        "-".join("?" if step is None else str(step) for step in (attempt.first_step, last)),
        attempt.reason or (now.status if current else "?"),
        attempt.sentence or "",
    ]


def _time(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
