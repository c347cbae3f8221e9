"""The jobs of a run: pass its script to sbatch, once for each, and record them; and find those that SLURM still has.

No two jobs of a run work at the same time: each waits for all before it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.choices import RequeueMode
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.launch import node_exclusion
from slurmtrain.launch.script import directive, render_script, without_past
from slurmtrain.launch.submit import job_paths
from slurmtrain.launch.submit_once import export_option, submit_exactly_once
from slurmtrain.runs import ownership
from slurmtrain.runs.jobs import TOKEN_PREFIX, is_anothers, named_in, names_of, submitter
from slurmtrain.runs.lookup import is_sweep
from slurmtrain.runs.reasons import Event, Reason, Verdict
from slurmtrain.runs.run_dir import RunDir, made_at
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.slurm.client import INSTALL_HINT, SlurmClient
from slurmtrain.slurm.command_environment import clean_environment
from slurmtrain.slurm.job_facts import GONE
from slurmtrain.system import files

log = logging.getLogger(__name__)


def submit(run_dir: RunDir, config: Config, client: SlurmClient) -> list[str]:
    """Pass the script of a run to sbatch for the first time, and return its jobs: one, or a chain of them.

    Args:
        config: that of the run, in which secrets are references.

    Raises:
        ClusterError: sbatch is missing or refused; its own words are in the message.
    """
    return _with_chain(run_dir, _submit(run_dir, run_dir.script.read_text(), config, client), config, client)


def interrupted(run_dir: RunDir) -> str:
    """Describe the state of a run whose submission a person has interrupted."""
    if not begun_submissions(run_dir):
        return "nothing was submitted"
    return (
        f"run {run_dir.id} may have a job already: resume {run_dir.id} looks for it, and submits the run if it has none; "
        f"cancel {run_dir.id} ends it   {run_dir.path}"
    )


def submit_existing_script(
    run_dir: RunDir, after: Sequence[str] = (), *, token: str | None = None, **facts: object
) -> str:
    """Submit an existing run again, as one job, with the script it was first submitted with, but without its dependencies.

    Args:
        after: jobs that have to end first, in whatever way.
        token: the job's own, if the caller may ask for this job more than once; None: a new one.
        facts: facts for the record.

    Raises:
        UsageError: the run belongs to somebody else, who may have put it in the place of this user's.
    """
    ownership.require_own(run_dir)
    script, config = run_dir.script.read_text(), load_frozen(run_dir.config_file, with_secrets=False)
    if "\nrun_dirs=(" in script:  # it was one of several runs of an array or a pack
        script = render_script(config, job_paths([run_dir.path], run_dir.info()))
    script, options = without_past(script), []
    if after:
        own = directive(script, "dependency")
        options = [f"--dependency=afterany:{':'.join(after)}{f',{own}' if own else ''}"]
    return _submit(run_dir, script, config, SlurmClient(run_dir.slurm_conf()), options, token=token, **facts)


def _submit(
    run_dir: RunDir,
    script: str,
    config: Config,
    client: SlurmClient,
    options: Sequence[str] = (),
    *,
    token: str | None = None,
    **facts: object,
) -> str:
    """Submit a script of a run, and record its job. `options` override the script's own."""
    check_slurm_is_here(client.slurm_conf)
    exclusion = node_exclusion.for_new_job([run_dir], run_dir.script, client, config)
    token = token or f"{submitter(run_dir)}:s{len(run_dir.info()['job_ids'])}"
    before = token in begun_submissions(run_dir)
    run_dir.event(Event.SUBMITTING, token=token)
    job_id = submit_exactly_once(
        script,
        run_dir.path / "submitit",
        token,
        client,
        options=[*options, *exclusion.options, *export_option(config)],
        looked_for_before=before,
        even_ended=False,  # a run is submitted once more only when it has ended, whatever job had it
        finds_out=f"`resume {run_dir.id}` looks for it first",
    )
    note(run_dir, job_id, **facts)
    if exclusion.blamed:
        with _warning_if_not_recorded(run_dir, job_id):
            exclusion.record(run_dir, job_id)
    exclusion.tell()
    return job_id


def note(run_dir: RunDir, job_id: str, **facts: object) -> None:
    """Record that this job is the run's latest, and that no other run shares it."""
    with _warning_if_not_recorded(run_dir, job_id):
        run_dir.add_job(job_id, packed=False)
        run_dir.event(Event.SUBMITTED, job_id=job_id, **facts)


@contextlib.contextmanager
def _warning_if_not_recorded(run_dir: RunDir, job_id: str) -> Iterator[None]:
    """Go on with a warning if a job that SLURM has taken cannot be noted: an error would say that there is none."""
    try:
        yield
    except OSError as error:  # a full disk
        log.warning(
            "job %s is submitted, but cannot be noted in %s: %s; `resume %s` looks for it, and `cancel %s` ends it",
            *(job_id, run_dir.path, error.strerror or error, run_dir.id, run_dir.id),
        )


def check_slurm_is_here(slurm_conf: str | None) -> None:
    """Raise ClusterError if a command that submitting or the job needs is missing."""
    path = clean_environment(os.environ, slurm_conf).get("PATH")
    for program in ("sbatch", "srun"):
        if shutil.which(program, path=path) is None:
            raise ClusterError(f"there is no `{program}` on this machine", hint=INSTALL_HINT)


def begun_submissions(run_dir: RunDir) -> list[str]:
    """Return the tokens of the submissions that were begun."""
    return [str(event.get("token")) for event in run_dir.events() if event["event"] == Event.SUBMITTING]


# Further jobs: that of `resume`, the others of a chain, and the one that continues after a stop.


def resume(run_dir: RunDir, client: SlurmClient) -> list[str]:
    """Submit a run that has ended, as one job or a chain of them, and return their ids.

    A job that is already in the queue for it, and was never noted, is the first of them.

    Raises:
        ClusterError: sbatch is missing or refused.
    """
    known = run_dir.info()["job_ids"]
    found = client.find_by_comment(TOKEN_PREFIX + token(run_dir))
    job_id = next((each for each in found if each not in known), None)
    if job_id is not None:
        note(run_dir, job_id, found_by=TOKEN_PREFIX + token(run_dir))
    else:
        job_id = submit_existing_script(run_dir)
    return _with_chain(run_dir, job_id, load_frozen(run_dir.config_file, with_secrets=False), client)


def _with_chain(run_dir: RunDir, first: str, config: Config, client: SlurmClient) -> list[str]:
    """Submit the rest of the chain that begins with the job `first`, if the run has one, and return all its jobs.

    Raises:
        ClusterError: sbatch refused a job; those before it are cancelled.
    """
    requeue, links = config.requeue, [first]
    if requeue.mode != RequeueMode.CHAIN:
        return links
    numbers = run_dir.attempt_numbers()
    run_dir.update_info(chain=links, chain_after=numbers[-1] if numbers else 0)
    try:
        while len(links) < requeue.chain_length:
            # Each waits for all before it: if it waited only for the one before, a scancel of that one would start it
            # beside those that still run.
            links.append(submit_existing_script(run_dir, links, link=len(links) + 1, of=requeue.chain_length))
            run_dir.update_info(chain=links)
    except BaseException:
        client.cancel(*reversed(links))
        raise
    return links


def token(run_dir: RunDir, number: int | None = None) -> str:
    """Return the token of the job that continues after attempt `number`; without a number, the prefix of all such tokens."""
    return f"{submitter(run_dir)}:{'' if number is None else number}"


def settle(run_dir: RunDir) -> None:
    """Make a copy a run of its own, and let a run that was moved start where it is now.

    Nothing happens to a run that is where it was made.

    Raises:
        UsageError: it was a sweep's point, whose code is gone or belongs to somebody else.
    """
    from slurmtrain.runs import attempts

    info = run_dir.info()
    made = (info.get("made_at") or {}).get("path", str(run_dir.path))
    if made == str(run_dir.path) or (os.path.exists(made) and os.path.samefile(made, run_dir.path)):
        return
    facts: dict[str, Any] = {"id": run_dir.id, "made_at": made_at(run_dir.path)}
    if info.get("copied_from"):
        run_dir.request_file.unlink(missing_ok=True)
        for attempt in attempts.all_attempts(run_dir):
            if attempt.verdict is None:  # it may still be at work in the original
                attempt.verdict, attempt.reason = Verdict.END, Reason.ASKED
                attempt.ended = attempt.started or time.time()
                attempt.say(f"was copied from {info['copied_from']}")
                attempts.write_attempt(run_dir, attempt)
        # Its jobs have another name than those of the original, which has the same id.
        facts |= {"copied_from": None, "copy": secrets.token_hex(3), "packed": False}
    if run_dir.code.is_symlink() and not run_dir.code.exists():  # a point that has left its sweep, whose code it shares
        code = os.path.join(os.path.dirname(made), "code")
        if not files.is_mine(Path(code)):  # it would run as this user, and its owner could still change it
            raise UsageError(
                f"the code of run {run_dir.id} is {code}, which is gone or is not yours",
                hint=f"copy it to {run_dir.code}, in place of the link there",
            )
        run_dir.code.unlink()
        run_dir.code.symlink_to(code)
    config = load_frozen(run_dir.config_file, with_secrets=False)
    files.write_text(run_dir.script, render_script(config, job_paths([run_dir.path], info)))
    run_dir.update_info(**facts)


# The jobs that SLURM still has: all that a run was submitted as, not only the latest. There can be several: one that a
# requeue by hand has revived, one that continues after a stop and was never noted, the rest of a chain.


def in_queue(run_dirs: Sequence[RunDir], client: SlurmClient) -> dict[str, list[str]]:
    """Return the jobs of each run that have not ended, by the run's id, in the order of their submission; two squeue calls.

    A job that other runs share (sweep.pack) is left out: it does not end with one run. So is a job that has the id of
    an earlier job of the run, but names another run or sweep in its comment.

    Raises:
        ClusterError: squeue is missing, or the controller does not answer.
    """
    sweeps = [Sweep(folder) for folder in {run_dir.path.parent for run_dir in run_dirs} if is_sweep(folder)]
    shared = {sweep.job_id(number) for sweep in sweeps if sweep.pack > 1 for number in sweep.array_numbers()}
    infos = {run_dir.id: run_dir.info() for run_dir in run_dirs}
    noted = {
        run_id: [job for job in map(str, info["job_ids"]) if job.partition("_")[0] not in shared]
        for run_id, info in infos.items()
    }
    comments = client.comments() if run_dirs else {}
    by_run: dict[str, list[str]] = {}  # by the token in the comment
    for job, words in comments.items():
        for run_id in named_in(words):
            by_run.setdefault(run_id, []).append(job)
    queue = client.queue({job for jobs in noted.values() for job in jobs})
    found: dict[str, list[str]] = {}
    for run_dir in run_dirs:
        jobs, names = noted[run_dir.id], names_of(run_dir)
        left = [job for job in jobs if job in queue and queue[job].state not in GONE]
        own = [job for job in left if not is_anothers(comments.get(job.partition("_")[0], ()), names)]
        found[run_dir.id] = [*own, *(job for job in by_run.get(names[0], []) if job not in jobs)]
        if infos[run_dir.id].get("copied_from"):  # SLURM has jobs of the original under the same name
            found[run_dir.id] = []
    return found
