"""Let a run go on after its job: SLURM requeues the job, or a further one is submitted (requeue.mode).

Called when every rank has exited. No job is submitted twice: the further job has a token in its comment, by which it is looked
for first. No two jobs of a run work at the same time: each waits for the one before.
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
from slurmtrain.launch.further_jobs import token, waiting_for
from slurmtrain.launch.next_change import apply_next_change
from slurmtrain.launch.node_exclusion import leave_out
from slurmtrain.launch.submit import note, submit_existing_script
from slurmtrain.launch.submit_once import Patience, TransientError, look_for
from slurmtrain.runs import attempts, requests
from slurmtrain.runs.events import Event
from slurmtrain.runs.job_tokens import TOKEN_PREFIX
from slurmtrain.runs.outcome import is_cancelled
from slurmtrain.runs.reasons import ENDS_RUN, PRUNED_BY_SEARCH, GoesOn, Reason, RunAction, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_restart_count
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.job_states import ENDED

log = logging.getLogger(__name__)

# Pauses between tries to submit. SLURM may kill this process KillWait, 30 s, after its first TERM.
TRIES_S = (1.0, 4.0)
# While SLURM does not answer there is nothing else to do, and nothing that would kill this job.
UNREACHED_S = 600.0
LONGEST_PAUSE_S = 15.0


class NotRequeuedError(ClusterError):
    """SLURM has refused to requeue the job, which has as many restarts as before."""


def go_on(runs: Sequence[tuple[RunDir, int]], config: Config, job_id: str, client: SlurmClient) -> None:
    """Let these runs go on, which share a job, after their attempts with these numbers; a sentence in the log says how.

    Raises:
        ClusterError: no new job could be submitted. A job that cannot be requeued only has a sentence in the log: then all has
            been tried.
    """
    in_new_job = False
    if len(runs) == 1 and runs[0][0].next_change_file.exists():
        in_new_job = apply_next_change(runs[0][0])  # this job has the script of before
    if in_new_job or config.requeue.mode != RequeueMode.REQUEUE:
        log.info(submit_each_again(runs, job_id, client))
        return
    try:
        delay_s = config.requeue.restart_delay_s
        log.info(requeue(runs, job_id, client, restart_count=own_restart_count(), delay_s=delay_s))
    except ClusterError as error:
        resume = ", ".join(f"resume {run_dir.id}" for run_dir, _ in runs)
        named = (error.hint or "").startswith("continue with: ")  # of a pack: only those runs that have no job
        hint = error.hint if named else f"continue with: {resume}"
        log.error("job %s is not requeued: %s; %s", job_id, error.message, hint)


def requeue(
    runs: Sequence[tuple[RunDir, int]],
    job_id: str,
    client: SlurmClient,
    *,
    restart_count: int,
    delay_s: int = 0,
) -> str:
    """Let SLURM start the job `job_id` of these attempts again, whose ranks have all exited.

    `scontrol requeue` revives a cancelled job. So a request to cancel is looked for directly before and directly after, and
    SLURM is told to requeue the job only while it runs, which a bare scancel ends: slurmctld does the one or the other.
    Success is read from the job's count of restarts; if SLURM refuses, each run that is to continue is submitted as a
    new job.

    Args:
        runs: runs with their last attempts; several share one job (sweep.pack).
        restart_count: the restart count of the present start of the job.
        delay_s: seconds after which SLURM should start it; 0: SLURM's own time, about 121 s.

    Returns:
        What was done, as a sentence.

    Raises:
        ClusterError: SLURM did neither. The attempts' records say so, and the runs can be resumed.
    """
    going_on = [run for run in runs if not _ended_by_cancel(*run)]
    if not going_on:
        return "cancelled: not requeued"
    try:
        told = attempts.read_attempt(*going_on[0]).facts_when_told
        requeued = _requeue(job_id, client, restart_count, told)
    except NotRequeuedError as error:
        log.warning("%s; submitting a new job instead", error.message)
        return submit_each_again(going_on, job_id, client)
    except ClusterError as error:
        for run_dir, number in going_on:
            _end(run_dir, number, f"its job could not be requeued: {error.message}")
        raise
    if not requeued:
        for run_dir, number in going_on:
            if not _ended_by_cancel(run_dir, number):  # our `cancel` calls scancel, too
                _end(run_dir, number, "cancelled by scancel before it was requeued")
        return "cancelled: not requeued"
    going_on = [run for run in going_on if not _ended_by_cancel(*run)]
    if not going_on:
        client.cancel(job_id)
        return "cancelled: taken out of the queue again"
    excluded = leave_out([run_dir for run_dir, _ in going_on], job_id, client)
    if delay_s:
        # SLURM holds a requeued job until its credentials have expired. It may be asked for less.
        with contextlib.suppress(ClusterError):
            client.update_pending(job_id, StartTime=f"now+{delay_s}")
    return f"job {job_id} is requeued" + (f", without {excluded}" if excluded else "")


def _requeue(
    job_id: str,
    client: SlurmClient,
    restart_count: int,
    told: JobFacts | None,
) -> bool:
    """Requeue a job and check that it is requeued; return False if it has been cancelled.

    A job that SLURM has ended by then, at the time limit for example, is requeued as well, once it is known that scancel has
    not ended it.

    Raises:
        NotRequeuedError: SLURM answers, and refuses.
        ClusterError: SLURM cannot be reached for UNREACHED_S.
    """
    give_up = time.monotonic() + UNREACHED_S
    pauses = list(TRIES_S)
    pause, refused = 1.0, ""
    while True:
        try:
            facts = client.look(job_id)
            if facts is None:
                raise NotRequeuedError(f"SLURM no longer knows job {job_id}")
            if facts.restarts > restart_count:
                return True  # requeued by us, or by SLURM itself
            if is_cancelled(facts, restart_count, told):
                return False
            if refused:  # SLURM is there, and the job is not back in the queue
                if not pauses:
                    raise NotRequeuedError(refused)
                time.sleep(pauses.pop(0))
            refused = f"job {job_id} has no more restarts than before"
            try:
                client.requeue(job_id, ended=facts.state in ENDED)
            except ClusterError as error:
                refused = error.message
        except NotRequeuedError:
            raise
        except ClusterError:
            if time.monotonic() >= give_up:
                raise
            time.sleep(pause * (1 + random.random() / 4))  # with many others, whose nodes were taken at the same moment
            pause, refused = min(2 * pause, LONGEST_PAUSE_S), ""


def submit_each_again(
    runs: Sequence[tuple[RunDir, int]],
    job_id: str,
    client: SlurmClient,
) -> str:
    """Submit the script of each of these runs again, as `submit_again`, and return what was done, as a sentence.

    Raises:
        ClusterError: SLURM accepted no job for some of them. The records of their attempts say so, and the message names
            them and the jobs of the others.
    """
    jobs: list[str] = []
    failed: dict[str, str] = {}
    for run_dir, number in runs:
        try:
            new = submit_again(run_dir, number, job_id, client)
        except Exception as error:  # the runs after it have nobody else who would submit them
            if len(runs) == 1:
                raise
            failed[run_dir.id] = error.message if isinstance(error, SlurmtrainError) else str(error)
            continue
        jobs += [new] if new is not None else []
    done = f"submitted again as job {', '.join(jobs)}" if jobs else "cancelled: not submitted again"
    if not failed:
        return done
    words = "; ".join(f"run {run_id}: {why}" for run_id, why in failed.items())
    raise ClusterError(
        f"no new job could be submitted for {len(failed)} of {len(runs)} runs: {words}" + (f"; {done}" if jobs else ""),
        hint=f"continue with: {', '.join(f'resume {run_id}' for run_id in failed)}",
    )


def submit_again(run_dir: RunDir, number: int, job_id: str, client: SlurmClient) -> str | None:
    """Submit the script again after attempt `number` in job `job_id`, whose ranks have all exited.

    Returns:
        The new job; None when the run was cancelled meanwhile.

    Raises:
        ClusterError: SLURM accepted no new job. The attempt's record says so, and the run can be resumed.
    """
    if _ended_by_cancel(run_dir, number):
        return None
    try:
        new = _find_or_submit(run_dir, number, job_id, client)
    except Exception as error:
        words = error.message if isinstance(error, SlurmtrainError) else str(error)
        _end(run_dir, number, f"no new job could be submitted: {words}")
        raise
    if _ended_by_cancel(run_dir, number):  # while sbatch was at work
        client.cancel(new)
        return None
    if _scancelled(run_dir, number, job_id, client):
        _end(run_dir, number, "cancelled by scancel before it was submitted again")
        client.cancel(new)
        return None
    attempt = attempts.read_attempt(run_dir, number)
    if attempt.verdict != Verdict.RESUBMIT:  # it was to be requeued
        attempt.verdict = Verdict.RESUBMIT
        attempt.say(attempt.why or "stopped", GoesOn.SUBMITTED)
        with contextlib.suppress(OSError):  # a full disk: the new job is there all the same
            attempts.write_attempt(run_dir, attempt)
    _pass_on_dependents(run_dir, job_id, new, client)
    return new


def _find_or_submit(run_dir: RunDir, number: int, job_id: str, client: SlurmClient) -> str:
    mine = token(run_dir, number)

    def options(script: str) -> list[str]:
        # SLURM starts it when this job is completely gone, so that no rank that lingers runs beside its successor.
        return waiting_for(script, [job_id])

    unsure = False  # whether an sbatch before this may have worked
    for pause in (*TRIES_S, None):
        try:
            found = _job_with(mine, run_dir, client) if unsure else _job_seen_with(mine, client)
            if found is None:
                return submit_existing_script(run_dir, options, token=mine, after_attempt=number)
        except ClusterError as error:  # the controller may be busy
            unsure = unsure or (isinstance(error, TransientError) and error.may_be_there)
            if pause is not None:
                time.sleep(pause)
                continue
            found = _job_with(mine, run_dir, client) if unsure else None
            if found is None:
                raise
        if found not in run_dir.info()["job_ids"]:
            note(run_dir, found, found_by=TOKEN_PREFIX + mine)
        return found
    raise AssertionError("unreachable")


def _job_seen_with(mine: str, client: SlurmClient) -> str | None:
    return next(iter(client.find_by_comment(TOKEN_PREFIX + mine)), None)


def _job_with(mine: str, run_dir: RunDir, client: SlurmClient) -> str | None:
    """Return the job with this token, or None when SLURM has said often enough that there is none.

    It may take a job a little after sbatch has given up. Two jobs would both start when this one is gone.
    """
    return look_for(mine, client, Patience(), time.sleep, f"`resume {run_dir.id}` looks for it first")


def _pass_on_dependents(run_dir: RunDir, job_id: str, new: str, client: SlurmClient) -> None:
    """Let jobs that were submitted with --after this run wait for the success of the new job."""
    try:
        moved = client.pass_on_dependents(job_id, new)
    except ClusterError as error:  # they show it as DependencyNeverSatisfied, and can be submitted again
        log.warning("jobs that wait for this run may never start: %s", error.message)
        return
    if moved:
        with contextlib.suppress(OSError):
            run_dir.event(Event.DEPENDENTS_PASSED_ON, job_ids=moved, job_id=new)


def _ended_by_cancel(run_dir: RunDir, number: int) -> bool:
    """Return whether a person has cancelled the run since the outcome of attempt `number` was decided; if so, record it."""
    request = requests.read_request(run_dir.request_file)  # the judge has taken the one that it has seen
    if request is None or request.action not in ENDS_RUN:
        return False
    if request.action == RunAction.PRUNE:
        _end(run_dir, number, PRUNED_BY_SEARCH, Reason.PRUNED)
    else:
        _end(run_dir, number, "cancelled by `cancel RUN`")
    return True


def _scancelled(run_dir: RunDir, number: int, job_id: str, client: SlurmClient) -> bool:
    """Return whether scancel has ended the job of an attempt. The next job finds a later scancel: see `begin`."""
    attempt, facts = attempts.read_attempt(run_dir, number), client.job(job_id)
    return facts is not None and is_cancelled(facts, attempt.restart_count, attempt.facts_when_told)


def _end(run_dir: RunDir, number: int, why: str, reason: Reason | None = None) -> None:
    attempt = attempts.read_attempt(run_dir, number)
    attempt.verdict, attempt.reason = Verdict.END, reason or attempt.reason
    attempt.say(f"{attempt.why or 'stopped'}; {why}")
    try:
        attempts.write_attempt(run_dir, attempt)
        run_dir.event(Event.NOT_STARTED_AGAIN, attempt=number, sentence=attempt.sentence)
    except OSError as error:  # a full disk: what was decided holds all the same, and the batch script must not undo it
        log.warning("cannot record that run %s %s: %s", run_dir.id, why, error)
