"""The steps after the last rank has exited: gather the evidence, decide the outcome, complete the record, tell the ledger.

`gather_evidence` gathers, and runs/decide.py decides. It has to be quick: in a preemption the grace time is still running.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from slurmtrain.checkpoint.format.directory import step_of
from slurmtrain.checkpoint.store import retention
from slurmtrain.choices import JobKind, RequeueMode
from slurmtrain.config.schema import Config
from slurmtrain.runs import attempts, jobs, node_blame
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.decide import AttemptOutcome, decide_outcome
from slurmtrain.runs.reasons import FAILURES, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id
from slurmtrain.slurm.node_ledger import append_to_ledger, ledger_file
from slurmtrain.supervise import in_place
from slurmtrain.supervise.gather_evidence import evidence_of, policy

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
