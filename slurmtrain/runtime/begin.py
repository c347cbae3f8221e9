"""The question that a job asks before it claims an attempt: is there anything left to do for the run?

There may be nothing, because SLURM starts a job again

- for the sake of the other runs that share it (sweep.pack; run.json says `packed` of a run whose latest job is such a one);
- although it has ended by itself: from 24.05 on, once more after each grace time of a preemption
  (`versions.STARTS_PREEMPTED_JOBS_ONCE_MORE`), and where slurmd or its batch step died before they could tell the end.

The jobs of a chain ask `chain.ended_before` instead.
"""

from __future__ import annotations

from slurmtrain.config.schema import Config
from slurmtrain.rundir import RunDir
from slurmtrain.runtime import attempts, chain
from slurmtrain.runtime.attempts import Attempt
from slurmtrain.runtime.judge import Reason, Verdict
from slurmtrain.runtime.settle import close_abandoned, own_job_id, run_hook_of, spent_by
from slurmtrain.runtime.slurm import SlurmClient


def ended_before(run_dir: RunDir, job_id: str | None, restart_count: int) -> Verdict | None:
    """Return DONE or END if a job that starts has nothing left to do for a run, else None.

    A run that waits, or that has ended while others of its job go on, can have been cancelled, or given another job.

    Args:
        job_id: the job that starts; for an array, the task.
        restart_count: how often SLURM has started it before.
    """
    numbers = run_dir.attempt_numbers()
    last = attempts.read_attempt(run_dir, numbers[-1]) if numbers else None
    if last is not None and last.verdict == Verdict.DONE and not _is_evaluated_anew(run_dir):
        return Verdict.DONE
    job_ids = run_dir.info()["job_ids"]
    if (job_id in job_ids and job_ids[-1] != job_id) or attempts.cancelled_after(run_dir, last):
        return Verdict.END
    if _is_superseded(run_dir, job_id):
        return Verdict.END
    if last is None or restart_count == 0 or last.job_id not in (job_id, None):
        return None
    return Verdict.END if attempts.came_to_an_end(run_dir, last) else None


def budget_used_up(run_dir: RunDir, config: Config, client: SlurmClient | None) -> Verdict | None:
    """Complete the records of lost attempts, and return DONE or END, once it is recorded, if the run is over with that.

    It had finished, or a person had cancelled it, and the process that was to record that was killed; or the lost
    attempts have used up the budget: a run that takes its node down leaves no process that could count, and would go
    from node to node.

    Args:
        client: None outside of SLURM.
    """
    numbers = run_dir.attempt_numbers()
    if not numbers:
        return None
    closed = close_abandoned(run_dir, numbers[-1] + 1, config, client)
    last = attempts.read_attempt(run_dir, numbers[-1])
    if last.verdict in (Verdict.DONE, Verdict.END):
        if last.number not in closed or not (last.verdict == Verdict.DONE or _is_of_this_life(run_dir, last)):
            return None
        run_hook_of(run_dir, last.number, config)
        return Verdict(last.verdict)
    spent = spent_by(attempts.all_attempts(run_dir), config)
    if spent is None:
        return None
    said = (last.sentence or "").rpartition("; ")[0] or "ended"  # without what was to come next
    last.verdict, last.sentence = Verdict.END, f"{said}; {spent}"
    attempts.write_attempt(run_dir, last)
    run_dir.event("given up", attempt=last.number, sentence=last.sentence)
    run_hook_of(run_dir, last.number, config)
    return Verdict.END


def _is_evaluated_anew(run_dir: RunDir) -> bool:
    """Return whether this is an evaluation whose result was removed so that it is measured again."""
    return run_dir.evaluated_run is not None and not run_dir.result_file.exists()


def _is_of_this_life(run_dir: RunDir, last: Attempt) -> bool:
    """Return whether an attempt belongs to the job that starts, or to its chain; if not, a person has resumed the run since."""
    info = run_dir.info()
    if chain.links(info):
        return last.number > int(info.get("chain_after") or 0)
    job_id = last.job_id if last.started else attempts.claimed_by(run_dir.attempt(last.number))[0]
    return job_id in (own_job_id(), None)


def _is_superseded(run_dir: RunDir, job_id: str | None) -> bool:
    """Return whether this job was told before that a newer one is at work for the run."""
    mine = [attempt for attempt in attempts.all_attempts(run_dir) if job_id is not None and attempt.job_id == job_id]
    return bool(mine) and mine[-1].reason == Reason.SUPERSEDED


def record_leaving(run_dir: RunDir, job_id: str | None) -> None:
    """Record in the last attempt, for `status`, that a start of its job had nothing left to do."""
    run_dir.event("left at once", job_id=job_id)
    last = attempts.read_attempt(run_dir, run_dir.attempt_numbers()[-1])
    if last.job_id == job_id:
        last.started_again += 1
        attempts.write_attempt(run_dir, last)
