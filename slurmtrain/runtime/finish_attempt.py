"""The steps after the last rank has exited: gather the evidence, decide the outcome, complete the record, print the verdict.

They are called by the batch script, outside of srun and of any container. This module imports no torch and is quick: in
a preemption the grace time is still running.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from slurmtrain.checkpoint.format.directory import step_of
from slurmtrain.checkpoint.store import retention
from slurmtrain.choices import Backend, JobKind, RequeueMode
from slurmtrain.config.elastic import usable_sizes
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError
from slurmtrain.runs import attempts, chain, node_blame, stage_record
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.failures import Failure, Failures, RankFailure, found_hang
from slurmtrain.runs.outcome import (
    FAILURES,
    AttemptOutcome,
    Evidence,
    Policy,
    Reason,
    Verdict,
    budget_spent,
    decide_abandoned_outcome,
    decide_outcome,
)
from slurmtrain.runs.program_checkpoints import find_checkpoints, newest_complete
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.srun_log import SrunLog, cancelled_due_to, node_of_killed_tasks
from slurmtrain.runtime import in_place
from slurmtrain.slurm import versions
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id, own_node_name, own_restart_count, own_step_id
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.job_states import LIVE
from slurmtrain.slurm.node_ledger import (
    BlamePolicy,
    NodeRecord,
    append_to_ledger,
    is_worth_telling,
    ledger_file,
    read_ledger,
)
from slurmtrain.system import process

log = logging.getLogger(__name__)

WORD_S = 3.0  # how long a shared file system may take to show here what rank 0 has written
WORD_POLL_S = 0.2
REPORTING = ("command", "prepare")  # kinds of jobs whose progress is what they report


def finish_attempt(
    run_dir: RunDir,
    number: int,
    exit_code: int,
    config: Config,
    client: SlurmClient | None,
    *,
    can_start_again: bool = False,
) -> AttemptOutcome:
    """Judge attempt `number` and complete its record.

    Args:
        exit_code: exit code of srun, or the highest of the local ranks.
        client: None outside of SLURM.
        can_start_again: whoever asks can start the ranks again in the same job.
    """
    srun_log = SrunLog.read(run_dir.attempt(number))
    heard = exit_code != 0 or srun_log.killed_tasks is not None
    attempt = attempts.read_attempt(run_dir, number) if heard else _with_its_word(run_dir, number)
    job_id = attempt.job_id or own_job_id()
    facts = client.job(job_id or "") if client is not None else None
    links_left = 0
    if client is not None and config.requeue.mode == RequeueMode.CHAIN:
        links_left = len(chain.waiting_after(run_dir, job_id, client))
    _find_last_steps(run_dir, attempt, config)
    request = attempts.take_request(run_dir, attempt)
    # A change for the next attempt needs a new job: the batch script of this one is that of before.
    can_start_again = can_start_again and not run_dir.next_change_file.exists()
    decides = policy(config, links_left, can_start_again=can_start_again)
    tries = attempts.all_attempts(run_dir)
    evidence = _evidence(run_dir, tries, attempt, srun_log, exit_code, facts, config, request, time.time())
    if client is not None:
        evidence = replace(evidence, run=run_dir.id, node_records=tuple(_node_records(run_dir, tries, config)))
    # After a crash srun ends the other ranks, too, by a signal, so that rank 0 may say that it was stopped.
    failed = attempt.said is None or evidence.failure is not None or evidence.killed is not None
    if client is not None and decides.in_place and failed and not evidence.preempted_when_told:
        evidence = in_place.with_allocation(evidence, attempt, client)
    outcome = decide_outcome(evidence, decides)
    attempt.exit_code = exit_code
    attempt.failed_on = evidence.failed_on if outcome.reason in FAILURES else None
    try:
        _record(run_dir, attempt, outcome)
    except OSError as error:  # a full disk must not turn a clean stop into a lost run
        log.warning("cannot complete the record of attempt %d: %s", number, error)
    if client is not None:
        _tell_ledger(run_dir, attempt, outcome, config)
    if outcome.verdict is Verdict.IN_PLACE and client is not None:
        outcome = in_place.await_next_start(run_dir, attempt, outcome, evidence, decides, client)
    if config.job.kind == JobKind.EVALUATE and outcome.verdict is Verdict.END:  # nobody awaits its checkpoint any more
        checkpoint = Path(config.checkpoint.restore_from or "")
        retention.release(checkpoint.parent, step_of(checkpoint), run_dir.path.name)
    return outcome


def _node_records(run_dir: RunDir, tries: list[Attempt], config: Config) -> list[NodeRecord]:
    """Return what is on record for and against nodes, in the run's own attempts and in the ledger."""
    own = node_blame.records_of(run_dir.id, tries)
    return [*node_blame.ledger_of(node_blame.cluster_of_this_job(), blame_policy(config)), *own]


def _tell_ledger(run_dir: RunDir, attempt: Attempt, outcome: AttemptOutcome, config: Config) -> None:
    """Write to this person's ledger what an attempt says against a node, or for the nodes that it has trained on."""
    cluster = node_blame.cluster_of_this_job()
    if cluster is None or config.requeue.blame_threshold == 0:
        return
    new = [outcome.fault] if outcome.fault is not None else []
    try:
        path = ledger_file(cluster)
        if not new and node_blame.has_trained_well(attempt):
            new = node_blame.records_of(run_dir.id, [attempt])
            new = new if is_worth_telling(run_dir.id, attempt.nodes, read_ledger(path)) else []
        if new:
            append_to_ledger(path, new)
    except OSError as error:
        where = error.filename or "the ledger of nodes"
        log.warning("%s cannot be written here: %s; other runs will not know about this attempt", where, error.strerror)


def _with_its_word(run_dir: RunDir, number: int) -> Attempt:
    """Read the record of an attempt that ended with exit code 0, and wait a moment until rank 0's last word is in it.

    A shared file system may show the word here a little later than it was written.
    """
    give_up = time.monotonic() + WORD_S
    while True:
        attempt = attempts.read_attempt(run_dir, number)
        left = give_up - time.monotonic()
        if attempt.said is not None or left <= 0:
            return attempt
        time.sleep(min(WORD_POLL_S, left))


def free_dependents(run_dir: RunDir, attempt: Attempt, client: SlurmClient) -> None:
    """Let jobs that wait for the success of this attempt's job wait for it no more, since the run has finished in it.

    They were submitted with --after this run. A job that was ever preempted may not end yet, or not as a success: see
    `slurm.versions.STARTS_PREEMPTED_JOBS_ONCE_MORE`.
    """
    job_id = attempt.job_id
    if job_id is None or not (attempt.restart_count or _was_preempted(run_dir, attempt)):
        return
    if not versions.STARTS_PREEMPTED_JOBS_ONCE_MORE.applies_to(client.version()):
        return
    try:
        freed = client.free_dependents(job_id)
    except ClusterError as error:  # if the job ends as PREEMPTED, they show DependencyNeverSatisfied
        log.warning("jobs that wait for this run may start late or never: %s", error.message)
        return
    if freed:
        with contextlib.suppress(OSError):  # a full disk; they are free all the same
            run_dir.event(Event.DEPENDENTS_FREED, job_ids=freed, job_id=job_id)


def run_hook_of(run_dir: RunDir, number: int, config: Config) -> None:
    """Run the hook for the outcome of attempt `number` outside of a batch script, as the script would."""
    hooks = config.hooks
    if hooks.on_finish or hooks.on_failure or hooks.on_preemption:
        words = ["hook", str(run_dir.path), "--attempt", str(number)]
        subprocess.run([sys.executable, "-m", "slurmtrain", *words], check=False)


def close_abandoned(run_dir: RunDir, current: int, config: Config, client: SlurmClient | None) -> list[int]:
    """Complete the records of earlier attempts that nobody finished: their node is gone, or the batch shell died.

    An attempt that may still be at work is left alone: it has a record of its own to write. Return the numbers of the
    others.
    """
    closed = []
    for number in reversed(run_dir.attempt_numbers()):
        attempt = attempts.read_attempt(run_dir, number)
        attempt_dir = run_dir.attempt(number)
        if number >= current or attempt.reason is not None or attempt_dir.setup_failure_file.exists():
            continue
        if may_live(attempt, attempt_dir, client):
            continue
        _find_last_steps(run_dir, attempt, config)
        request = attempts.take_request(run_dir, attempt)
        tries = attempts.all_attempts(run_dir)
        last_sign = _last_sign(attempt_dir)
        evidence = _evidence(run_dir, tries, attempt, SrunLog.read(attempt_dir), 0, None, config, request, last_sign)
        attempt.last_sign = max(last_sign, attempt.last_logged or 0.0)
        _record(run_dir, attempt, decide_abandoned_outcome(evidence, policy(config)))
        closed.append(number)
    return closed


def may_live(attempt: Attempt, attempt_dir: AttemptDir, client: SlurmClient | None) -> bool:
    """Return whether an attempt that nobody has finished may still be at work, as far as can be known here.

    An earlier start of this very job is over. SLURM knows about other jobs, and about other steps of this one; this
    machine about an attempt outside of SLURM. If neither can be asked, it may be at work.
    """
    job_id, restart_count = attempt.job_id, attempt.restart_count
    if not attempt.started:
        job_id, restart_count = attempts.claimed_by(attempt_dir)
    if job_id is None:
        if not attempt.started or attempt.pid is None:
            return False
        return attempt.host != socket.gethostname() or process.lives(attempt.pid)
    own = job_id == own_job_id()
    if own and (restart_count < own_restart_count() or not attempt.started):
        return False
    if own and attempt.step_id is not None and attempt.step_id == own_step_id():  # of an earlier job with the same id
        return False
    if client is None:
        return True
    try:
        if own and attempt.step_id is not None:
            return client.step_lives(attempt.step_id)
        facts = client.look(job_id)
    except ClusterError:
        return True
    return facts is not None and facts.restarts <= restart_count and facts.state in LIVE


def _find_last_steps(run_dir: RunDir, attempt: Attempt, config: Config) -> None:
    attempt.committed_step = attempts.newest_checkpoint_step(run_dir)
    shown = progress_shown(run_dir, config)
    attempt.reported_step, attempt.marked, attempt.seen_step = shown.reported, shown.marked, shown.seen
    if not attempt.started:  # rank 0 never opened it, so nothing that is there can be its work
        attempt.committed_before, attempt.reported_before = attempt.committed_step, attempt.reported_step
        attempt.marked_before, attempt.seen_before = attempt.marked, attempt.seen_step
    with contextlib.suppress(OSError):
        written = run_dir.metrics_file.stat().st_mtime
        attempt.last_logged = written if attempt.started and written >= attempt.started else None
    if attempt.last_step is None:
        logged, committed = attempts.last_logged_step(run_dir), attempt.committed_step
        attempt.last_step = max(logged or 0, committed or 0, attempt.seen_step or 0) or attempt.first_step


@dataclass(frozen=True)
class ShownProgress:
    """What a program of the user's own has shown of its progress so far.

    Attributes:
        reported: the furthest step that it has reported. Where its checkpoints can be seen, these alone count: steps that
            are reported after the newest one will be done again.
        marked: when the newest of its files was changed, in unix seconds: those of job.progress_file, and checkpoints
            without a number.
        seen: the step of its newest complete checkpoint.
    """

    reported: int | None = None
    marked: float | None = None
    seen: int | None = None


def progress_shown(run_dir: RunDir, config: Config) -> ShownProgress:
    """Return what a program has shown of its progress so far."""
    job = config.job
    if job.kind not in REPORTING:
        return ShownProgress()
    changed = attempts.newest_change(run_dir, job.progress_file)
    if job.checkpoints is None:
        return ShownProgress(attempts.furthest_reported(run_dir), changed)
    newest = newest_complete(find_checkpoints(run_dir.program_folders, job.checkpoints, job.checkpoint_complete))
    if newest is None or newest.step is not None:
        return ShownProgress(None, changed, newest.step if newest is not None else None)
    return ShownProgress(None, max(changed or 0.0, newest.changed))


def _record(run_dir: RunDir, attempt: Attempt, outcome: AttemptOutcome) -> None:
    attempt.ended, attempt.lasted = time.time(), outcome.lasted
    attempt.stalled, attempt.unseen = outcome.stalled or outcome.unseen, outcome.unseen
    attempt.reason, attempt.verdict = outcome.reason, outcome.verdict
    attempt.say(outcome.why, outcome.next_step)
    if outcome.bad_nodes:
        attempt.bad_nodes = list(outcome.bad_nodes)
    if outcome.fault is not None:
        attempt.fault = outcome.fault.values()
    attempts.write_attempt(run_dir, attempt)
    run_dir.event(
        Event.ATTEMPT_ENDED,
        attempt=attempt.number,
        reason=outcome.reason,
        verdict=outcome.verdict,
        sentence=outcome.sentence,
    )


def policy(config: Config, links_left: int = 0, *, can_start_again: bool = False) -> Policy:
    """Return the part of the config that decides on an attempt.

    Args:
        links_left: jobs of the chain that still wait for this one.
        can_start_again: as for `finish_attempt`.
    """
    mode = config.requeue.mode
    local = config.cluster.backend == Backend.LOCAL
    if local and mode != RequeueMode.OFF:
        mode = RequeueMode.REQUEUE  # there is no queue: whoever started the ranks starts them again
    return Policy(
        mode=mode,
        links_left=links_left,
        max_attempts_without_progress=config.requeue.max_attempts_without_progress,
        max_unseen_attempts=config.requeue.max_unseen_attempts,
        long_attempt_s=60 * min(config.requeue.long_attempt_min, config.cluster.time_limit_min / 2),
        signal_lead_s=config.cluster.signal_lead_s,
        blame=blame_policy(config),
        local=local,
        in_place=can_start_again and config.requeue.starts_in_place,
        node_counts=tuple(reversed(usable_sizes(config))),
    )


def blame_policy(config: Config) -> BlamePolicy:
    """Return the part of the config that decides which nodes are left out."""
    return BlamePolicy(config.requeue.blame_threshold, 3600 * config.requeue.blame_expiry_h)


def _was_preempted(run_dir: RunDir, attempt: Attempt) -> bool:
    """Return whether SLURM has said that it preempts this attempt, to rank 0 or in the job's log.

    Without a GraceTime, which is SLURM's default, only the log says so: the job is requeued in the same moment, and
    with that the time of its preemption is gone from what `scontrol show job` prints.
    """
    if attempt.facts_when_told is not None and attempt.facts_when_told.preempted:
        return True
    log = run_dir.job_log(attempt.job_id or own_job_id() or "")
    before = attempts.read_attempt(run_dir, attempt.number - 1) if attempt.number > 1 else None
    since = max(attempt.started, (before.ended or 0.0) if before is not None else 0.0)
    return log is not None and cancelled_due_to(log, since) == "PREEMPTION"


def _evidence(
    run_dir: RunDir,
    tries: list[Attempt],
    attempt: Attempt,
    srun_log: SrunLog,
    exit_code: int,
    facts: JobFacts | None,
    config: Config,
    request: str | None,
    ended: float,
) -> Evidence:
    attempt_dir = run_dir.attempt(attempt.number)
    killed = srun_log.killed_tasks
    failures = Failures.read(attempt_dir)
    first = failures.first()
    if first is None and killed is None:  # nobody saw the cause, only its effect on the other ranks
        first = failures.first(because_of_peer=True)
    failure = first.failure if first is not None else None
    set_up = attempts.failed_set_up(attempt_dir)
    counted = attempts.stalled_numbers(tries, attempt.number)
    refused = stage_record.refused_nodes(attempt_dir) if set_up is not None else None
    unfit = failures.unfit_nodes(attempt.nodes) or refused or ()
    hang = found_hang(attempt_dir)
    if unfit:  # rank 0 speaks for them, or the batch script
        failed_on: str | None = unfit[0]
    elif refused is not None or (failure is not None and failure.bad_nodes):
        failed_on = None  # whoever speaks for most nodes is not at fault, nor is a single one of them
    elif hang is None:
        failed_on = _node_at_fault(attempt, srun_log, first, set_up, exit_code)
    else:  # ranks of torchrun do not know SLURM's names of nodes
        failed_on = hang.node if hang.node in attempt.nodes or not attempt.nodes else None
    return Evidence(
        exit_code=exit_code,
        said=attempt.said,
        cause=attempt.cause,
        seconds_left=attempt.seconds_left,
        failure=(first.failure.exit_code, first.sentence) if first is not None else None,
        set_up=set_up,
        on_any_node=failure is not None and failure.on_any_node,
        diverged=failure is not None and failure.diverged,
        failed_on=failed_on,
        failed_nodes=failures.nodes,
        unfit_nodes=unfit,
        lost_node=srun_log.lost_node,
        failed_before=attempts.failed_before(tries, attempt),
        seconds_to_limit=facts.end_time - ended if facts is not None and facts.end_time is not None else None,
        superseded=_superseded_by(tries, attempt, failure),
        trained=attempt.stepping is not None,
        trained_before=any(
            each.has_trained for each in tries if each.number < attempt.number and each.started > run_dir.changed_at()
        ),
        program_code=attempt.program_code,
        finished_when=config.job.finished_when,
        hang=hang.sentence if hang is not None else None,
        killed=killed,
        request=request,
        facts=facts,
        told=attempt.facts_when_told,
        preempted_when_told=_was_preempted(run_dir, attempt),
        restart_count=own_restart_count(),
        progressed=attempt.progressed,
        progress_visible=_progress_is_visible(attempt, config),
        lasted_s=ended - attempt.started if attempt.started else 0.0,
        stalled_before=len(counted),
        unseen_before=attempts.unseen_before(tries, attempt.number),
        number=attempt.number,
        now=ended,
        stalled_numbers=tuple(counted),
    )


def _node_at_fault(
    attempt: Attempt,
    srun_log: SrunLog,
    first: RankFailure | None,
    set_up: str | None,
    code: int,
) -> str | None:
    """Return the node of the first failure, by SLURM's name; None if it is not known.

    Args:
        first: the first failure that is on record; of a rank that lost another one, if that is all that anybody saw.
        code: exit code of srun.
    """
    if first is not None and first.failure.because_of_peer:  # which says nothing against its own node
        return srun_log.node_without_tasks or (attempt.nodes[0] if len(attempt.nodes) == 1 else None)
    if first is not None and first.node is not None:
        return first.node
    if first is not None or set_up is not None:  # the ranks of one node, or the batch script itself, have failed
        return own_node_name()
    if srun_log.killed_tasks is not None:
        return node_of_killed_tasks(srun_log.killed_tasks)
    ended = srun_log.nodes_of_tasks(f"Exited with exit code {code}") or attempt.nodes
    return srun_log.node_without_tasks or (ended[0] if len(ended) == 1 else None)


def spent_by(run_dir: RunDir, config: Config) -> str | None:
    """Say why the last attempt of a run, which has an outcome, has used up a budget; return None while there may be others."""
    tries = attempts.all_attempts(run_dir)
    last = tries[-1]
    if not last.stalled:
        return None
    counted = attempts.stalled_numbers(tries, last.number)
    evidence = Evidence(
        exit_code=last.exit_code or 1,
        program_code=last.program_code,
        progress_visible=_progress_is_visible(last, config),
        stalled_before=len(counted),
        unseen_before=attempts.unseen_before(tries, last.number),
        run=run_dir.id,
        number=last.number,
        now=time.time(),
        stalled_numbers=tuple(counted),
        node_records=tuple(_node_records(run_dir, tries, config)),
    )
    outcome = AttemptOutcome(Reason.CRASH, Verdict.END, "", stalled=not last.unseen, unseen=last.unseen)
    return budget_spent(outcome, evidence, policy(config))


def _progress_is_visible(attempt: Attempt, config: Config) -> bool:
    return (
        config.job.kind in (JobKind.TRAIN, JobKind.EVALUATE)
        or config.job.progress_file is not None
        or config.job.checkpoints is not None
        or attempt.committed_step is not None
        or attempt.reported_step is not None
    )


def _superseded_by(everything: list[Attempt], attempt: Attempt, failure: Failure | None) -> str | None:
    """Say which newer attempt, of another job, has taken the run over from this one; None if none has.

    One that failed for good, as on a node without a GPU, has left the run to this attempt, unless it has fenced it off
    by then. One that finished the run, or that a person has cancelled, has ended it for both.
    """
    fenced = failure is not None and failure.superseded
    newer = [each for each in everything if each.number > attempt.number and each.started]
    others = [each for each in newer if each.job_id != attempt.job_id]
    if not others or newer[-1] is not others[-1]:
        return "a newer job goes on with this run" if fenced else None
    alive = [each for each in others if each.verdict != Verdict.END]
    last = (alive or others)[-1]
    name = f"attempt {last.number}" + (f" in job {last.job_id}" if last.job_id is not None else "")
    if last.verdict == Verdict.DONE or others[-1].reason in (Reason.CANCELLED, Reason.PRUNED):
        return f"{name} has ended this run"
    if alive:
        return f"{name} goes on with this run"
    return f"{name} had taken this run over and has failed; `resume` continues it" if fenced else None


def _last_sign(attempt_dir: AttemptDir) -> float:
    """Return when the attempt last wrote something, in unix seconds: nobody may have seen its end."""
    logs = attempt_dir.rank_logs().values()
    return max((log.stat().st_mtime for log in logs), default=attempt_dir.path.stat().st_mtime)
