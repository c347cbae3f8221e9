"""The further jobs of a run: the one after a stop (requeue.mode=resubmit), all at once (chain), or by `resume`.

No job is submitted twice: one that carries on after a stop has a token in its comment, by which it is looked for first.
No two work at the same time: each waits for all before it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from slurmtrain.config.compose import load_frozen
from slurmtrain.errors import ClusterError, SlurmtrainError
from slurmtrain.launch.handover import TOKEN_PREFIX
from slurmtrain.launch.sbatch import directive
from slurmtrain.launch.submit import note, resubmit
from slurmtrain.rundir import RunDir
from slurmtrain.runtime import attempts
from slurmtrain.runtime.judge import Verdict
from slurmtrain.runtime.slurm import SlurmClient

TRIES_S = (
    1.0,
    4.0,
)  # pauses between tries to submit; SLURM may kill the batch shell KillWait, 30 s, after its first TERM


def resume(run_dir: RunDir, client: SlurmClient) -> list[str]:
    """Submit a run that has ended: one job, or a chain of them. Returns their ids.

    Raises:
        ClusterError: sbatch is missing or refused.
    """
    config = load_frozen(run_dir.config_file, with_secrets=False)
    job_id = _unnoted(run_dir, client) if config.requeue.mode == "resubmit" else None
    if job_id is not None:
        note(run_dir, job_id, found_by=TOKEN_PREFIX + token(run_dir))
    else:
        job_id = resubmit(run_dir)
    length = config.requeue.chain_length if config.requeue.mode == "chain" else 1
    return submit_links(run_dir, job_id, length, client)


def submit_links(run_dir: RunDir, first: str, length: int, client: SlurmClient) -> list[str]:
    """Submit the rest of the chain that begins with the job `first`. Returns all its jobs; with length 1, only the first.

    Raises:
        ClusterError: sbatch refused one; those before it are cancelled.
    """
    links = [first]
    if length == 1:
        return links
    numbers = run_dir.attempt_numbers()
    run_dir.update_info(chain=links, chain_after=numbers[-1] if numbers else 0)
    try:
        while len(links) < length:
            # For all before it: were it only the one before, somebody's scancel of that one would start this one beside
            # those that still run.
            links.append(resubmit(run_dir, lambda script: waiting_for(script, links), link=len(links) + 1, of=length))
            run_dir.update_info(chain=links)
    except BaseException:
        client.cancel(*reversed(links))
        raise
    return links


def submit_again(
    run_dir: RunDir, number: int, job_id: str, client: SlurmClient, sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """After attempt `number`, in job `job_id`, whose ranks have all left: hand the script to sbatch again.

    Returns:
        The new job; None when the run was cancelled meanwhile.

    Raises:
        ClusterError: SLURM took no new job. The attempt's record says so, and the run can be resumed.
    """
    if _cancelled(run_dir):
        _end(run_dir, number, "cancelled by `cancel RUN`")
        return None
    try:
        new = _find_or_submit(run_dir, number, job_id, client, sleep)
    except Exception as error:
        words = error.message if isinstance(error, SlurmtrainError) else str(error)
        _end(run_dir, number, f"no new job could be submitted: {words}")
        raise
    if _cancelled(run_dir):  # while sbatch was at work
        client.cancel(new)
        _end(run_dir, number, "cancelled by `cancel RUN`")
        return None
    _pass_on_dependents(run_dir, job_id, new, client)
    return new


def token(run_dir: RunDir, number: int | None = None) -> str:
    """Of the job that carries on after attempt `number`; without one, how all such tokens begin."""
    return f"{run_dir.id}:{'' if number is None else number}"


def waiting_for(script: str, job_ids: Sequence[str]) -> list[str]:
    """The option by which a job waits until these have ended, in whatever way, besides what its script says."""
    own = directive(script, "dependency")
    return [f"--dependency=afterany:{':'.join(job_ids)}{f',{own}' if own else ''}"]


def _unnoted(run_dir: RunDir, client: SlurmClient) -> str | None:
    """A job that was to carry on, whose submitter was killed before it could note it. A noted one may still be leaving."""
    known = run_dir.info()["job_ids"]
    return next(
        (job_id for job_id in client.find_by_comment(TOKEN_PREFIX + token(run_dir)) if job_id not in known), None
    )


def _find_or_submit(
    run_dir: RunDir, number: int, job_id: str, client: SlurmClient, sleep: Callable[[float], None]
) -> str:
    mine = token(run_dir, number)

    def options(script: str) -> list[str]:
        # SLURM starts it when this job is gone altogether, so that no rank that lingers meets its successor.
        return waiting_for(script, [job_id])

    for pause in (*TRIES_S, None):
        try:
            found = client.find_by_comment(TOKEN_PREFIX + mine)
            if not found:
                return resubmit(run_dir, options, token=mine, after_attempt=number)
            if found[0] not in run_dir.info()["job_ids"]:
                note(run_dir, found[0], found_by=TOKEN_PREFIX + mine)
            return found[0]
        except ClusterError:  # the controller may be busy; and a sbatch that it did not answer may have worked
            if pause is None:
                raise
            sleep(pause)
    raise AssertionError("unreachable")


def _pass_on_dependents(run_dir: RunDir, job_id: str, new: str, client: SlurmClient) -> None:
    """Jobs submitted with --after this run wait for its success, which will be that of the new job."""
    try:
        moved = client.pass_on_dependents(job_id, new)
    except ClusterError as error:  # they show it as DependencyNeverSatisfied, and can be submitted again
        print(f"slurmtrain: jobs that wait for this run may never start: {error.message}", file=sys.stderr)
        return
    if moved:
        run_dir.event("dependents passed on", job_ids=moved, job_id=new)


def _cancelled(run_dir: RunDir) -> bool:
    """`settle` removes a request that it has seen, so this one came later."""
    request = attempts.read_request(run_dir)
    return request is not None and request.action == "cancel"


def _end(run_dir: RunDir, number: int, why: str) -> None:
    attempt = attempts.read_attempt(run_dir, number)
    attempt.verdict = Verdict.END
    attempt.sentence = f"{(attempt.sentence or 'stopped').removesuffix('; it is submitted again')}; {why}"
    attempts.write_attempt(run_dir, attempt)
    run_dir.event("not submitted again", attempt=number, sentence=attempt.sentence)
