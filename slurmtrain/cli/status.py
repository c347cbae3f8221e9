"""status: all runs, or one of them attempt by attempt."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from slurmtrain.cli.arguments import RUN_HELP, Parser
from slurmtrain.cli.columns import (
    PROGRESS,
    counts,
    doubts,
    one_line,
    print_sentence,
    print_table,
    progress_cells,
    progress_sentence,
    remark,
    sentence_lines,
    summary,
    table_lines,
    terminal_width,
    urgency,
)
from slurmtrain.cli.json_output import evaluation_object, goodput_object, print_json, run_object
from slurmtrain.cli.time_use import gpus_in_a_line, in_a_line
from slurmtrain.cli.watch import View, add_watch_options, check_watch_options, watch
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.goodput.run import goodput_of
from slurmtrain.report.preflight import in_words, read_preflight
from slurmtrain.report.status.look import states
from slurmtrain.report.status.state import WAITING, RunState, RunStatus
from slurmtrain.report.trouble import slow_ranks, trouble, trouble_of_checkpoints, trouble_of_ranks
from slurmtrain.runs import lookup
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.gpu_use import GpuTotals, read_gpu_use, total_of
from slurmtrain.runs.node_blame import left_out_of
from slurmtrain.runs.reasons import Reason
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

HEADER = ("run", "name", "state", *PROGRESS, "attempts", "")
EVALUATIONS_HEADER = ("evaluation", "job", "state", "measured", "")
ATTEMPTS_HEADER = ("attempt", "job", "started", "took", "nodes", "steps", "reason", "then")

Table = tuple[Sequence[str], list[list[str]]]


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser.of(verb)
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print an object, or a list of objects, for a program")
    add_watch_options(parser)
    options = parser.parse_args(words)
    check_watch_options(options)
    root = lookup.runs_root()
    run_dir = lookup.find(options.run, root) if options.run is not None else None
    if options.watch and run_dir is None:
        runs_or_refuse(root)
    if options.watch:
        return watch(lambda: _view_of(run_dir) if run_dir else _view(root), options.every)
    return _one(run_dir, as_json=options.json) if run_dir else _all(root, as_json=options.json)


def _all(root: Path, *, as_json: bool) -> int:
    runs = runs_or_refuse(root)
    found = states(runs)
    if as_json:
        print_json([run_object(run, found[run.id]) for run in runs])
        return 0
    print_table(HEADER, [_row(run, found[run.id]) for run in runs])
    say_doubts(found.values())
    return 0


def _row(run: RunDir, now: RunState) -> list[str]:
    return [run.id, run.path.parent.name, now.status, *progress_cells(now), str(len(now.attempts)), remark(now)]


def _view(root: Path) -> View:
    """Return all runs, first those that run, then those that wait, then those that have ended; the newest of each first."""
    runs = lookup.all_runs(root)
    found = states(runs)
    runs.sort(key=lambda run: run.id, reverse=True)
    runs.sort(key=lambda run: urgency(found[run.id]))
    lines = table_lines(HEADER, [_row(run, found[run.id]) for run in runs], terminal_width())
    over = not any(now.alive for now in found.values())
    return View([summary(counts(found.values())), "", *lines], doubts(found.values()), over)


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


def _one(run_dir: RunDir, *, as_json: bool) -> int:
    evaluations = run_dir.all_evaluations()
    found = states([run_dir, *evaluations])
    now = found[run_dir.id]
    if now.status == RunStatus.UNREADABLE:
        raise UnreadableRecordError(now.explanation)
    if as_json:
        objects = [evaluation_object(each, found[each.id]) for each in evaluations]
        left_out = [each.values() for each in left_out_of(run_dir, now.job_id)]
        used = goodput_object(goodput_of(run_dir, alive=_alive(now)))
        slow = [dataclasses.asdict(each) for each in slow_ranks(run_dir.events())]
        more = {
            "evaluations": objects,
            "left_out": left_out,
            "slow_ranks": slow,
            "next_change": _next_change(run_dir, now),
            "goodput": used,
        }
        print_json({**run_object(run_dir, now), **more})
        return 0
    print("\n".join(_lines(run_dir, now)))
    for table in _tables(evaluations, found, now):
        print()
        print_table(*table)
    say_doubts([now])
    return 0


def _tables(evaluations: Sequence[RunDir], found: Mapping[str, RunState], now: RunState) -> list[Table]:
    """Return header and rows of the attempts and of the evaluations by other jobs, if there are any."""
    attempts = [_attempt_row(attempt, now) for attempt in now.attempts]
    others = [_evaluation_row(each, found[each.id]) for each in evaluations]
    return [table for table in ((ATTEMPTS_HEADER, attempts), (EVALUATIONS_HEADER, others)) if table[1]]


def _evaluation_row(evaluation: RunDir, now: RunState) -> list[str]:
    found = evaluation.measured() if now.status != RunStatus.UNREADABLE else {}
    losses = {name: value for name, value in found.items() if name.endswith("_loss")}
    measured = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
    return [evaluation.path.name, now.job_id or "-", now.status, measured or "-", now.explanation]


def _view_of(run_dir: RunDir) -> View:
    evaluations = run_dir.all_evaluations()
    found = states([run_dir, *evaluations])
    now, width = found[run_dir.id], terminal_width()
    tables = [line for table in _tables(evaluations, found, now) for line in ("", *table_lines(*table, width))]
    over = not any(each.alive for each in found.values())
    return View([*_lines(run_dir, now), *tables], doubts([now]), over)


def _lines(run_dir: RunDir, now: RunState) -> list[str]:
    """Return what there is to say of one run, without its attempts."""
    info, progress = run_dir.info(), progress_sentence(now, time.time())
    jobs = f" as job {', '.join(info['job_ids'])}" if info["job_ids"] else ""
    sentences = [
        f"run {run_dir.id} ({one_line(info['name'])}): {now.status}",
        f"  {printable(now.explanation)}",
        *([f"  {progress}"] if progress else []),
        *([f"  goodput: {where}"] if (where := _time_use(run_dir, now)) else []),
        *([f"  GPUs: {busy}"] if (busy := gpus_in_a_line(_sampled(run_dir, now))) else []),
        *([f"  numbers: {one_line(broken)}"] if (broken := trouble(run_dir.events())) else []),
        *([f"  slow ranks: {one_line(slow)}"] if (slow := trouble_of_ranks(run_dir.events())) else []),
        *([f"  checkpoints: {one_line(odd)}"] if (odd := trouble_of_checkpoints(run_dir.events())) else []),
        *([f"  preflight: {one_line(found)}"] if (found := _preflight(run_dir, now)) else []),
        *([f"  left out: {one_line(left_out)}"] if (left_out := _left_out(run_dir, now)) else []),
        *([f"  next attempt: with {one_line(' '.join(change))}"] if (change := _next_change(run_dir, now)) else []),
        *([f"  stacks: {one_line(str(page))}"] if (page := _hang_page(run_dir, now)) else []),
        f"  submitted {_time(info['created'])} by {one_line(info['user'])} on {one_line(info['host'])}{jobs}",
        *([f"  {one_line(place)}"] if (place := _place_in_sweep(run_dir)) else []),
    ]
    width = terminal_width()
    return [
        *(line for sentence in sentences for line in sentence_lines(sentence, 4, width)),
        f"  overrides: {one_line(' '.join(info['overrides'])) or 'none'}",  # whole, to be copied
        f"  {one_line(str(run_dir.path))}",
    ]


def _place_in_sweep(run_dir: RunDir) -> str:
    """Say which point of its sweep a run is, since the overrides are those of all points; "" if it is not in a sweep."""
    if not lookup.is_sweep(run_dir.path.parent):
        return ""
    sweep = Sweep(run_dir.path.parent)
    try:
        found = [point for point in sweep.points() if point.run_id == run_dir.id]
    except UnreadableRecordError:
        return ""
    values = " ".join(f"{key}={value}" for key, value in found[0].varied.items()) if found else ""
    return f"point {found[0].number} of {sweep.id}: {values or 'nothing varies'}" if found else ""


def _time_use(run_dir: RunDir, now: RunState) -> str:
    """Say in a line where the time of a run went; "" before it was submitted."""
    try:
        return in_a_line(goodput_of(run_dir, alive=_alive(now)))
    except UnreadableRecordError:
        return ""


def _preflight(run_dir: RunDir, now: RunState) -> str:
    """Say in a line what the checks of the last attempt have found; "" if nothing."""
    if not now.attempts:
        return ""
    try:
        found = read_preflight(run_dir.attempt(now.attempts[-1].number))
    except UnreadableRecordError:
        return ""
    return in_words(found.findings) if found is not None else ""


def _sampled(run_dir: RunDir, now: RunState) -> GpuTotals:
    """Return what was sampled of the GPUs of all attempts."""
    return total_of(node for each in now.attempts for node in read_gpu_use(run_dir.attempt(each.number)))


def _alive(now: RunState) -> bool | None:
    """Return whether a run is alive; None if SLURM, or its host, could not be asked."""
    return None if now.status == RunStatus.UNKNOWN else now.alive


def _next_change(run_dir: RunDir, now: RunState) -> list[str]:
    """Return what `requeue RUN KEY=VALUE` has set for the next attempt of a run that has not ended."""
    if not now.alive or not run_dir.next_change_file.exists():
        return []
    from slurmtrain.launch.next_change import kept_for_next_attempt

    return kept_for_next_attempt(run_dir)


def _hang_page(run_dir: RunDir, now: RunState) -> Path | None:
    """Return the page on the newest attempt that hung; None if none did."""
    hung = [each.number for each in now.attempts if each.reason == Reason.HANG]
    page = run_dir.attempt(hung[-1]).hang_page if hung else None
    return page if page is not None and page.exists() else None


def _left_out(run_dir: RunDir, now: RunState) -> str:
    """Say which nodes the job of a run that has not ended leaves out because they are blamed; "" if none."""
    if not now.alive or now.job_id is None:
        return ""
    return "; ".join(each.sentence(time.time()) for each in left_out_of(run_dir, now.job_id))


def say_doubts(found: Iterable[RunState]) -> None:
    """Print why SLURM could not be asked, each reason once."""
    for doubt in doubts(found):
        print()
        print_sentence(f"SLURM cannot be asked: {printable(doubt)}", 2)


def _attempt_row(attempt: Attempt, now: RunState) -> list[str]:
    waits = now.status in WAITING
    current = attempt is now.attempts[-1] and now.alive and not waits and attempt.ended is None
    # Before it has begun, the run's step is that of an earlier one.
    last = now.step if current and attempt.started else attempt.last_step
    end = attempt.ended or (time.time() if current else None)
    nodes = ",".join(attempt.nodes[:4]) + (f" +{len(attempt.nodes) - 4}" if len(attempt.nodes) > 4 else "")
    return [
        str(attempt.number),
        attempt.job_id or "-",
        _time(attempt.started) if attempt.started else "-",
        f"{end - attempt.started:.0f} s" if end and attempt.started else "-",
        nodes or "-",
        f"{_number(attempt.first_step)}-{_number(last)}",
        attempt.reason or (now.status if current else "?"),
        attempt.sentence or "",
    ]


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _time(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
