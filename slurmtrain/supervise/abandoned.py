"""Attempts that nobody has finished: which of them may still be at work, and the records of the others."""

from __future__ import annotations

import logging
import os

from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError
from slurmtrain.runs import attempts
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.decide import decide_abandoned_outcome
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import JOB_VARIABLE, own_job_id, own_restart_count, own_step_id
from slurmtrain.slurm.job_facts import LIVE
from slurmtrain.supervise.gather_evidence import evidence_of, policy

log = logging.getLogger(__name__)


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
