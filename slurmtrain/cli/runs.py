"""The verbs that show the state of runs or control one: status, cancel, preempt, requeue, resume."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.columns import (
    PROGRESS,
    counts,
    doubts,
    one_line,
    print_table,
    progress_cells,
    progress_sentence,
    remark,
    summary,
    table_lines,
    terminal_width,
    urgency,
)
from slurmtrain.cli.json_output import evaluation_object, print_json, run_object
from slurmtrain.cli.watch import View, add_watch_options, check_watch_options, watch
from slurmtrain.errors import ClusterError, UnreadableRecord, UsageError
from slurmtrain.report.status import WAITING, RunState, process_lives, state, states
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.attempts import Attempt, reopen, write_request
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system.file_claims import Owner, claimed, is_claimed
from slurmtrain.system.paths import current_folder
from slurmtrain.system.records import printable

HEADER = ("run", "name", "state", *PROGRESS, "attempts", "")
OVERRIDE = re.compile(r"[+~]{0,2}\w[\w.@-]*=")  # not a path with a = in it
EVALUATIONS_HEADER = ("evaluation", "job", "state", "measured", "")
ATTEMPTS_HEADER = ("attempt", "job", "started", "took", "nodes", "steps", "reason", "then")


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser.of(verb)
    if verb == "status":
        parser.add_argument(
            "run", nargs="?", metavar="RUN", help="a run id, a unique beginning of one, a path, or last"
        )
        parser.add_argument("--json", action="store_true", help="print an object, or a list of them, for a program")
        add_watch_options(parser)
    else:
        parser.add_argument("run", metavar="RUN", help="a run id, a unique beginning of one, a path, or last")
        parser.add_argument("--json", action="store_true", help="print the answer as JSON, for a program")
    if verb == "resume":
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="continue with these values: --set KEY=VALUE KEY=VALUE ...",
        )
        parser.add_argument(
            "--code", action="store_true", help="take a new snapshot: continue with the code as it is now"
        )
        words = _with_each_set(words)
    options = parser.parse_args(words)
    root = lookup.runs_root()
    if verb == "status":
        return _status(options, root)
    run_dir = lookup.find(options.run, root)
    ownership.require_own(run_dir)
    run_dir.info(whole=True)
    if verb == "resume" and options.json and run_dir.info()["backend"] == "local":
        raise UsageError(f"--json: run {run_dir.id} is resumed here, in the foreground, and shows its output")
    verbs: dict[str, Callable[[RunDir], str | int]] = {
        "cancel": _cancel,
        "preempt": lambda run: _stop_and_start_again(run, "preempt", "TERM"),
        "requeue": lambda run: _stop_and_start_again(run, "requeue", "USR2"),
        "resume": lambda run: _resume(run, options.set, code=options.code),
    }
    said = verbs[verb](run_dir)
    if isinstance(said, int):
        return said
    if options.json:
        print_json({"run": run_dir.id, "said": said, "job_ids": run_dir.info()["job_ids"]})
    else:
        print(said)
    return 0


def _with_each_set(words: Sequence[str]) -> list[str]:
    """Put a --set before each further KEY=VALUE after one, as argparse reads them. A RUN may still follow.

    Raises:
        UsageError: there is a KEY=VALUE without any --set.
    """
    found: list[str] = []
    setting = False
    for before, word in zip(["", *words], words, strict=False):
        is_value = OVERRIDE.match(word) is not None
        if is_value and before != "--set" and not setting:
            raise UsageError(f"{word} after resume needs a --set before it", hint=f"--set {word}")
        if is_value and before != "--set":
            found.append("--set")
        found.append(word)
        setting = is_value or word.startswith("--set=")
    return found


def _status(options: argparse.Namespace, root: Path) -> int:
    check_watch_options(options)
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
    """Print how many folders are left out because they belong to another user."""
    closed = lookup.unreadable(root)
    if closed:
        what = "1 folder is" if len(closed) == 1 else f"{len(closed)} folders are"
        first = printable(str(closed[0]))
        print(f"slurmtrain: {what} left out, being somebody else's: {first} cannot be read", file=sys.stderr)


def _one(run_dir: RunDir, *, as_json: bool) -> int:
    evaluations = run_dir.all_evaluations()
    found = states([run_dir, *evaluations])
    now = found[run_dir.id]
    if now.status == "unreadable":
        raise UnreadableRecord(now.explanation)
    if as_json:
        objects = [evaluation_object(each, found[each.id]) for each in evaluations]
        print_json({**run_object(run_dir, now), "evaluations": objects})
        return 0
    print("\n".join(_lines(run_dir, now)))
    for table in _tables(evaluations, found, now):
        print()
        print_table(*table)
    say_doubts([now])
    return 0


Table = tuple[Sequence[str], list[list[str]]]


def _tables(evaluations: Sequence[RunDir], found: Mapping[str, RunState], now: RunState) -> list[Table]:
    """Return header and rows of the attempts and of the evaluations by other jobs, if there are any."""
    attempts = [_attempt_row(attempt, now) for attempt in now.attempts]
    others = [_evaluation_row(each, found[each.id]) for each in evaluations]
    return [table for table in ((ATTEMPTS_HEADER, attempts), (EVALUATIONS_HEADER, others)) if table[1]]


def _evaluation_row(evaluation: RunDir, now: RunState) -> list[str]:
    found = evaluation.measured() if now.status != "unreadable" else {}
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
    return [
        f"run {run_dir.id} ({one_line(info['name'])}): {now.status}",
        f"  {printable(now.explanation)}",
        *([f"  {progress}"] if progress else []),
        f"  submitted {_time(info['created'])} by {one_line(info['user'])} on {one_line(info['host'])}{jobs}",
        f"  overrides: {one_line(' '.join(info['overrides'])) or 'none'}",
        f"  {one_line(str(run_dir.path))}",
    ]


def say_doubts(found: Iterable[RunState]) -> None:
    """Print why SLURM could not be asked, each reason once."""
    for doubt in doubts(found):
        print(f"\nSLURM cannot be asked: {printable(doubt)}")


def _attempt_row(attempt: Attempt, now: RunState) -> list[str]:
    waits = now.status in WAITING
    current = attempt is now.attempts[-1] and now.alive and not waits and attempt.ended is None
    last = now.step if current else attempt.last_step
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


def _cancel(run_dir: RunDir) -> str:
    """End a run, and the jobs that evaluate its checkpoints."""
    said = [_cancel_one(run_dir)]
    if run_dir.info()["backend"] == "slurm" and is_claimed(_claimed_folder(run_dir)):
        with _alone(run_dir):  # somebody was resuming it at the same moment
            said = [_cancel_one(run_dir)]
    if run_dir.evaluations.exists():
        from slurmtrain.launch.evaluations import cancel_all

        ended = cancel_all([run_dir], _client(run_dir))
        said += [f"its evaluation {evaluation.path.name} is told to end" for evaluation in ended]
    return "\n".join(said)


def _cancel_one(run_dir: RunDir) -> str:
    now = state(run_dir)
    others = [job for job in _jobs_in_queue(run_dir, now) if job not in (now.job_id, *now.following)]
    if now.queued_again:
        _client(run_dir).cancel(_job_id(now), *others)
        return f"run {run_dir.id} has ended: {now.status}; its job {now.job_id} is taken out of the queue"
    if others and not (now.alive and now.own_job and not now.packed):
        with _asking(run_dir, "cancel"):
            _client(run_dir).cancel(*others)
    if not now.alive and not others:
        return f"run {run_dir.id} is not running: {now.explanation}"
    if not now.alive:
        pass
    elif _is_local(run_dir, now) or not now.own_job:
        _signal_rank_0(run_dir, now, "cancel", signal.SIGTERM)
    elif now.packed:
        _cancel_in_pack(run_dir, now)
    else:
        job_id = _job_id(now)
        with _asking(run_dir, "cancel"):
            # The last of a chain first: each would start when those before it are gone.
            _client(run_dir).cancel(*reversed(now.following), job_id, *others)
    run_dir.event("cancel asked")
    return f"run {run_dir.id} is told to end; it saves if time allows and does not come back"


def _jobs_in_queue(run_dir: RunDir, now: RunState) -> list[str]:
    """Return all jobs of the run that SLURM still has; none if it has no jobs, or SLURM cannot be asked."""
    if run_dir.info()["backend"] == "local" or now.slurm_error is not None:
        return []
    from slurmtrain.launch.own_jobs import in_queue

    return in_queue([run_dir], _client(run_dir))[run_dir.id]


def _cancel_in_pack(run_dir: RunDir, now: RunState) -> None:
    """End this run, but not the others of its job. A run that waits is left out when the job starts (again)."""
    _refuse_while_setting_up(run_dir, now)
    with _asking(run_dir, "cancel"):
        if now.status in ("running", "unknown"):
            _client(run_dir).signal(_step_id(now), "TERM")


def _stop_and_start_again(run_dir: RunDir, action: str, name: str) -> str:
    """Stop a running job for `preempt` or `requeue`, with the signal of a preemption or the early warning."""
    now = state(run_dir)
    if not now.alive:
        raise ClusterError(f"run {run_dir.id} is not running: {now.explanation}", hint=f"resume {run_dir.id}")
    if now.status in WAITING:
        if action == "preempt":
            raise ClusterError(
                f"run {run_dir.id} is not running but {now.status}", hint=f"requeue {run_dir.id} starts it now"
            )
        if now.status == "held":
            _client(run_dir).release(_job_id(now))
        _client(run_dir).start_now(_job_id(now))
        return f"run {run_dir.id} is asked to start now"
    _refuse_while_setting_up(run_dir, now)
    if now.status == "suspended":
        raise ClusterError(
            f"run {run_dir.id} is suspended, so it cannot save now: {now.explanation}",
            hint=f"`cancel {run_dir.id}` ends it",
        )
    if now.status == "stopping":
        raise ClusterError(f"run {run_dir.id} is leaving already: {now.explanation}", hint=f"status {run_dir.id}")
    next_step, asked = _next_step(run_dir, now), time.time()
    if _is_local(run_dir, now) or not now.own_job:
        _signal_rank_0(run_dir, now, action, signal.SIGTERM if name == "TERM" else signal.SIGUSR2)
    else:
        with _asking(run_dir, action):
            _client(run_dir).signal(_step_id(now) if now.packed else _job_id(now), name)
    run_dir.event(f"{action} asked")
    goes_on = f"leave; {next_step} (logs {run_dir.id} -f)"
    said = (
        f"run {run_dir.id} is told to save and {goes_on if next_step else f'end; `resume {run_dir.id}` continues it'}"
    )
    if action != "preempt" or _is_local(run_dir, now) or not now.own_job:
        return said
    return "\n".join([said, *_how_long_leaving_took(run_dir, now, asked)])


def _how_long_leaving_took(run_dir: RunDir, now: RunState, asked: float) -> list[str]:
    """Wait until the job has stopped, and return a sentence.

    Return nothing if SLURM does not say how long a preempted job may take.
    """
    from slurmtrain.config.compose import load_frozen
    from slurmtrain.report.leaving_time import leaving_sentence, time_to_leave, wait_until_left

    cluster = load_frozen(run_dir.config_file, with_secrets=False).cluster
    times = _client(run_dir).preemption_times(cluster.partition, cluster.qos)
    within_s = time_to_leave(times)
    if times is None or within_s is None:
        return []
    print(f"slurmtrain: waiting until it has stopped, for {within_s:.0f} s at most", file=sys.stderr, flush=True)
    left = wait_until_left(run_dir, now.attempts[-1].number, within_s)
    return [leaving_sentence(left, asked, within_s, times)]


def _refuse_while_setting_up(run_dir: RunDir, now: RunState) -> None:
    """Raise ClusterError if a signal would reach nobody, or a shell that ignores it."""
    if now.status == "starting":
        raise ClusterError(
            f"run {run_dir.id} is still setting up: {now.explanation}",
            hint=f"try again when `status {run_dir.id}` shows steps",
        )


def _step_id(now: RunState) -> str:
    """Return the step id of a running run.

    Raises:
        ClusterError: it cannot be known whether the run is running.
    """
    if now.slurm_error is not None:
        raise ClusterError(f"SLURM cannot be asked: {now.slurm_error}", hint="try again later")
    step_id = now.attempts[-1].step_id
    assert step_id is not None  # rank 0 writes it down before the run is called running
    return step_id


@contextlib.contextmanager
def _asking(run_dir: RunDir, action: str) -> Iterator[None]:
    """Leave the request for `finish-attempt` to find, and remove it again if it could not be passed on."""
    write_request(run_dir, action)
    try:
        yield
    except BaseException:
        run_dir.request_file.unlink(missing_ok=True)
        raise


def _is_local(run_dir: RunDir, now: RunState) -> bool:
    return run_dir.info()["backend"] == "local" or now.job_id is None


def _job_id(now: RunState) -> str:
    assert now.job_id is not None
    return now.job_id


def _next_step(run_dir: RunDir, now: RunState) -> str | None:
    """Describe how the run continues after a stop; None when it does not."""
    from slurmtrain.config.compose import load_frozen

    # The launchers write a log of every rank; ranks that somebody started by hand print where they were started.
    by_hand = not now.own_job and not run_dir.attempt(now.attempts[-1].number).rank_log(0).exists()
    if by_hand:
        return None
    config = load_frozen(run_dir.config_file, with_secrets=False)
    mode = "requeue" if config.cluster.backend == "local" and config.requeue.mode != "off" else config.requeue.mode
    if mode == "chain" and not now.following:
        return None
    if mode == "requeue" and now.packed:
        return "it is requeued and resumes by itself when the others of its pack have left, too"
    return {
        "requeue": "it is requeued and resumes by itself",
        "resubmit": "it is submitted again and resumes by itself",
        "chain": f"the next job of its chain, {', '.join(now.following[:1])}, resumes it",
    }.get(mode)


def _signal_rank_0(run_dir: RunDir, now: RunState, action: str, number: int) -> None:
    """Signal rank 0 of a run that has no job of its own; rank 0 tells the others.

    Raises:
        ClusterError: the run has no rank 0 yet, or none on this host.
    """
    last = now.attempts[-1] if now.attempts else None
    if last is None or last.pid is None or last.ended is not None:
        raise ClusterError(
            f"run {run_dir.id} is still setting up: {now.explanation}",
            hint=f"try again when `status {run_dir.id}` shows steps",
        )
    if not process_lives(last):
        if now.job_id is None or now.own_job:
            raise ClusterError(f"run {run_dir.id} runs on {last.host}", hint=f"type `{action} {run_dir.id}` there")
        # A job that does more than this run must not be ended, and it is not known which of its steps is ours.
        raise ClusterError(
            f"run {run_dir.id} was started by hand inside job {now.job_id}, which may do other things, on {last.host}",
            hint=f"Ctrl-C (twice for srun) where it was started, or `squeue --steps --jobs={now.job_id}` and "
            f"`scancel --signal=TERM {now.job_id}.STEP`",
        )
    with _asking(run_dir, action):
        try:
            os.kill(last.pid, number)
        except OSError as error:  # it has just left, or is somebody else's
            raise ClusterError(f"cannot signal rank 0, process {last.pid}: {error.strerror}") from None


def _resume(run_dir: RunDir, overrides: Sequence[str] = (), *, code: bool = False) -> str | int:
    """Resume a run; return what was done, or the exit code of a run that was resumed here, in the foreground.

    Args:
        overrides: fields of its config to change.
        code: use the code as it is now.
    """
    with _alone(run_dir):
        return _resume_alone(run_dir, overrides, code=code)


@contextlib.contextmanager
def _alone(run_dir: RunDir) -> Iterator[None]:
    """Claim the right to resume this run.

    A process that finds it ended must record its next job before another process looks.
    """

    def busy(owner: Owner) -> None:
        who = f"process {owner['pid']} on {owner['host']}"
        if run_dir.info()["backend"] == "local":  # it is at it until the run has ended
            raise ClusterError(f"{who} is running {run_dir.id} already", hint=f"status {run_dir.id}")
        print(f"slurmtrain: {who} is resuming it; waiting for that", file=sys.stderr, flush=True)

    with claimed(_claimed_folder(run_dir), busy):
        yield


def _claimed_folder(run_dir: RunDir) -> Path:
    """Return the folder of the claim to resume the run: that of all runs of a sweep, which `sweep retry` resumes together."""
    in_sweep = lookup.is_sweep(run_dir.path.parent) and run_dir.info()["backend"] == "slurm"
    return run_dir.path.parent / "arrays" if in_sweep else run_dir.path


def _resume_alone(run_dir: RunDir, overrides: Sequence[str], *, code: bool) -> str | int:
    now = state(run_dir)
    if now.alive:
        raise ClusterError(
            f"run {run_dir.id} has not ended: {now.status}, {now.explanation}",
            hint=_way_out(run_dir, now) if now.status == "unknown" else f"requeue {run_dir.id} restarts it",
        )
    before = [job for job in run_dir.info()["job_ids"] if job != now.job_id]
    left = [job for job in _jobs_in_queue(run_dir, now) if job in before]
    if left:
        raise ClusterError(
            f"run {run_dir.id} has ended in its latest job, but an earlier one, {left[0]}, is still in the queue",
            hint=f"cancel {run_dir.id} takes it out",
        )
    finished = now.status == "finished"
    if finished and (overrides or code):
        _check_lengthened(run_dir, now, overrides)
    elif finished:
        return f"run {run_dir.id} is finished: there is nothing to resume"
    if lookup.is_sweep(run_dir.path.parent):
        from slurmtrain.sweep.folder import check_not_planned

        check_not_planned(run_dir)
    from slurmtrain.launch.changes import change, undo_unfinished

    undo_unfinished(run_dir)
    if overrides or code:
        change(run_dir, overrides, current_folder(), code=code)
    if finished:
        reopen(run_dir, now.attempts[-1], run_dir.info()["steps"])
    run_dir.request_file.unlink(missing_ok=True)
    run_dir.event("resume asked")
    if run_dir.info()["backend"] == "local":
        from slurmtrain.launch.local import run_local

        return run_local(run_dir, lambda text: print(f"slurmtrain: {text}", flush=True))
    from slurmtrain.launch import resubmit

    try:
        job_ids = resubmit.resume(run_dir, _client(run_dir))
    except KeyboardInterrupt:
        from slurmtrain.launch.submit import interrupted

        print(f"slurmtrain: {interrupted(run_dir, _client(run_dir))}", file=sys.stderr, flush=True)
        raise
    return f"run {run_dir.id} is submitted again as job {', then '.join(job_ids)}"


def _check_lengthened(run_dir: RunDir, now: RunState, overrides: Sequence[str]) -> None:
    """Look whether a finished run of the trainer is given more steps: then its last checkpoint is one on the way to them.

    Raises:
        UsageError: it is not, or the run is one of a sweep, whose results are in already.
    """
    from slurmtrain.config.compose import load_frozen
    from slurmtrain.launch.changes import changed

    config = load_frozen(run_dir.config_file, with_secrets=False)
    done = now.attempts[-1].last_step
    more = (
        config.job.kind == "train"
        and done is not None
        and changed(config, overrides, current_folder()).train.steps > done
    )
    if not more or lookup.is_sweep(run_dir.path.parent):
        raise UsageError(
            f"run {run_dir.id} is finished, so nothing of it is changed, unless it trains on: --set train.steps=MORE",
            hint="that is for runs of the trainer by themselves; of others, submit a run with more train.steps and "
            f"checkpoint.restore_from=CHECKPOINT (`checkpoints {run_dir.id}` lists them)",
        )


def _way_out(run_dir: RunDir, now: RunState) -> str:
    if not _is_local(run_dir, now):
        return "try again when SLURM answers"
    last = now.attempts[-1]  # its host may have been a container that no longer exists
    record = run_dir.attempt(last.number).record_file
    return f"type `resume {run_dir.id}` there; if {last.host} is gone for good, remove {record} a minute before"


def _client(run_dir: RunDir) -> SlurmClient:
    return SlurmClient(run_dir.slurm_conf())


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _time(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
