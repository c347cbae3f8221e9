"""Further jobs of a run: that of `resume`, the others of a chain, and the token of one that continues after a stop.

No two jobs of a run work at the same time: each waits for all before it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slurmtrain.choices import RequeueMode
from slurmtrain.config.frozen import load_frozen
from slurmtrain.launch.directives import directive
from slurmtrain.launch.submit import note, submit_existing_script
from slurmtrain.runs.job_tokens import TOKEN_PREFIX
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient

log = logging.getLogger(__name__)


def resume(run_dir: RunDir, client: SlurmClient) -> list[str]:
    """Submit a run that has ended, as one job or a chain of them, and return their ids.

    A job that is already in the queue for it, and was never noted, is the first of them.

    Raises:
        ClusterError: sbatch is missing or refused.
    """
    config = load_frozen(run_dir.config_file, with_secrets=False)
    job_id = _unnoted(run_dir, client)
    if job_id is not None:
        note(run_dir, job_id, found_by=TOKEN_PREFIX + token(run_dir))
    else:
        job_id = submit_existing_script(run_dir)
    length = config.requeue.chain_length if config.requeue.mode == RequeueMode.CHAIN else 1
    return submit_links(run_dir, job_id, length, client)


def submit_links(run_dir: RunDir, first: str, length: int, client: SlurmClient) -> list[str]:
    """Submit the rest of the chain that begins with the job `first`, and return all its jobs; with length 1, only the first.

    Raises:
        ClusterError: sbatch refused a job; those before it are cancelled.
    """
    links = [first]
    if length == 1:
        return links
    numbers = run_dir.attempt_numbers()
    run_dir.update_info(chain=links, chain_after=numbers[-1] if numbers else 0)
    try:
        while len(links) < length:
            # Each waits for all before it: if it waited only for the one before, a scancel of that one would start it
            # beside those that still run.
            links.append(
                submit_existing_script(
                    run_dir, lambda script: waiting_for(script, links), link=len(links) + 1, of=length
                )
            )
            run_dir.update_info(chain=links)
    except BaseException:
        client.cancel(*reversed(links))
        raise
    return links


def token(run_dir: RunDir, number: int | None = None) -> str:
    """Return the token of the job that continues after attempt `number`; without a number, the prefix of all such tokens."""
    return f"{run_dir.id}:{'' if number is None else number}"


def waiting_for(script: str, job_ids: Sequence[str]) -> list[str]:
    """Return the option by which a job waits until these have ended, in whatever way, besides what its script waits for."""
    own = directive(script, "dependency")
    return [f"--dependency=afterany:{':'.join(job_ids)}{f',{own}' if own else ''}"]


def _unnoted(run_dir: RunDir, client: SlurmClient) -> str | None:
    """Return a job that was to continue the run and whose submitter was killed before it could note it.

    The result is None if there is none.
    """
    known = run_dir.info()["job_ids"]
    return next(
        (job_id for job_id in client.find_by_comment(TOKEN_PREFIX + token(run_dir)) if job_id not in known), None
    )
