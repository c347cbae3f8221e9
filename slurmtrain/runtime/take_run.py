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

from slurmtrain.config.frozen import config_hash, load_frozen
from slurmtrain.errors import ClusterError, SlurmtrainError
from slurmtrain.runs import choices, requests
from slurmtrain.runs.choices import Choice, Claim, Standing, standing_of
from slurmtrain.runs.events import Event
from slurmtrain.runs.job_tokens import TOKEN_PREFIX
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_states import NOT_STARTED
from slurmtrain.system import files
from slurmtrain.system.patience import refresh

log = logging.getLogger(__name__)

LOOKS = 3  # answers that a job is gone, after which it is taken for gone: a controller that has just begun knows none
LOOK_EVERY_S = 1.0
LOOK_MOST_S = 15.0  # longest pause between looks at a job that has the run and has not begun
SILENCES = 5  # questions without an answer, one after the other, after which nothing can be known of that job


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

    standing = Standing.HOLDS

    def given_up(claim: Claim) -> bool:
        nonlocal standing
        theirs = next((choice for choice in everywhere if choice.name == claim.choice), None)
        asks = _client(theirs, mine, client) if theirs is not None else None
        standing = _wait_until_decided(run_dir, claim, asks, sleep)
        return standing == Standing.GIVEN_UP

    claim = choices.take(run_dir, name, job_id, given_up)
    takes = claim.is_of(name, job_id)
    settled = job_id in run_dir.info()["job_ids"]
    if takes and not settled and requests.cancelled_after(run_dir, None):
        run_dir.event(Event.NOT_TAKEN, job_id=job_id, choice=name, sentence="it was cancelled while it waited")
        take_back(run_dir, [choice for choice in everywhere if choice != mine], mine, client)
        return False
    if takes and not settled:
        settle(run_dir, mine, job_id)
    elif not takes:
        _leave(run_dir, name, job_id, claim, standing)
    if takes or standing == Standing.HOLDS:  # else the run may need the others
        take_back(run_dir, [choice for choice in everywhere if choice.name not in (claim.choice, name)], mine, client)
    now = choices.claim_of(run_dir)
    if takes and now is not None and not now.is_of(name, job_id):
        # Where this job is not shown, as to a sibling of a federation, another one takes it for gone while it has not begun.
        _leave(run_dir, name, job_id, now)
        return False
    return takes


def _leave(run_dir: RunDir, name: str, job_id: str, claim: Claim, standing: Standing = Standing.HOLDS) -> None:
    """Say why a job leaves a run alone."""
    said = f"job {claim.job_id} of {claim.choice} has it"
    if standing == Standing.UNDECIDED:
        said += ", and whether it will begin is not known here"
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
    """Take the jobs of other choices out of the queue. One that cannot be reached leaves by itself when it starts.

    Those that have started are left alone: they leave by themselves, and each may have to take the run over until this job
    has begun.
    """
    for other in others:
        if not other.token:
            continue
        try:
            asks = _client(other, mine, client)
            if asks is None:
                raise ClusterError("its SLURM is that of another machine, and has no cluster.slurm_conf")
            jobs = asks.find_by_comment(TOKEN_PREFIX + other.token, states=NOT_STARTED)
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


def _wait_until_decided(
    run_dir: RunDir, claim: Claim, client: SlurmClient | None, sleep: Callable[[float], None]
) -> Standing:
    """Wait until the job of a claim has begun, or is gone without having begun, and return what that means to this job.

    There is no event to await: it is another job, perhaps of another SLURM, whose node may be dead. So its state and the
    run's attempts are looked at, less and less often.

    Args:
        client: of the SLURM of that job; None: it cannot be asked.

    Returns:
        UNDECIDED: that cannot be known, since its SLURM does not answer; or somebody has ended the run meanwhile.
    """
    gone, silences, pause_s = 0, 0, LOOK_EVERY_S
    while client is not None and silences < SILENCES and not requests.cancelled_after(run_dir, None):
        try:
            facts = client.look(claim.job_id)
        except ClusterError:
            silences += 1
            standing = Standing.HOLDS if _has_begun(run_dir) else Standing.UNDECIDED
        else:
            silences = 0
            state = facts.state if facts is not None else None
            standing = standing_of(state, has_begun=_has_begun(run_dir))  # after its state: what is gone begins no more
        gone = gone + 1 if standing == Standing.GIVEN_UP else 0
        if standing == Standing.HOLDS or gone == LOOKS:
            return standing
        if standing == Standing.UNDECIDED and pause_s == LOOK_EVERY_S:
            log.info(
                "run %s: job %s of %s has it, and has not begun as far as is seen: this job waits until it has, or is gone",
                *(run_dir.id, claim.job_id, claim.choice),
            )
        sleep(LOOK_EVERY_S if gone else pause_s)
        pause_s = min(2 * pause_s, LOOK_MOST_S)
    return Standing.HOLDS if _has_begun(run_dir) else Standing.UNDECIDED


def _has_begun(run_dir: RunDir) -> bool:
    with contextlib.suppress(OSError):  # read-only, or not there yet
        refresh(run_dir.attempts)  # NFS would answer from its cache
    return bool(run_dir.attempt_numbers())
