"""The steps after the last rank has exited: gather the evidence, decide the outcome, complete the record, tell the ledger.

The evidence is what its ranks, srun, SLURM and the run's own files say of an attempt. What is decided from it is in
runs/decide.py. It has to be quick: in a preemption the grace time is still running.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from slurmtrain.checkpoint.format.directory import newest_committed_step, step_of
from slurmtrain.checkpoint.store import retention
from slurmtrain.choices import Backend, JobKind, RequeueMode
from slurmtrain.config.parallel_dims import usable_sizes
from slurmtrain.config.schema import Config
from slurmtrain.data.prepare.units_done import count_done
from slurmtrain.errors import ClusterError
from slurmtrain.launch.node_exclusion import blame_policy
from slurmtrain.runs import attempts, jobs, node_blame, requests
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.decide import AttemptOutcome, decide_abandoned_outcome, decide_outcome
from slurmtrain.runs.evidence import Evidence, Policy
from slurmtrain.runs.failures import (
    Failure,
    Failures,
    RankFailure,
    SrunLog,
    found_hang,
    in_its_words,
    node_of_killed_tasks,
    was_preempted,
    with_last_words,
)
from slurmtrain.runs.program_checkpoints import find_checkpoints, newest_complete
from slurmtrain.runs.reasons import FAILURES, Reason, Verdict
from slurmtrain.runs.requests import RunAction
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import JOB_VARIABLE, own_job_id, own_node_name, own_restart_count, own_step_id
from slurmtrain.slurm.job_facts import LIVE, JobFacts
from slurmtrain.slurm.node_ledger import append_to_ledger, ledger_file
from slurmtrain.supervise import in_place
from slurmtrain.system.signals import StopCause

log = logging.getLogger(__name__)

WORD_S = 3.0  # how long a shared file system may take to show here what rank 0 has written
WORD_POLL_S = 0.2


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
    attempt = attempts.read_attempt(run_dir, number) if exit_code != 0 else _with_its_word(run_dir, number)
    job_id = attempt.job_id or own_job_id()
    facts, links_left = None, 0
    if client is not None:  # only a start in the same job needs to know how much time is left
        facts = (client.job_and_clock if can_start_again else client.job)(job_id or "")
        if config.requeue.mode == RequeueMode.CHAIN:
            links_left = len(jobs.waiting_after(run_dir, job_id, client))
    decides = policy(config, links_left, can_start_again=can_start_again)
    by_slurm = client is not None
    evidence = evidence_of(
        run_dir, attempt, config, exit_code=exit_code, facts=facts, ended=time.time(), by_slurm=by_slurm
    )
    # After a crash srun ends the other ranks, too, by a signal, so that rank 0 may say that it was stopped.
    failed = attempt.said is None or evidence.failure is not None or evidence.killed is not None
    if client is not None and decides.in_place and failed and not evidence.preempted_when_told:
        evidence = in_place.with_allocation(evidence, attempt, client)
    outcome = decide_outcome(evidence, decides)
    attempt.exit_code = exit_code
    attempt.failed_on = evidence.failed_on if outcome.reason in FAILURES else None
    try:
        attempts.record_outcome(run_dir, attempt, outcome)
    except OSError as error:  # a full disk must not turn a clean stop into a lost run
        log.warning("cannot complete the record of attempt %d: %s", number, error)
    if client is not None:
        _tell_ledger(run_dir, attempt, outcome, config)
        if outcome.verdict is Verdict.IN_PLACE:
            outcome = in_place.await_next_start(run_dir, attempt, outcome, evidence, decides, client)
    if config.job.kind == JobKind.EVALUATE and outcome.verdict is Verdict.END:  # nobody awaits its checkpoint any more
        checkpoint = Path(config.checkpoint.restore_from or "")
        retention.release(checkpoint.parent, step_of(checkpoint), run_dir.path.name)
    return outcome


def _tell_ledger(run_dir: RunDir, attempt: Attempt, outcome: AttemptOutcome, config: Config) -> None:
    """Write to this person's ledger what an attempt says against a node, or proves of earlier ones."""
    cluster = node_blame.cluster_of_this_job()
    if cluster is None or config.requeue.blame_threshold == 0:
        return
    earlier = [each for each in attempts.all_attempts(run_dir) if each.number < attempt.number]
    new = [outcome.fault] if outcome.fault is not None else node_blame.proven_by(attempt, run_dir.id, earlier)
    try:
        if new:
            append_to_ledger(ledger_file(cluster), new)
    except OSError as error:
        why = error.strerror or error
        log.warning("the ledger of nodes cannot be written here: %s; other runs will not know about this attempt", why)


def _with_its_word(run_dir: RunDir, number: int) -> Attempt:
    """Read the record of an attempt that ended with exit code 0, and wait a moment until rank 0's last word is in it.

    A shared file system may show the word here a little later than it was written.
    """
    give_up = time.monotonic() + WORD_S
    while (attempt := attempts.read_attempt(run_dir, number)).said is None and time.monotonic() < give_up:
        time.sleep(WORD_POLL_S)
    return attempt


# The evidence.

REPORTING = ("command", "prepare")  # kinds of jobs whose progress is what they report


def progress_shown(run_dir: RunDir, config: Config) -> tuple[int | None, float | None, int | None]:
    """Return what a program has shown of its progress so far.

    Returns:
        The furthest step that it has reported. Where its checkpoints can be seen, these alone count: steps that are reported
        after the newest one will be done again.
        When the newest checkpoint was changed, in unix seconds, if it has no number.
        The step of its newest complete checkpoint.
    """
    job = config.job
    if job.kind not in REPORTING:
        return None, None, None
    if job.checkpoints is None:
        return attempts.furthest_reported(run_dir), None, None
    newest = newest_complete(find_checkpoints(run_dir.program_folders, job.checkpoints, job.checkpoint_complete))
    if newest is None:
        return None, None, None
    return None, newest.changed if newest.step is None else None, newest.step


def find_last_steps(run_dir: RunDir, attempt: Attempt, config: Config) -> None:
    """Add to the record of an attempt that has ended how far it came, by the files of its run."""
    attempt.committed_step = newest_committed_step(run_dir.checkpoints)
    attempt.reported_step, attempt.marked, attempt.seen_step = progress_shown(run_dir, config)
    if not attempt.started:  # rank 0 never opened it, so nothing that is there can be its work
        attempt.committed_before, attempt.reported_before = attempt.committed_step, attempt.reported_step
        attempt.marked_before, attempt.seen_before = attempt.marked, attempt.seen_step
    with contextlib.suppress(OSError):
        written = run_dir.metrics_file.stat().st_mtime
        attempt.last_logged = written if attempt.started and written >= attempt.started else None
    if config.job.kind == JobKind.PREPARE and attempt.stepping is not None:  # or the output may be of other settings
        prepare = config.prepare  # rank 0 has said how many units it saw before the others had left
        counted = count_done(Path(prepare.output), prepare.part, prepare.parts) if prepare.output else None
        attempt.last_step = max((each for each in (attempt.last_step, counted) if each is not None), default=None)
    # Of a later attempt's steps and checkpoints, none are this one's.
    later = any(run_dir.attempt(n).record_file.exists() for n in run_dir.attempt_numbers() if n > attempt.number)
    if attempt.last_step is None or (not later and config.job.kind not in (JobKind.PREPARE, JobKind.EVALUATE)):
        steps = (attempt.last_step, attempts.last_logged_step(run_dir), attempt.committed_step, attempt.seen_step)
        attempt.last_step = max(step or 0 for step in steps) or attempt.first_step


def evidence_of(
    run_dir: RunDir,
    attempt: Attempt,
    config: Config,
    *,
    exit_code: int,
    facts: JobFacts | None,
    ended: float,
    by_slurm: bool,
) -> Evidence:
    """Return the evidence on an attempt, but for what SLURM says of the nodes of its job; its record then has its last steps.

    Args:
        exit_code: of srun, or the highest of the local ranks.
        facts: what SLURM says of its job; None: it has none, or SLURM cannot be asked.
        ended: when it ended, in unix seconds.
        by_slurm: SLURM started its ranks, and may start the next ones on other nodes.
    """
    find_last_steps(run_dir, attempt, config)
    attempt_dir = run_dir.attempt(attempt.number)
    tries, srun_log = attempts.all_attempts(run_dir), SrunLog.read(attempt_dir)
    request = requests.take_request(run_dir, attempt)
    # The disk was full when rank 0 had to write the request.
    if request is None and attempt.cause == StopCause.STOP_FILE:
        request = RunAction.STOP
    killed = srun_log.killed_tasks
    failures = Failures.read(attempt_dir)
    first = failures.first()
    if first is None and killed is None:  # nobody saw the cause, only its effect on the other ranks
        first = failures.first(because_of_peer=True)
    set_up = attempts.failed_set_up(attempt_dir)
    counted = attempts.stalled_numbers(tries, attempt.number)
    unfit = failures.unfit_nodes(attempt.nodes)
    node_records = node_blame.records_of(run_dir.id, tries) if by_slurm else []
    if by_slurm:
        node_records += node_blame.ledger_of(node_blame.cluster_of_this_job(), blame_policy(config))
    hang = found_hang(attempt_dir)
    attempt.idle_since = min((each.time for each in failures.ranks), default=None)
    if hang is not None:
        attempt.idle_since = hang.since or attempt.last_logged or hang.time
    sentence, attempt.failed_with = in_its_words(first, attempt_dir, program=config.job.kind == JobKind.COMMAND)
    if unfit or (first is not None and first.bad_nodes):
        # Rank 0 speaks for them. Whoever speaks for most nodes is not at fault, nor is a single one of them.
        failed_on = unfit[0] if unfit else None
    elif hang is not None:  # ranks of torchrun do not know SLURM's names of nodes
        failed_on = hang.node if hang.node in attempt.nodes or not attempt.nodes else None
    else:
        failed_on = _node_at_fault(attempt, srun_log, first, exit_code, set_up=set_up is not None)
    return Evidence(
        exit_code=exit_code,
        said=attempt.said,
        cause=attempt.cause,
        seconds_left=attempt.seconds_left,
        failure=(first.exit_code, sentence) if first is not None else None,
        set_up=set_up,
        on_any_node=first is not None and first.on_any_node,
        diverged=first is not None and first.diverged,
        failed_on=failed_on,
        failed_nodes=failures.nodes,
        unfit_nodes=unfit,
        only_victims=first is not None and first.because_of_peer,
        lost_node=srun_log.lost_node,
        failed_before=attempts.failed_before(tries, attempt),
        seconds_to_limit=facts.seconds_left if facts is not None else None,
        superseded=_superseded_by(tries, attempt, first),
        trained=attempt.stepping is not None,
        trained_before=any(
            each.has_trained for each in tries if each.number < attempt.number and each.started > run_dir.changed_at()
        ),
        trained_on=tuple(node_blame.trained_on(tries)),
        program_code=attempt.program_code,
        finished_when=config.job.finished_when,
        hang=hang.sentence if hang is not None else None,
        disk_full=attempt_dir.full_disk_marker.exists(),
        killed=with_last_words(killed, attempt_dir) if killed is not None else None,
        request=request,
        facts=facts,
        told=attempt.facts_when_told,
        preempted_when_told=was_preempted(run_dir, attempt),
        restart_count=own_restart_count(),
        progressed=attempt.progressed,
        progress_visible=_progress_is_visible(attempt, config),
        lasted_s=ended - attempt.started if attempt.started else 0.0,
        stalled_before=len(counted),
        alike_before=attempts.failed_alike(tries, attempt),
        unseen_before=attempts.unseen_before(tries, attempt.number),
        run=run_dir.id if by_slurm else "",
        number=attempt.number,
        now=ended,
        node_records=tuple(node_records),
    )


def _node_at_fault(
    attempt: Attempt,
    srun_log: SrunLog,
    first: RankFailure | None,
    code: int,
    *,
    set_up: bool,
) -> str | None:
    """Return the node of the first failure, by SLURM's name; None if it is not known.

    Args:
        first: the first failure that is on record; of a rank that lost another one, if that is all that anybody saw.
        code: exit code of srun.
    """
    if srun_log.lost_node is not None and srun_log.lost_node in attempt.nodes:
        return srun_log.lost_node
    if first is not None and first.because_of_peer:  # which says nothing against its own node
        return srun_log.node_without_tasks or (attempt.nodes[0] if len(attempt.nodes) == 1 else None)
    if first is not None and first.node is not None:
        return first.node
    if first is not None or set_up:  # the ranks of one node, or the set-up itself, have failed
        return own_node_name()
    if srun_log.killed_tasks is not None:
        return node_of_killed_tasks(srun_log.killed_tasks)
    ended = srun_log.nodes_of_tasks(f"Exited with exit code {code}") or attempt.nodes
    return srun_log.node_without_tasks or (ended[0] if len(ended) == 1 else None)


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


def _progress_is_visible(attempt: Attempt, config: Config) -> bool:
    """Return whether progress of this attempt would show, so that its absence proves something."""
    return (
        config.job.kind in (JobKind.TRAIN, JobKind.EVALUATE)
        or config.job.checkpoints is not None
        or attempt.committed_step is not None
        or attempt.reported_step is not None
    )


def policy(config: Config, links_left: int = 0, *, can_start_again: bool = False) -> Policy:
    """Return the part of the config that decides on an attempt.

    Args:
        links_left: jobs of the chain that still wait for this one.
        can_start_again: as for `finish_attempt`.
    """
    mode = config.requeue.mode
    queue = config.cluster.backend == Backend.SLURM
    if not queue and mode != RequeueMode.OFF:
        mode = RequeueMode.REQUEUE  # whoever started the ranks starts them again
    return Policy(
        mode=mode,
        links_left=links_left,
        max_attempts_without_progress=config.requeue.max_attempts_without_progress,
        max_unseen_attempts=config.requeue.max_unseen_attempts,
        long_attempt_s=60 * min(config.requeue.long_attempt_min, config.cluster.time_limit_min / 2),
        signal_lead_s=config.cluster.signal_lead_s,
        blame=blame_policy(config),
        local=config.cluster.backend == Backend.LOCAL,
        queue=queue,
        in_place=can_start_again and config.requeue.starts_in_place,
        node_counts=tuple(reversed(usable_sizes(config))),
    )


# Attempts that nobody has finished: which of them may still be at work, and the records of the others.


def close_abandoned(run_dir: RunDir, current: int, config: Config, client: SlurmClient | None) -> dict[int, Attempt]:
    """Complete the records of earlier attempts that nobody finished: their node is gone, or the supervisor was killed.

    An attempt that may still be at work is left alone: it has a record of its own to write. Return the records of the
    others, by number, also those that cannot be written because the disk is full.
    """
    closed: dict[int, Attempt] = {}
    for number in run_dir.attempt_numbers():
        attempt = attempts.read_attempt(run_dir, number)
        attempt_dir = run_dir.attempt(number)
        if number >= current or attempt.reason is not None or attempt_dir.setup_failure_file.exists():
            continue
        if may_live(attempt, attempt_dir, client):
            continue
        logs = attempt_dir.rank_logs().values()
        wrote = max((log.stat().st_mtime for log in logs), default=attempt_dir.path.stat().st_mtime)
        by_slurm = client is not None
        evidence = evidence_of(run_dir, attempt, config, exit_code=0, facts=None, ended=wrote, by_slurm=by_slurm)
        attempt.last_sign = max(wrote, attempt.last_logged or 0.0)
        closed[number] = attempt
        try:
            attempts.record_outcome(run_dir, attempt, decide_abandoned_outcome(evidence, policy(config)))
        except OSError as error:
            log.warning("cannot complete the record of attempt %d: %s", number, error)
    return closed


def may_live(attempt: Attempt, attempt_dir: AttemptDir, client: SlurmClient | None) -> bool:
    """Return whether an attempt that nobody has finished may still be at work, as far as can be known here.

    An earlier start of this very job is over. SLURM knows about other jobs, and about other steps of this one; this
    machine about an attempt outside of SLURM. If neither can be asked, it may be at work.
    """
    if JOB_VARIABLE in os.environ:  # an engine starts pods when all earlier ones have left
        return False
    job_id, restart_count = attempt.job_id, attempt.restart_count
    if not attempt.started:
        job_id, restart_count, _ = attempts.read_claim(attempt_dir)
    if job_id is None:
        return bool(attempt.started) and attempt.rank_0_lives is not False
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
