"""Take a run that was submitted to several choices for the job that starts first, and take the others' jobs back.

It is done before the job claims an attempt (`take-run` of the batch script). Every step can be done again, by the next start
of the same job or by any other job of the run that starts: whoever dies, and when, leaves nothing that nobody finishes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence

from slurmtrain.config.compose import config_hash, load_frozen
from slurmtrain.errors import ClusterError, SlurmtrainError
from slurmtrain.runs import attempts, choices
from slurmtrain.runs.choices import Choice, Claim
from slurmtrain.runs.events import Event
from slurmtrain.runs.job_tokens import TOKEN_PREFIX
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system import files

log = logging.getLogger(__name__)

LOOKS = 3  # answers that a job is gone, after which it is taken for gone: a controller that has just begun knows none
LOOK_EVERY_S = 1.0
LEAVING_S = 60.0  # longest wait for a job that is on its way out, which may come back to the queue or be gone then


def take_or_leave(
    run_dir: RunDir,
    name: str,
    job_id: str,
    client: Callable[[str | None], SlurmClient] = SlurmClient,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Take a run for the job `job_id` of the choice `name`, and take the other jobs back; return whether it is this job's.

    Args:
        client: returns a client of the SLURM of a slurm.conf; None: that of this job.

    Raises:
        ClusterError: the run has no such choice.
        OSError: the claim, or what the run is with this choice, cannot be written.
    """
    everywhere = choices.choices_of(run_dir)
    mine = next((choice for choice in everywhere if choice.name == name), None)
    if mine is None:
        raise ClusterError(f"{run_dir.choices} has no choice {name!r}", hint="was it removed? submit the run again")

    def given_up(claim: Claim) -> bool:
        theirs = next((choice for choice in everywhere if choice.name == claim.choice), None)
        asks = _client(theirs, mine, client) if theirs is not None else None
        return asks is not None and _holds_no_more(run_dir, claim, asks, sleep)

    claim = choices.take(run_dir, name, job_id, given_up)
    takes = claim.is_of(name, job_id)
    settled = job_id in run_dir.info()["job_ids"]
    if takes and not settled and attempts.cancelled_after(run_dir, None):
        run_dir.event(Event.NOT_TAKEN, job_id=job_id, choice=name, sentence="it was cancelled while it waited")
        take_back(run_dir, [choice for choice in everywhere if choice != mine], mine, client)
        return False
    if takes and not settled:
        settle(run_dir, mine, job_id)
    elif not takes:
        _leave(run_dir, name, job_id, claim)
    take_back(run_dir, [choice for choice in everywhere if choice.name not in (claim.choice, name)], mine, client)
    now = choices.claim_of(run_dir)
    if takes and now is not None and not now.is_of(name, job_id):
        # Where this job is not shown, as to a sibling of a federation, another one takes it for gone while it has not begun.
        _leave(run_dir, name, job_id, now)
        return False
    return takes


def _leave(run_dir: RunDir, name: str, job_id: str, claim: Claim) -> None:
    """Say why a job leaves a run alone."""
    said = f"job {claim.job_id} of {claim.choice} has it"
    log.info("run %s: %s, so job %s of %s leaves", run_dir.id, said, job_id, name)
    with contextlib.suppress(OSError):
        run_dir.event(Event.NOT_TAKEN, job_id=job_id, choice=name, sentence=said)


def settle(run_dir: RunDir, choice: Choice, job_id: str) -> None:
    """Make the config, the script and the job of a choice those of the run.

    That the job is noted comes last, and says that all of it is done.
    """
    config = load_frozen(choice.config_file, with_secrets=False)
    files.write_text(run_dir.config_file, choice.config_file.read_text())
    files.write_text(run_dir.script, choice.script.read_text())
    log_name = f"slurm-{job_id}.log"
    with contextlib.suppress(OSError):  # a file system without links: it is in the choice's folder
        os.link(choice.folder / log_name, run_dir.path / log_name)
    run_dir.event(Event.TAKEN, job_id=job_id, choice=choice.name)
    run_dir.add_job(job_id, slurm_conf=choice.named_conf, config_hash=config_hash(config))


def take_back(
    run_dir: RunDir, others: Sequence[Choice], mine: Choice, client: Callable[[str | None], SlurmClient]
) -> None:
    """Take the jobs of other choices out of the queue. One that cannot be reached leaves by itself when it starts."""
    for other in others:
        if not other.token:
            continue
        try:
            asks = _client(other, mine, client)
            if asks is None:
                raise ClusterError("its SLURM is that of another machine, and has no cluster.slurm_conf")
            jobs = asks.find_by_comment(TOKEN_PREFIX + other.token)
            if jobs:
                asks.cancel(*jobs)
                run_dir.event(Event.TAKEN_BACK, job_ids=jobs, choice=other.name)
        except (SlurmtrainError, OSError) as error:
            log.warning("the job of %s is not taken back, and leaves when it starts: %s", other.name, error)


def _client(choice: Choice, mine: Choice, client: Callable[[str | None], SlurmClient]) -> SlurmClient | None:
    """Return a client of a choice's SLURM, as it is reached from a job of the choice `mine`; None if it cannot be."""
    if choice.named_conf == mine.named_conf:
        return client(None)
    try:
        conf = choice.slurm_conf()
    except ClusterError:
        return None
    return client(conf) if conf is not None else None


def _holds_no_more(run_dir: RunDir, claim: Claim, client: SlurmClient, sleep: Callable[[float], None]) -> bool:
    """Return whether the job of a claim is gone without having begun, as far as its SLURM can be asked."""
    seen, waited = 0, 0.0
    while seen < LOOKS:
        try:
            facts = client.look(claim.job_id)
        except ClusterError:
            return False
        state = facts.state if facts is not None else None
        leaving = state == "COMPLETING" and waited < LEAVING_S
        if not leaving and not choices.holds_no_more(state, has_begun=bool(run_dir.attempt_numbers())):
            return False
        seen += not leaving
        if seen < LOOKS:
            sleep(LOOK_EVERY_S)
            waited += LOOK_EVERY_S
    return True
