"""cancel, preempt and requeue stop a run, resume continues one; and what they share with other verbs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.choices import Backend, JobKind
from slurmtrain.cli.json_output import emit
from slurmtrain.control import stop
from slurmtrain.control.stop import claimed_alone, client, has_no_job, jobs_in_queue
from slurmtrain.errors import ClusterError, UnreadableRecordError, UsageError
from slurmtrain.report.status.state import RunState, RunStatus, state
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.attempts import all_attempts, reopen
from slurmtrain.runs.program_checkpoints import find_checkpoints, newest_complete
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.requests import RunAction
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system.paths import current_folder, runs_root
from slurmtrain.system.texts import roughly

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    run_dir = open_run(arguments.run)
    if arguments.verb == "cancel":
        said = stop.cancel(run_dir)
    elif arguments.verb == "requeue":
        said = stop.start_again(run_dir, RunAction.REQUEUE)
    else:
        said = stop.start_again(run_dir, RunAction.PREEMPT, about_to=lambda: log.info(_what_follows(run_dir)))
    say(run_dir, said, as_json=arguments.json)
    return 0


def _what_follows(run_dir: RunDir) -> str:
    """Say from which checkpoint a run starts again if it cannot save before it is stopped."""
    with contextlib.suppress(OSError):
        names = [path.name for path in committed(run_dir.checkpoints)]
        own = run_dir.info().get("own_checkpoints") or {}
        if not names and isinstance(own.get("pattern"), str):
            newest = newest_complete(find_checkpoints(run_dir.program_folders, own["pattern"], own.get("complete")))
            names = [newest.path.name] if newest is not None else []
        names = names or [Path(each.saved).name for each in all_attempts(run_dir) if each.saved is not None]
        if names:
            return f"run {run_dir.id} saves if it can, and starts again; without a new checkpoint it resumes from {names[-1]}"
    return f"run {run_dir.id} saves if it can, and starts again; now it would start at step 0: no checkpoint is visible"


def open_run(reference: str) -> RunDir:
    """Return the run that a person means by RUN, after a look that it is theirs and can be read whole."""
    run_dir = lookup.find(reference, runs_root())
    ownership.require_own(run_dir)
    run_dir.info(whole=True)
    say_which(reference, run_dir)
    return run_dir


def say_which(reference: str, found: RunDir | Sweep) -> None:
    """Say which run or sweep `last` or a part of a name stands for, before anything is done to it."""
    if reference == found.id or Path(reference).is_dir():
        return
    what = f"sweep {found.id}" if isinstance(found, Sweep) else f"run {found.id} ({found.path.parent.name})"
    try:
        when = f", submitted {roughly(max(0.0, time.time() - found.info()['created']))} ago"
    except (UnreadableRecordError, KeyError):
        when = ""
    log.info("%s is %s%s", reference, what, when)


def say(run_dir: RunDir, said: str, *, as_json: bool) -> None:
    """Print what was done to a run, for a person or for a program."""
    emit({"run": run_dir.id, "said": said, "job_ids": run_dir.info()["job_ids"]}, said, as_json=as_json)


def resume(options: argparse.Namespace) -> int:
    """Continue a run that has ended; return the exit code."""
    run_dir, overrides = open_run(options.run), options.overrides
    backend = run_dir.info()["backend"]
    local = backend == Backend.LOCAL
    if options.json and local:
        raise UsageError(f"--json: run {run_dir.id} would resume here, in the foreground, and print its output")
    with claimed_alone(run_dir):
        now = state(run_dir)
        _check_ended(run_dir, now, overrides)
        finished = now.status == RunStatus.FINISHED
        if finished and not (overrides or options.code):
            say(run_dir, f"run {run_dir.id} is finished: there is nothing to resume", as_json=options.json)
            return 0
        if finished:
            _check_lengthened(run_dir, now, overrides)
        if lookup.is_sweep(run_dir.path.parent):
            from slurmtrain.sweep.jobs import check_not_planned

            check_not_planned(run_dir)
        from slurmtrain.launch import job
        from slurmtrain.launch.changes import change, finish_change

        job.settle(run_dir)
        finish_change(run_dir)
        lines: list[str] = []
        if overrides or options.code:
            asks = client(run_dir) if backend == Backend.SLURM else None
            lines = change(run_dir, overrides, current_folder(), code=options.code, client=asks)
        if finished:
            reopen(run_dir, now.attempts[-1], run_dir.info()["steps"])
        run_dir.request_file.unlink(missing_ok=True)
        run_dir.event(Event.RESUME_ASKED)
        if local:
            from slurmtrain.supervise.platforms.local import run_local

            if lines:
                print("\n".join(lines), flush=True)
            return run_local(run_dir)
        try:
            if backend == Backend.KUBERNETES:
                from slurmtrain.launch import targets

                job_ids = [targets.submit(run_dir)]
            else:
                job_ids = job.resume(run_dir, client(run_dir))
        except KeyboardInterrupt:
            log.info(job.interrupted(run_dir))
            raise
    said = f"run {run_dir.id} is submitted again as job {', then '.join(job_ids)}"
    say(run_dir, "\n".join([said, *lines]), as_json=options.json)
    return 0


def _check_ended(run_dir: RunDir, now: RunState, overrides: Sequence[str]) -> None:
    """Raise ClusterError if a run is alive, or an earlier job of it is still in the queue."""
    if now.alive:
        hint = f"requeue {run_dir.id} restarts it"
        if overrides:
            hint = f"cancel {run_dir.id}, then repeat this command"
        if now.status == RunStatus.STOPPING:  # after `cancel`, for instance, when `requeue` would be refused
            hint = f"try again when it has ended; `status {run_dir.id}` says so"
        elif now.status == RunStatus.UNKNOWN:
            hint = "try again when SLURM answers"
            if run_dir.info()["backend"] == Backend.KUBERNETES:
                hint = "try again when kubectl answers"
            elif has_no_job(run_dir, now):
                last = now.attempts[-1]  # its host may have been a container that no longer exists
                record = run_dir.attempt(last.number).record_file
                hint = f"type `resume {run_dir.id}` there; if {last.host} is gone for good, remove {record} a minute before"
        raise ClusterError(f"run {run_dir.id} has not ended: {now.status}, {now.explanation}", hint=hint)
    before = [each for each in run_dir.info()["job_ids"] if each != now.job_id]
    left = [each for each in jobs_in_queue(run_dir, now) if each in before]
    if left:
        raise ClusterError(
            f"run {run_dir.id} has ended in its latest job, but an earlier one, {left[0]}, is still in the queue",
            hint=f"cancel {run_dir.id} takes it out",
        )


def _check_lengthened(run_dir: RunDir, now: RunState, overrides: Sequence[str]) -> None:
    """Look whether a finished run of the trainer is given more steps: then its last checkpoint is one on the way to them.

    Raises:
        UsageError: it is not, or the run is one of a sweep, whose results are in already.
    """
    from slurmtrain.config.frozen import load_frozen
    from slurmtrain.launch.changes import changed, with_steps

    config = load_frozen(run_dir.config_file, with_secrets=False)
    words = with_steps(overrides, config)
    done = now.attempts[-1].last_step
    more = (
        config.job.kind == JobKind.TRAIN
        and done is not None
        and changed(config, words, current_folder())[0].train.steps > done
    )
    if not more or lookup.is_sweep(run_dir.path.parent):
        raise UsageError(
            f"run {run_dir.id} is finished, so it cannot be changed, except to train more steps: train.steps=+100",
            hint="a program of your own and a point of a sweep cannot train more steps either: submit a new run, which "
            "can start from a checkpoint of this one (of the built-in trainer: checkpoint.restore_from=CHECKPOINT; "
            f"`checkpoints {run_dir.id}` lists them)",
        )
