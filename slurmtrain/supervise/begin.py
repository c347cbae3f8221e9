"""The question before an attempt is claimed in a job: is there anything left to do for the run?

There may be nothing, because SLURM starts a job again

- for the sake of the other runs that share it (sweep.pack; run.json says `packed` of a run whose latest job is such a one);
- although it has ended by itself: from 24.05 on, once more after each grace time of a preemption
  (`versions.STARTS_PREEMPTED_JOBS_ONCE_MORE`), and where slurmd or its batch step died before they could tell the end.

The jobs of a chain ask `chain.ended_before` instead.
"""

from __future__ import annotations

import contextlib
import logging
import time
from enum import StrEnum

from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError
from slurmtrain.launch.next_change import make_in_this_job
from slurmtrain.runs import attempt_history, attempts, batch_claim, chain, requests
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.evidence import Evidence
from slurmtrain.runs.outcome import AttemptOutcome, budget_spent
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id, own_restart_count
from slurmtrain.slurm.job_states import JobState
from slurmtrain.supervise.abandoned import close_abandoned
from slurmtrain.supervise.evidence import node_records, progress_is_visible
from slurmtrain.supervise.finish import run_hook_of
from slurmtrain.supervise.policy import policy
from slurmtrain.system.patience import RESTORE, patiently

log = logging.getLogger(__name__)


class Start(StrEnum):
    """What a job that starts has to do for a run."""

    GO = "go"
    DONE = "done"  # nothing: it has finished
    END = "end"  # nothing: it has ended in another way, or another job has it
    ELSEWHERE = "elsewhere"  # SLURM has started this job again by itself, but the run goes on with another script


def look(run_dir: RunDir, config: Config, job_id: str, client: SlurmClient) -> Start:
    """Say what a job that starts has to do for a run. If it is nothing, the rest of its chain is taken out of the queue."""
    restart_count = own_restart_count()

    def ended() -> tuple[bool, Verdict | None]:
        in_chain = bool(chain.links(run_dir.info()))
        return in_chain, chain.ended_before(run_dir) if in_chain else ended_before(run_dir, job_id, restart_count)

    # A node that has just come up may not have its file systems right. Without an answer, the job trains what has ended.
    in_chain, over = patiently(ended, RESTORE)
    if over is None and not restart_count:
        over = scancelled_before(run_dir, job_id, client)
    if over is None and (restart_count or in_chain):
        over = budget_used_up(run_dir, config, client)
    if over is not None:
        log.info("run %s has ended before this start of job %s: %s", run_dir.id, job_id, over)
        if restart_count:
            with contextlib.suppress(OSError):  # a full disk must not start what has ended
                record_leaving(run_dir, job_id)
        cancel_rest(run_dir, job_id, client)
        return Start.DONE if over is Verdict.DONE else Start.END
    changes = restart_count and run_dir.next_change_file.exists() and run_dir.attempt_numbers()
    return Start.ELSEWHERE if changes and not make_in_this_job(run_dir) else Start.GO


def cancel_rest(run_dir: RunDir, job_id: str, client: SlurmClient) -> None:
    """Take the rest of the chain out of the queue; if SLURM refuses, each of its jobs finds out when it starts."""
    try:
        chain.cancel_rest(run_dir, job_id, client)
    except ClusterError as error:
        log.warning("cannot cancel the rest of the chain: %s", error.message)


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
    if (job_id in job_ids and job_ids[-1] != job_id) or requests.cancelled_after(run_dir, last):
        return Verdict.END
    if _is_superseded(run_dir, job_id, restart_count):
        return Verdict.END
    if last is None or restart_count == 0:
        return None
    if last.job_id is not None and not _is_of_this_job(run_dir, last, job_id, restart_count):
        return None
    return Verdict.END if attempt_history.came_to_an_end(run_dir, last) else None


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
    last = closed.get(numbers[-1]) or attempts.read_attempt(run_dir, numbers[-1])
    if last.verdict in (Verdict.DONE, Verdict.END):
        if last.number not in closed or not (last.verdict == Verdict.DONE or _is_of_this_life(run_dir, last)):
            return None
        run_hook_of(run_dir, last.number, config)
        return Verdict(last.verdict)
    spent = _spent_by(run_dir, config)
    if spent is None:
        return None
    last.verdict = Verdict.END
    last.say(last.why or "ended", spent)
    with contextlib.suppress(OSError):  # a full disk must not start it again
        attempts.write_attempt(run_dir, last)
        run_dir.event(Event.GIVEN_UP, attempt=last.number, sentence=last.sentence)
    run_hook_of(run_dir, last.number, config)
    return Verdict.END


def _spent_by(run_dir: RunDir, config: Config) -> str | None:
    """Say why the last attempt of a run, which has an outcome, has used up a budget; return None while there may be others."""
    tries = attempts.all_attempts(run_dir)
    last = tries[-1]
    if not last.stalled:
        return None
    counted = attempt_history.stalled_numbers(tries, last.number)
    evidence = Evidence(
        exit_code=last.exit_code or 1,
        program_code=last.program_code,
        progress_visible=progress_is_visible(last, config),
        stalled_before=len(counted),
        unseen_before=attempt_history.unseen_before(tries, last.number),
        run=run_dir.id,
        number=last.number,
        now=time.time(),
        stalled_numbers=tuple(counted),
        node_records=tuple(node_records(run_dir, tries, config)),
    )
    outcome = AttemptOutcome(Reason.CRASH, Verdict.END, "", stalled=not last.unseen, unseen=last.unseen)
    return budget_spent(outcome, evidence, policy(config))


def scancelled_before(run_dir: RunDir, job_id: str | None, client: SlurmClient) -> Verdict | None:
    """Record and return END if this job was to continue after a job that a bare scancel has ended since; else None.

    That scancel came after the job before had handed the run over, when nothing was left in it that could notice. SLURM
    remembers it for MinJobAge (300 s by default). A run that a person has resumed continues, whatever ended the job before.
    """
    numbers = run_dir.attempt_numbers()
    last = attempts.read_attempt(run_dir, numbers[-1]) if numbers else None
    if last is None or last.job_id in (None, job_id) or not _goes_on_after(run_dir, last, job_id):
        return None
    facts = client.job(last.job_id or "")
    if facts is None or facts.state != JobState.CANCELLED or (facts.start_time or 0.0) > (last.ended or time.time()):
        return None
    last.verdict = Verdict.END
    last.say(f"{last.why or 'stopped'}; {_SCANCELLED}")
    with contextlib.suppress(OSError):
        attempts.write_attempt(run_dir, last)
        run_dir.event(Event.NOT_STARTED_AGAIN, attempt=last.number, sentence=last.sentence)
    return Verdict.END


_SCANCELLED = "cancelled by scancel before its next job began"


def _goes_on_after(run_dir: RunDir, last: Attempt, job_id: str | None) -> bool:
    """Return whether a job was submitted to continue after this attempt, by its own job or in its chain, not by `resume`."""
    info = run_dir.info()
    if chain.links(info):
        return last.verdict == Verdict.NEXT and last.number > int(info.get("chain_after") or 0)
    if last.verdict != Verdict.RESUBMIT:
        return False
    mine = [event for event in run_dir.events() if event["event"] == Event.SUBMITTED and event.get("job_id") == job_id]
    if not mine:
        return False
    found_by = str(mine[-1].get("found_by"))  # the token, if the submitter was killed before it noted the job
    return mine[-1].get("after_attempt") == last.number or found_by.endswith(f":{run_dir.id}:{last.number}")


def _is_evaluated_anew(run_dir: RunDir) -> bool:
    """Return whether this is an evaluation whose result was removed so that it is measured again."""
    return run_dir.evaluated_run is not None and not run_dir.result_file.exists()


def _is_of_this_life(run_dir: RunDir, last: Attempt) -> bool:
    """Return whether an attempt belongs to the job that starts, or to its chain; if not, a person has resumed the run since."""
    info = run_dir.info()
    if chain.links(info):
        return last.number > int(info.get("chain_after") or 0)
    if last.started:
        return last.job_id is None or _is_of_this_job(run_dir, last, own_job_id(), own_restart_count())
    return batch_claim.claimed_by(run_dir.attempt(last.number))[0] in (own_job_id(), None)


def _is_superseded(run_dir: RunDir, job_id: str | None, restart_count: int) -> bool:
    """Return whether this job was told before that a newer one is at work for the run."""
    tries = attempts.all_attempts(run_dir)
    mine = [attempt for attempt in tries if _is_of_this_job(run_dir, attempt, job_id, restart_count)]
    return bool(mine) and mine[-1].reason == Reason.SUPERSEDED


def _is_of_this_job(run_dir: RunDir, attempt: Attempt, job_id: str | None, restart_count: int) -> bool:
    """Return whether an attempt belongs to an earlier start of this job, and not to another job with the same id.

    SLURM uses an id again on a cluster that is set up anew, as a sandbox is, and after MaxJobId. An attempt that had ended
    before a job was submitted does not belong to it. The order of the run's events tells, so no two clocks are compared.
    """
    if job_id is None or attempt.job_id != job_id or attempt.restart_count >= restart_count:
        return False
    submitted = ended = -1
    for place, event in enumerate(run_dir.events()):
        if event["event"] == Event.SUBMITTED and event.get("job_id") == job_id:
            submitted = place
        elif event["event"] == Event.ATTEMPT_ENDED and event.get("attempt") == attempt.number:
            ended = place
    return ended < 0 or ended > submitted


def record_leaving(run_dir: RunDir, job_id: str | None) -> None:
    """Record in the last attempt, for `status`, that a start of its job had nothing left to do."""
    run_dir.event(Event.LEFT_AT_ONCE, job_id=job_id)
    last = attempts.read_attempt(run_dir, run_dir.attempt_numbers()[-1])
    if last.job_id == job_id:
        last.started_again += 1
        attempts.write_attempt(run_dir, last)
