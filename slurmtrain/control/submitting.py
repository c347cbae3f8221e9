"""Check a config and submit it as one run: what `submit` on the command line and `slurmtrain.submit` have in common."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from slurmtrain.choices import Backend
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.control.checks import warn_of_memory
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.launch.code_source import CodeSource
from slurmtrain.launch.job import check_slurm_is_here, interrupted, submit
from slurmtrain.launch.measured import check_measured
from slurmtrain.launch.queue_check import (
    Finding,
    check_request,
    hint_of_facts,
    raise_fatal,
    with_choices_of_the_shell,
)
from slurmtrain.launch.script import dry_run
from slurmtrain.launch.submit import preparing, slurm_conf_of
from slurmtrain.launch.submit_once import check as ask_slurm
from slurmtrain.runs.reasons import RunAction
from slurmtrain.runs.requests import write_request
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.read_facts import read_facts
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)

MOST_REQUESTS = 100  # of a sweep that are compared with the cluster; those of its points are seldom more than a few


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
        config: a config of a cluster of SLURM's or of Kubernetes, after all checks.
        dims: its parallel dims.
        overrides: for the record.
        cwd: the folder to which paths are relative, and of whose code a snapshot is taken.
        after: runs that have to finish first, as a person names them, separated by commas.
        source: the code of a run; None: that of `cwd`.

    Returns:
        The run, and its jobs in words.

    Raises:
        ConfigError: the run directory cannot be made, or the snapshot is refused.
        ClusterError: SLURM is not there, refuses, or does not answer.
        UsageError: the runs to wait for do not exist, or cannot finish any more.
    """
    plan = config
    if after is not None:
        from slurmtrain.launch.dependencies import check_again, starting_after

        plan = starting_after(config, after)
    warn_of_memory(plan, dims)
    if config.cluster.backend == Backend.KUBERNETES:
        from slurmtrain.launch import kubernetes

        with preparing(plan, overrides, cwd, source) as run_dir:
            return run_dir, kubernetes.submit(run_dir)
    client, facts = ask_cluster(plan)
    for warning in compare_with_cluster(facts, plan, check_measured(plan)):
        log.warning(warning)
    with preparing(plan, overrides, cwd, source) as run_dir:
        ask_slurm(run_dir.script, client, lambda said: hint_of_facts(said, facts, plan.cluster))
        try:
            first, *links = submit(run_dir, client)
        except KeyboardInterrupt:
            log.info(interrupted(run_dir))
            raise
    if after is not None:
        try:
            check_again(after, client)
        except UsageError:
            write_request(run_dir, RunAction.CANCEL)
            client.cancel(*reversed(run_dir.info()["job_ids"]))
            raise
    return run_dir, f"{first}, followed by {', '.join(links)}" if links else first


class PointLook:
    """The look at the cluster for the points of a sweep, one by one.

    A search takes days, and a cluster changes: before a point is refused, SLURM is asked once more.

    Args:
        config: of all points, without what is searched.
        varies: what jobs ask for may be other than in `config`, which is no point itself.

    Raises:
        ConfigError: no point could run.
        ClusterError: SLURM is not there.
    """

    def __init__(self, config: Config, *, varies: bool):
        self.client, self._facts = ask_cluster(config)
        self._told, self._accepted = set[str](), set[str]()
        if not varies:
            self._warn(compare_with_cluster(self._facts, config, check_measured(config)))

    def __call__(self, config: Config) -> None:
        """Check that SLURM has what a point asks for, and log warnings of likely problems, each once.

        Raises:
            ConfigError: SLURM would never start its job.
            RefusedError: SLURM would refuse it.
        """
        try:
            warnings = compare_with_cluster(self._facts, config)
        except ConfigError:
            self._facts = read_facts(self.client.glance, whole=False)
            warnings = compare_with_cluster(self._facts, config)
        self._warn(warnings)
        request = repr(config.cluster)
        if request not in self._accepted:
            _check_accepted(config, self.client)
            self._accepted.add(request)

    def _warn(self, warnings: Iterable[str]) -> None:
        for warning in warnings:
            if warning not in self._told:
                log.warning(warning)
            self._told.add(warning)


def may_change_request(key: str) -> bool:
    """Return whether what a job asks for may vary with an override of this key: a field of the cluster, or a config group."""
    name = key.lstrip("+~").partition("@")[0]
    return "." not in name or name.startswith("cluster.")


def client_of(config: Config, others: Iterable[Config] = ()) -> SlurmClient:
    """Check that SLURM is there, and has what the configs ask for, before anything is created, and return its client.

    Args:
        others: further points of a sweep, on the same cluster.

    Raises:
        ConfigError, ClusterError: as `PointLook`.
    """
    look = PointLook(config, varies=False)
    asking = {repr(each.cluster): each for each in (config, *others)}
    for each in islice(asking.values(), MOST_REQUESTS):
        look(each)
    return look.client


def _check_accepted(config: Config, client: SlurmClient) -> None:
    """Ask SLURM whether it would accept a job of this config; raise RefusedError if not."""
    cwd = current_folder()
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as script:
        script.write(dry_run(config, cwd, CodeSource(None, str(cwd))))  # where the code lies is not SLURM's concern
        script.flush()
        ask_slurm(Path(script.name), client)


def ask_cluster(config: Config) -> tuple[SlurmClient, ClusterFacts]:
    """Return the client of a config's cluster, and what SLURM says of it.

    Raises:
        ClusterError: SLURM is not there.
        ConfigError: the config is for another scheduler.
    """
    if config.cluster.backend != Backend.SLURM:
        raise ConfigError(
            f"this needs SLURM, but cluster.backend={config.cluster.backend}",
            hint="`submit` without -m submits one run",
        )
    client = SlurmClient(slurm_conf_of(config))
    check_slurm_is_here(client.slurm_conf)
    return client, read_facts(client.glance, whole=False)


def compare_with_cluster(facts: ClusterFacts, config: Config, others: Sequence[Finding] = ()) -> list[str]:
    """Compare what a config asks for with what SLURM says of the cluster; return warnings.

    Args:
        others: what else was found, to be said with it.

    Raises:
        ConfigError: SLURM would refuse the job, or never start it.
    """
    cluster = with_choices_of_the_shell(config.cluster, os.environ)
    return raise_fatal([*others, *check_request(facts, cluster)])
