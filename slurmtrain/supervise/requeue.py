"""Let a run go on after its job: SLURM requeues the job, or a further one is submitted (requeue.mode).

And the question before an attempt is claimed in a job that starts again: is there anything left to do for the run?

`go_on` is called when every rank has exited. No job is submitted twice: the further job has a token in its comment, by
which it is looked for before sbatch is called once more. No two jobs of a run work at the same time: each waits for the
one before.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Sequence

from slurmtrain.choices import RequeueMode
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, SlurmtrainError
from slurmtrain.launch.job import submit_existing_script, token
from slurmtrain.launch.node_exclusion import leave_out
from slurmtrain.runs import attempts, jobs, requests
from slurmtrain.runs.attempts import Attempt, came_to_an_end, read_claim
from slurmtrain.runs.decide import GoesOn, is_cancelled
from slurmtrain.runs.reasons import PRUNED_BY_SEARCH, Event, Reason, Verdict
from slurmtrain.runs.requests import RunAction
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_restart_count
from slurmtrain.slurm.job_facts import ENDED, JobFacts
from slurmtrain.supervise.end_of_attempt import close_abandoned
from slurmtrain.supervise.hooks import run_hook_of
from slurmtrain.system.patience import RESTORE, patiently

log = logging.getLogger(__name__)

TRIES = 3  # of a requeue that SLURM refuses: it may kill this process KillWait, 30 s, after its first TERM
# While SLURM does not answer there is nothing else to do, and nothing that would kill this job.
UNREACHED_S = 600.0
LONGEST_PAUSE_S = 15.0


def go_on(runs: Sequence[tuple[RunDir, int]], config: Config, job_id: str, client: SlurmClient) -> None:
    """Let these runs, which share a job, go on after their attempts with these numbers. The log says how.

    A run that cannot go on has ended: its last attempt says why, and it can be resumed.
    """
    try:
        if config.requeue.mode != RequeueMode.REQUEUE:
            _submit(runs, job_id, client)
        else:
            _requeue(runs, config, job_id, client)
    except Exception:  # an error of ours, which must not lose the runs
        resume = ", ".join(f"resume {run_dir.id}" for run_dir, _ in runs)
        log.exception("job %s cannot go on as it should; if it does not start again: %s", job_id, resume)
        if config.requeue.mode == RequeueMode.REQUEUE:
            with contextlib.suppress(ClusterError):
                client.requeue(job_id)


def _requeue(runs: Sequence[tuple[RunDir, int]], config: Config, job_id: str, client: SlurmClient) -> None:
    """Let SLURM start the job of these runs again; where it refuses, submit each of them as a new job.

    `scontrol requeue` revives a cancelled job. So a request to cancel is looked for directly before and directly after, and
    SLURM is told to requeue the job only while it runs, which a bare scancel ends: slurmctld does the one or the other.
    """
    runs = [run for run in runs if not ended_meanwhile(*run)]
    if not runs:
        log.info("cancelled: not requeued")
        return
    try:
        requeued = _is_requeued(job_id, client, attempts.read_attempt(*runs[0]).facts_when_told)
    except ClusterError as error:
        log.warning("job %s is not requeued: %s; submitting a new job instead", job_id, error.message)
        _submit(runs, job_id, client)
        return
    runs = [run for run in runs if not ended_meanwhile(*run, scancelled=not requeued)]
    if not runs:
        if requeued:
            client.cancel(job_id)
        log.info("cancelled: not requeued")
        return
    excluded = leave_out([run_dir for run_dir, _ in runs], job_id, client)
    if config.requeue.restart_delay_s:
        # SLURM holds a requeued job for about 121 s, until its credentials have expired. It may be asked for less.
        soon = f"now+{config.requeue.restart_delay_s}"
        try:
            client.update_pending(job_id, StartTime=soon)
        except ClusterError:  # a controller that was killed and started again may have forgotten the requeue
            with contextlib.suppress(ClusterError):
                if _is_requeued(job_id, client, attempts.read_attempt(*runs[0]).facts_when_told):
                    client.update_pending(job_id, StartTime=soon)
    log.info("job %s is requeued%s", job_id, f", without {excluded}" if excluded else "")


def _is_requeued(job_id: str, client: SlurmClient, told: JobFacts | None) -> bool:
    """Requeue a job, and return whether SLURM will start it again by its own count; False if it has been cancelled.

    A job that SLURM has ended by then, at the time limit for example, is requeued as well, once it is known that scancel has
    not ended it.

    Args:
        told: what SLURM said of the job when its ranks were told to stop.

    Raises:
        ClusterError: SLURM refuses, or cannot be reached for UNREACHED_S.
    """
    give_up, pause, tries, refused = time.monotonic() + UNREACHED_S, 1.0, 0, "SLURM does not know it any more"
    while True:
        try:
            facts = client.look(job_id)
            if facts is not None and facts.restarts > own_restart_count():
                return True  # requeued by us, or by SLURM itself
            if facts is not None and is_cancelled(facts, own_restart_count(), told):
                return False
            if facts is None or tries == TRIES:
                break
            tries, refused = tries + 1, "it has no more restarts than before"
            client.requeue(job_id, ended=facts.state in ENDED)
        except ClusterError as error:
            refused = error.message
            if time.monotonic() >= give_up:
                break
            time.sleep(pause * (1 + random.random() / 4))  # with many others, whose nodes were taken at the same moment
            pause = min(2 * pause, LONGEST_PAUSE_S)
    raise ClusterError(refused)


def _submit(runs: Sequence[tuple[RunDir, int]], job_id: str, client: SlurmClient) -> None:
    """Submit the script of each of these runs again. SLURM starts it when this job is completely gone.

    So no rank that lingers runs beside its successor.
    """
    for run_dir, number in runs:
        if ended_meanwhile(run_dir, number):
            log.info("run %s is cancelled: not submitted again", run_dir.id)
            continue
        attempt = attempts.read_attempt(run_dir, number)
        why = attempt.why or "stopped"
        try:
            new = submit_existing_script(run_dir, [job_id], token=token(run_dir, number))
        except Exception as error:  # the runs after it have nobody else who would submit them
            said = error.message if isinstance(error, SlurmtrainError) else f"{type(error).__name__}: {error}"
            attempts.change_outcome(run_dir, attempt, Verdict.END, f"{why}; no new job could be submitted: {said}")
            told = not isinstance(error, SlurmtrainError)
            log.error("no new job was submitted; continue with: resume %s: %s", run_dir.id, said, exc_info=told)
            continue
        facts = client.job(job_id)
        scancelled = facts is not None and is_cancelled(facts, own_restart_count(), attempt.facts_when_told)
        if ended_meanwhile(run_dir, number, scancelled=scancelled):  # while sbatch was at work
            client.cancel(new)
            continue
        if attempt.verdict != Verdict.RESUBMIT:  # it was to be requeued
            attempts.change_outcome(run_dir, attempt, Verdict.RESUBMIT, why, GoesOn.SUBMITTED)
        log.info("run %s is submitted again as job %s", run_dir.id, new)
        try:
            moved = client.pass_on_dependents(job_id, new)
        except ClusterError as error:  # they show it as DependencyNeverSatisfied, and can be submitted again
            log.warning("jobs that wait for this run may never start: %s", error.message)
            continue
        if moved:
            with contextlib.suppress(OSError):
                run_dir.event(Event.DEPENDENTS_PASSED_ON, job_ids=moved, job_id=new)


def ended_meanwhile(run_dir: RunDir, number: int, *, scancelled: bool = False) -> bool:
    """Return whether a person, or its search, has ended a run since the outcome of its attempt was decided; if so, record it.

    Args:
        scancelled: a bare scancel has.
    """
    attempt = attempts.read_attempt(run_dir, number)
    action = requests.ended_after(run_dir, attempt)
    if action is None and not scancelled:
        return False
    how = "cancelled by scancel before it started again"
    if action is not None:  # our `cancel` calls scancel, too
        how = PRUNED_BY_SEARCH if action is RunAction.PRUNE else "cancelled by `cancel RUN`"
    if action is RunAction.PRUNE:
        attempt.reason = Reason.PRUNED
    attempts.change_outcome(run_dir, attempt, Verdict.END, f"{attempt.why or 'stopped'}; {how}")
    return True


# Is anything left to do? There may be nothing, because SLURM starts a job again
#
# - for the sake of the other runs that share it (sweep.pack; run.json says `packed` of a run whose latest job is such a one);
# - although it has ended by itself: from 24.05 on, once more after each grace time of a preemption
#   (`parse_values.STARTS_PREEMPTED_JOBS_ONCE_MORE`), and where slurmd or its batch step died before they could tell the end.


def over_before(run_dir: RunDir, config: Config, job_id: str, client: SlurmClient) -> Verdict | None:
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
    return None


def _is_ours(run_dir: RunDir, last: Attempt, job_id: str) -> bool:
    """Return whether an attempt is of this job, or of its chain; if not, a person may have resumed the run since."""
    info = run_dir.info()
    if info.get("chain"):
        return last.number > int(info.get("chain_after") or 0)
    job = last.job_id or read_claim(run_dir.attempt(last.number))[0]
    return own_restart_count() > 0 and job in (job_id, None)
