"""What a job that starts has left to do for a run: perhaps nothing.

SLURM starts a job again without asking: after a requeue, when its node or its batch shell has died, and from 24.05 on once
more after a job that was preempted has ended. By then the run may have finished, been cancelled or been given another job;
and one that takes down every node that it gets would go on for ever, since nobody is left to count its attempts.
"""

from __future__ import annotations

from slurmtrain.config.schema import Config
from slurmtrain.rundir import RunDir
from slurmtrain.runtime import attempts, chain, pack
from slurmtrain.runtime.attempts import Attempt
from slurmtrain.runtime.judge import Reason, Verdict, given_up
from slurmtrain.runtime.settle import close_abandoned, policy, run_hook_of
from slurmtrain.runtime.slurm import SlurmClient


def ended_before(
    run_dir: RunDir, job_id: str | None, restart_count: int, config: Config, client: SlurmClient | None
) -> Verdict | None:
    """Say whether nothing is left to do: the run is DONE, or came to its END. Completes the records of lost attempts.

    Args:
        restart_count: how often SLURM has started this job again.
    """
    in_chain = bool(chain.links(run_dir.info()))
    over = chain.ended_before(run_dir) if in_chain else pack.ended_before(run_dir, job_id, restart_count)
    if over is None and _is_superseded(run_dir, job_id):
        over = Verdict.END
    if over is not None or (restart_count == 0 and not in_chain):
        return over
    numbers = run_dir.attempt_numbers()
    if not numbers:
        return None
    close_abandoned(run_dir, numbers[-1] + 1, config, client)
    last = attempts.read_attempt(run_dir, numbers[-1])
    if in_chain and last.number <= int(run_dir.info().get("chain_after") or 0):
        return None
    if last.verdict == Verdict.END or not _is_used_up(run_dir, last, config):
        return None
    _give_up(run_dir, last, config)
    return Verdict.END


def _is_superseded(run_dir: RunDir, job_id: str | None) -> bool:
    """Whether this job was told before that a newer one is at work for the run."""
    mine = [attempt for attempt in attempts.all_attempts(run_dir) if attempt.job_id == job_id is not None]
    return bool(mine) and mine[-1].reason == Reason.SUPERSEDED


def _is_used_up(run_dir: RunDir, last: Attempt, config: Config) -> bool:
    stalled = attempts.stalled_before(attempts.all_attempts(run_dir), last.number + 1)
    return last.stalled and stalled >= config.requeue.max_attempts_without_progress


def _give_up(run_dir: RunDir, last: Attempt, config: Config) -> None:
    said = (last.sentence or "ended").removesuffix("; it was started again").removesuffix("; SLURM starts it again")
    last.verdict, last.sentence = Verdict.END, given_up(said, policy(config))
    attempts.write_attempt(run_dir, last)
    run_dir.event("given up", attempt=last.number, sentence=last.sentence)
    run_hook_of(run_dir, last.number, config)
