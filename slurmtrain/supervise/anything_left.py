"""The question before an attempt is claimed in a job: is there anything left to do for the run?

There may be nothing, because SLURM starts a job again

- for the sake of the other runs that share it (sweep.pack; run.json says `packed` of a run whose latest job is such a one);
- although it has ended by itself: from 24.05 on, once more after each grace time of a preemption
  (`versions.STARTS_PREEMPTED_JOBS_ONCE_MORE`), and where slurmd or its batch step died before they could tell the end.
"""

from __future__ import annotations

import logging

from slurmtrain.config.schema import Config
from slurmtrain.runs import attempts, jobs, requests
from slurmtrain.runs.attempts import Attempt, came_to_an_end, read_claim
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_restart_count
from slurmtrain.slurm.job_facts import JobState
from slurmtrain.supervise.abandoned import close_abandoned
from slurmtrain.supervise.hooks import run_hook_of
from slurmtrain.supervise.requeue import ended_meanwhile
from slurmtrain.system.patience import RESTORE, patiently

log = logging.getLogger(__name__)


def look(run_dir: RunDir, config: Config, job_id: str, client: SlurmClient) -> Verdict | None:
    """Return what has been decided of a run that a job which starts therefore does not touch; None: its next attempt begins."""
    # A node that has just come up may not have its file systems right. Without an answer, the job trains what has ended.
    over = patiently(lambda: _ended(run_dir, config, job_id, client), RESTORE)
    if over is not None:
        log.info("run %s has ended before this start of job %s: %s", run_dir.id, job_id, over)
        jobs.cancel_rest(run_dir, job_id, client)
    return over


def _ended(run_dir: RunDir, config: Config, job_id: str, client: SlurmClient) -> Verdict | None:
    """Return DONE or END if a job that starts has nothing left to do for a run, else None."""
    info, tries = run_dir.info(), attempts.all_attempts(run_dir)
    last = tries[-1] if tries else None
    # An evaluation whose result was removed is to be measured again.
    again = run_dir.evaluated_run is not None and not run_dir.result_file.exists()
    if last is not None and last.verdict == Verdict.DONE and not again:
        return Verdict.DONE
    latest = info.get("chain") or info["job_ids"][-1:]
    if (job_id in info["job_ids"] and job_id not in latest) or requests.ended_after(run_dir, last) is not None:
        return Verdict.END
    if last is None:
        return None
    # Whoever was to judge it may be gone.
    closed = close_abandoned(run_dir, last.number + 1, config, client) if last.reason is None else {}
    last = closed.get(last.number, last)
    finished = bool(closed) and last.verdict == Verdict.DONE
    if finished or (_is_ours(run_dir, last, job_id) and came_to_an_end(run_dir, last)):
        if last.number in closed:
            run_hook_of(run_dir, last.number, config)
        return Verdict.DONE if finished else Verdict.END
    mine = [each for each in tries if each.job_id == job_id]
    if own_restart_count() and mine and mine[-1].reason == Reason.SUPERSEDED:
        return Verdict.END  # a newer job is at work
    facts = client.job(last.job_id) if last.job_id is not None and _continues(run_dir, last, job_id) else None
    # The scancel came when nothing was left in that job that could notice. SLURM remembers it for MinJobAge (300 s by default).
    if facts is not None and facts.state == JobState.CANCELLED:
        ended_meanwhile(run_dir, last.number, scancelled=True)
        return Verdict.END
    return None


def _is_ours(run_dir: RunDir, last: Attempt, job_id: str) -> bool:
    """Return whether an attempt is of this job, or of its chain; if not, a person may have resumed the run since."""
    info = run_dir.info()
    if info.get("chain"):
        return last.number > int(info.get("chain_after") or 0)
    job = last.job_id or read_claim(run_dir.attempt(last.number)).job_id
    return own_restart_count() > 0 and job in (job_id, None)


def _continues(run_dir: RunDir, last: Attempt, job_id: str) -> bool:
    """Return whether a job was submitted to continue after this attempt of another one: by that job or in its chain."""
    if last.job_id == job_id:
        return False
    if run_dir.info().get("chain"):
        return last.verdict == Verdict.NEXT and _is_ours(run_dir, last, job_id)
    submitted = [each for each in run_dir.events() if each["event"] == Event.SUBMITTED and each.get("job_id") == job_id]
    return bool(submitted) and submitted[-1].get("after_attempt") == last.number
