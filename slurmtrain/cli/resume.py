"""resume: continue a run that has ended."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from slurmtrain.choices import Backend, JobKind
from slurmtrain.cli.stop import open_run, say
from slurmtrain.control.stop import claimed_alone, client, has_no_job, jobs_in_queue
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.report.status.look import state
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs import lookup
from slurmtrain.runs.attempts import reopen
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    run_dir, overrides = open_run(options.run), options.overrides
    local = run_dir.info()["backend"] == Backend.LOCAL
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
        from slurmtrain.launch.changes import change, finish_change
        from slurmtrain.launch.job import interrupted, resume, settle

        settle(run_dir)
        finish_change(run_dir)
        lines: list[str] = []
        if overrides or options.code:
            asks = None if local else client(run_dir)
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
            job_ids = resume(run_dir, client(run_dir))
        except KeyboardInterrupt:
            log.info(interrupted(run_dir))
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
            hint = f"try again when it has ended; `status {run_dir.id} --watch` waits for that"
        elif now.status == RunStatus.UNKNOWN:
            hint = "try again when SLURM answers"
            if has_no_job(run_dir, now):
                last = now.attempts[-1]  # its host may have been a container that no longer exists
                record = run_dir.attempt(last.number).record_file
                hint = f"type `resume {run_dir.id}` there; if {last.host} is gone for good, remove {record} a minute before"
        raise ClusterError(f"run {run_dir.id} has not ended: {now.status}, {now.explanation}", hint=hint)
    before = [job for job in run_dir.info()["job_ids"] if job != now.job_id]
    left = [job for job in jobs_in_queue(run_dir, now) if job in before]
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
    from slurmtrain.launch.change_rules import with_steps
    from slurmtrain.launch.changes import changed

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
