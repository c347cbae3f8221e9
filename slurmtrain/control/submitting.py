"""Check a config and submit it as one run: what `submit` on the command line and `slurmtrain.submit` have in common."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.data.sources.config_check import check_prepared
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.launch.further_jobs import submit_links
from slurmtrain.launch.logger_check import check_loggers
from slurmtrain.launch.memory_check import check_memory
from slurmtrain.launch.named_paths import check_named_paths
from slurmtrain.launch.queue_check.finding import raise_fatal
from slurmtrain.launch.queue_check.request import check_request, with_choices_of_the_shell
from slurmtrain.launch.snapshot import CodeSource
from slurmtrain.launch.submit import check_slurm_is_here, interrupted, preparing, slurm_conf_of, submit
from slurmtrain.launch.submit_once import RefusedError
from slurmtrain.launch.submit_once import check as ask_slurm
from slurmtrain.launch.time_limit_check import check as check_time_limit
from slurmtrain.launch.time_limit_check import look_ahead
from slurmtrain.planner.fit import check_fits
from slurmtrain.runs import lookup
from slurmtrain.runs.reasons import RunAction
from slurmtrain.runs.requests import write_request
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.read_facts import read_facts
from slurmtrain.system.user import own_groups

log = logging.getLogger(__name__)

MOST_REQUESTS = 100  # of a sweep that are compared with the cluster; those of its points are seldom more than a few


def check(config: Config, dims: ParallelDims, cwd: Path, *, later: bool = False, look_at_files: bool = True) -> None:
    """Check what a validated config needs of the GPUs, of prepared data and of this machine's files.

    Args:
        cwd: the folder to which paths in the config are relative.
        later: the job waits for other jobs, which may still make files.
        look_at_files: check that the files that the config names exist, and loggers of one's own.

    Raises:
        ConfigError: it cannot work.
    """
    check_fits(config, dims)
    check_prepared(config, later=later)
    if look_at_files:
        for warning in check_named_paths(config, cwd, later=later):
            log.warning(warning)
        check_loggers(config, cwd)


def warn_of_memory(config: Config, dims: ParallelDims) -> None:
    """Log a warning if the model will hardly fit. That takes seconds for a large one."""
    for warning in check_memory(config, dims):
        log.warning(warning)


def submit_run(
    config: Config,
    dims: ParallelDims,
    overrides: Sequence[str],
    cwd: Path,
    *,
    after: str | None = None,
    source: CodeSource | None = None,
) -> tuple[RunDir, str]:
    """Prepare a run and submit its job, or all jobs of its chain; log warnings of likely problems before.

    Args:
        config: a config of a cluster of SLURM's, after all checks.
        dims: its parallel dims.
        overrides: for the record.
        cwd: the folder to which paths are relative, and of whose code a snapshot is taken.
        after: runs that have to finish first, as a person names them, separated by commas.
        source: the code, out of a bundle; None: that of `cwd`.

    Returns:
        The run, and its jobs in words.

    Raises:
        ConfigError: the run directory cannot be made, or the snapshot is refused.
        ClusterError: SLURM is not there, refuses, or does not answer.
        UsageError: the runs to wait for do not exist, or cannot finish any more.
    """
    plan = starting_after(config, after) if after is not None else config
    warn_of_memory(plan, dims)
    if after is None:
        return _submit(plan, overrides, cwd, None, source)
    try:
        return _submit(plan, overrides, cwd, after, source)
    except RefusedError:  # one of the runs may have ended since, and SLURM may have forgotten its job
        later = starting_after(config, after)
        if later == plan:
            raise
        return _submit(later, overrides, cwd, after, source)


def starting_after(config: Config, runs: str) -> Config:
    """Return what `launch.dependencies.starting_after` does; raise for cluster=local."""
    from slurmtrain.launch import dependencies

    if config.cluster.backend == Backend.LOCAL:
        raise UsageError(
            "--after works with SLURM jobs, but cluster=local has no queue", hint="submit when it has finished"
        )
    return dependencies.starting_after(config, runs, lookup.runs_root())


class PointLook:
    """The look at the cluster for the points of a search, which are chosen one by one.

    A search takes days, and a cluster changes: before a point is refused, SLURM is asked once more.

    Args:
        config: of all points, without what is searched.
        varies: what jobs ask for may be other than in `config`, which is no point itself.

    Raises:
        ConfigError: no point could run.
        ClusterError: SLURM is not there.
    """

    def __init__(self, config: Config, *, varies: bool):
        self.client = SlurmClient(slurm_conf_of(config))
        check_slurm_is_here(self.client.slurm_conf)
        self._facts = read_facts(self.client.glance, whole=False)
        self._told: set[str] = set()
        if not varies:
            self._look(config)
            for warning in look_ahead(config, Path(config.job.runs_dir).expanduser(), self._facts):
                log.warning(warning)

    def __call__(self, config: Config) -> None:
        """Check that SLURM has what a point asks for, and log warnings of likely problems, each once.

        Raises:
            ConfigError: SLURM would refuse its job, or never start it.
        """
        try:
            self._look(config)
        except ConfigError:
            self._facts = read_facts(self.client.glance, whole=False)
            self._look(config)

    def _look(self, config: Config) -> None:
        check_time_limit(config.cluster, None, None)
        for warning in compare_with_cluster(self._facts, config):
            if warning not in self._told:
                log.warning(warning)
            self._told.add(warning)


def may_change_request(key: str) -> bool:
    """Return whether what a job asks for may vary with an override of this key: a field of the cluster, or a config group."""
    name = key.lstrip("+~").partition("@")[0]
    return "." not in name or name.startswith("cluster.")


def client_of(config: Config, others: Iterable[Config] = ()) -> SlurmClient:
    """Check that SLURM is there, and has what the configs ask for, before anything is created, and return its client.

    Warnings of likely problems are logged.

    Args:
        others: further points of a sweep, on the same cluster.

    Raises:
        ConfigError: SLURM would refuse a job, or never start it.
        ClusterError: SLURM is not there.
    """
    return look_at_cluster(config, others)[0]


def look_at_cluster(config: Config, others: Iterable[Config] = ()) -> tuple[SlurmClient, ClusterFacts]:
    """Do what `client_of` does, and return what SLURM has said of the cluster as well."""
    client, facts = ask_cluster(config)
    compare_all(facts, config, others)
    return client, facts


def ask_cluster(config: Config) -> tuple[SlurmClient, ClusterFacts]:
    """Return the client of a config's cluster, and what SLURM says of it.

    Raises:
        ClusterError: SLURM is not there.
    """
    client = SlurmClient(slurm_conf_of(config))
    check_slurm_is_here(client.slurm_conf)
    return client, read_facts(client.glance, whole=False)


def compare_all(facts: ClusterFacts, config: Config, others: Iterable[Config]) -> None:
    """Compare what configs ask for with what SLURM says of their cluster, and log warnings.

    Raises:
        ConfigError: SLURM would refuse a job, or never start it.
    """
    asking = {repr(each.cluster): each for each in (config, *others)}
    warnings: dict[str, None] = {}  # the same of several points is said once
    for each in islice(asking.values(), MOST_REQUESTS):
        warnings |= dict.fromkeys(compare_with_cluster(facts, each))
        check_time_limit(each.cluster, None, None)
    warnings |= dict.fromkeys(look_ahead(config, Path(config.job.runs_dir).expanduser(), facts))
    for warning in warnings:
        log.warning(warning)


def compare_with_cluster(facts: ClusterFacts, config: Config) -> list[str]:
    """Compare what a config asks for with what SLURM says of the cluster, and return warnings.

    Raises:
        ConfigError: SLURM would refuse the job, or never start it.
    """
    cluster = with_choices_of_the_shell(config.cluster, os.environ)
    return raise_fatal(check_request(facts, cluster, groups=own_groups(), user_id=os.getuid()))


def _submit(
    config: Config, overrides: Sequence[str], cwd: Path, after: str | None, source: CodeSource | None
) -> tuple[RunDir, str]:
    client = client_of(config)
    with preparing(config, overrides, cwd, source) as run_dir:
        ask_slurm(run_dir.script, client)
        try:
            job_id = submit([run_dir], config)
        except KeyboardInterrupt:
            log.info(interrupted(run_dir, client))
            raise
        if config.requeue.mode == RequeueMode.CHAIN:
            links = submit_links(run_dir, job_id, config.requeue.chain_length, client)
            job_id = f"{job_id}, followed by {', '.join(links[1:])}"
    if after is not None:
        _check_not_in_vain(run_dir, after, client)
    return run_dir, job_id


def _check_not_in_vain(run_dir: RunDir, runs: str, client: SlurmClient) -> None:
    from slurmtrain.launch.dependencies import check_again

    try:
        check_again(runs, lookup.runs_root(), client)
    except UsageError:
        write_request(run_dir, RunAction.CANCEL)
        client.cancel(*reversed(run_dir.info()["job_ids"]))
        raise
