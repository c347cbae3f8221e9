"""submit --after: make a job wait until other runs have finished."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from slurmtrain.choices import Backend
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.launch.submit import slurm_conf_of
from slurmtrain.report.status.state import RunState, RunStatus, states
from slurmtrain.runs import lookup
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.failures import was_preempted
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.parse_values import STARTS_PREEMPTED_JOBS_ONCE_MORE, does
from slurmtrain.system.paths import runs_root

log = logging.getLogger(__name__)


def starting_after(config: Config, references: str) -> Config:
    """Return the config of a job that SLURM starts when these runs have finished.

    Args:
        references: runs as a person names them, separated by commas.

    Raises:
        UsageError: a run is not known, has failed, or is nothing that SLURM can wait for; or there is no SLURM.
    """
    if config.cluster.backend != Backend.SLURM:
        raise UsageError(
            f"--after works with SLURM jobs, but cluster={config.cluster.backend} has no queue",
            hint="submit when it has finished",
        )
    return waiting_for_runs(config, find_runs(references), slurm_conf_of(config))


def find_runs(references: str) -> list[RunDir]:
    """Return the runs that a person names, separated by commas.

    Raises:
        UsageError: a run is not known, or none is named.
    """
    run_dirs = [lookup.find(reference.strip(), runs_root()) for reference in references.split(",") if reference.strip()]
    if not run_dirs:
        raise UsageError(f"--after {references!r} names no run", hint="--after RUN, or RUN,RUN")
    return list(dict.fromkeys(run_dirs))


def waiting_for_runs(config: Config, run_dirs: Sequence[RunDir], slurm_conf: str | None) -> Config:
    """Return the config of a job on the cluster of `slurm_conf` that starts when these runs have finished.

    Raises:
        UsageError: a run has failed, or is nothing that SLURM can wait for.
    """
    found = states(run_dirs)
    conditions = [_condition(run_dir, found[run_dir], slurm_conf) for run_dir in run_dirs]
    return with_dependency(config, [condition for condition in conditions if condition])


def with_dependency(config: Config, conditions: Sequence[str]) -> Config:
    """Return the config with these dependencies added to its own. All have to be met.

    Raises:
        UsageError: one of several is a choice, which SLURM cannot combine with others.
    """
    if not conditions:
        return config
    given = config.cluster.sbatch.get("dependency")
    every = [*(given if isinstance(given, list) else [given] if given else []), *conditions]
    choice = next((condition for condition in every if "?" in str(condition)), None)
    if choice is not None and (len(every) > 1 or config.job.singleton):
        raise UsageError(
            f"SLURM cannot wait for one of several jobs ({choice}) and for something else, too",
            hint="--after accepts a run with requeue.mode=chain only by itself, and without job.singleton",
        )
    options = {**config.cluster.sbatch, "dependency": ",".join(map(str, every))}
    return replace(config, cluster=replace(config.cluster, sbatch=options))


def _condition(run_dir: RunDir, now: RunState, here: str | None) -> str | None:
    """Return the dependency that is met when this run has finished; None when it has."""
    if now.status == RunStatus.FINISHED:
        return None
    if not now.alive:
        what = "has not been submitted yet" if now.status == RunStatus.PREPARED else f"will not finish: {now.status}"
        raise UsageError(
            f"run {run_dir.id} {what}, {now.explanation}", hint=f"resume {run_dir.id}, then submit --after it again"
        )
    info = run_dir.info()
    if now.job_id is None or not now.own_job or now.packed:
        raise UsageError(
            f"run {run_dir.id} does not have its own SLURM job, so SLURM cannot wait for it",
            hint="submit when it has finished",
        )
    if info["slurm_conf"] != here:
        raise UsageError(
            f"run {run_dir.id} is on another cluster, that of {info['slurm_conf'] or '/etc/slurm/slurm.conf'}",
            hint="submit when it has finished",
        )
    # The job of a chain in which the run finishes is the only one that ends with 0. A run that is resubmitted passes its
    # dependents on to the next job.
    return "?".join(f"afterok:{job_id}" for job_id in (now.job_id, *now.following))


def free_dependents(run_dir: RunDir, attempt: Attempt, client: SlurmClient) -> None:
    """Let jobs that wait for the success of this attempt's job wait for it no more, since the run has finished in it.

    They were submitted with --after this run. A job that was ever preempted may not end yet, or not as a success: see
    `slurm.parse_values.STARTS_PREEMPTED_JOBS_ONCE_MORE`.
    """
    job_id = attempt.job_id
    if job_id is None or not (attempt.restart_count or was_preempted(run_dir, attempt)):
        return
    if not does(client.version(), STARTS_PREEMPTED_JOBS_ONCE_MORE):
        return
    try:
        freed = client.pass_on_dependents(job_id, None)
    except ClusterError as error:  # if the job ends as PREEMPTED, they show DependencyNeverSatisfied
        log.warning("jobs that wait for this run may start late or never: %s", error.message)
        return
    if freed:
        with contextlib.suppress(OSError):  # a full disk; they are free all the same
            run_dir.event(Event.DEPENDENTS_FREED, job_ids=freed, job_id=job_id)
