"""sweep.pack: several runs share one job, each with an attempt, a step of srun and a verdict of its own.

The job ends when its last run has ended, and is requeued once when any of them is to go on. run.json says `packed` of a
run whose latest job is such a one.
"""

from __future__ import annotations

from slurmtrain.rundir import RunDir
from slurmtrain.runtime import attempts
from slurmtrain.runtime.judge import Verdict


def ended_before(run_dir: RunDir, job_id: str | None, restart_count: int) -> Verdict | None:
    """Whether there is nothing left to do for a run in its job, or its pack's, which starts: it is DONE, or came to its END.

    The job may start again for others' sake only, or by itself; and a run that waits, or has ended while others go on, can
    have been cancelled, or given another job.
    """
    numbers = run_dir.attempt_numbers()
    last = attempts.read_attempt(run_dir, numbers[-1]) if numbers else None
    if last is not None and last.verdict == Verdict.DONE:
        return Verdict.DONE
    job_ids = run_dir.info()["job_ids"]
    if (job_id in job_ids and job_ids[-1] != job_id) or attempts.cancelled_after(run_dir, last):
        return Verdict.END
    if last is None or restart_count == 0 or last.job_id not in (job_id, None):
        return None
    return Verdict.END if attempts.came_to_an_end(run_dir, last) else None
