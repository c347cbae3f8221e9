"""Check a config and submit it as one run: what `submit` on the command line and `slurmtrain.submit` have in common."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from slurmtrain.choices import Backend
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.launch.code_source import CodeSource, find_source
from slurmtrain.launch.job import check_slurm_is_here, interrupted, submit
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.queue_check import check_request, hint_of_facts, raise_fatal, with_choices_of_the_shell
from slurmtrain.launch.script import dry_run
from slurmtrain.launch.submit import preparing, slurm_conf_of
from slurmtrain.launch.submit_once import check as ask_slurm
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.read_facts import read_facts
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)

MOST_REQUESTS = 100  # of a sweep that are compared with the cluster; those of its points are seldom more than a few


def submit_run(
    config: Config,
    overrides: Sequence[str],
    cwd: Path,
    source: CodeSource | None = None,
) -> tuple[RunDir, str]:
    """Prepare a run and submit its job, or all jobs of its chain; log warnings of likely problems before.

    Args:
        config: a config of a cluster of SLURM's or of Kubernetes, after all checks.
        overrides: for the record.
        cwd: the folder to which paths are relative, and of whose code a snapshot is taken.
        source: the code of a run; None: that of `cwd`.

    Returns:
        The run, and its jobs in words.

    Raises:
        ConfigError: the run directory cannot be made, or the snapshot is refused.
        ClusterError: SLURM is not there, refuses, or does not answer.
    """
    if config.cluster.backend == Backend.KUBERNETES:
        from slurmtrain.launch import targets

        with preparing(config, overrides, cwd, source) as run_dir:
            return run_dir, targets.submit(run_dir)
    config = with_absolute_paths(config, cwd)
    with ThreadPoolExecutor(2) as beside:  # while SLURM answers, the ranks' interpreter does, too
        code = beside.submit(lambda: source or find_source(config.job, cwd, config.cluster))
        beside.map(importlib.import_module, ("submitit.slurm.slurm", "jinja2"))  # so that they are there when needed
        client = client_of(config)
    with preparing(config, overrides, cwd, code.result()) as run_dir:
        try:
            first, *links = submit(run_dir, config, client)
        except KeyboardInterrupt:
            log.info(interrupted(run_dir))
            raise
    return run_dir, f"{first}, followed by {', '.join(links)}" if links else first


class PointLook:
    """The look at the cluster for a run, or for the points of a sweep, one by one.

    A search takes days, and a cluster changes: before a point is refused, SLURM is asked once more.

    Args:
        config: of the run, or of all points, without what is searched.

    Raises:
        ClusterError: SLURM is not there.
    """

    def __init__(self, config: Config):
        self.client, self._facts = ask_cluster(config)
        self._told, self._accepted = set[str](), set[str]()

    def __call__(self, config: Config) -> None:
        """Check that SLURM has what a point asks for, and log warnings of likely problems, each once.

        Raises:
            ConfigError: SLURM would never start its job.
            RefusedError: SLURM would refuse it.
        """
        cluster = with_choices_of_the_shell(config.cluster, os.environ)
        try:
            warnings = raise_fatal(check_request(self._facts, cluster))
        except ConfigError:
            self._facts = read_facts(self.client.glance, whole=False)
            warnings = raise_fatal(check_request(self._facts, cluster))
        for warning in warnings:
            if warning not in self._told:
                log.warning(warning)
            self._told.add(warning)
        request, cwd = repr(config.cluster), current_folder()
        if request not in self._accepted:
            with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as script:
                script.write(dry_run(config, cwd, CodeSource(None, str(cwd))))  # where the code lies is not its concern
                script.flush()
                ask_slurm(Path(script.name), self.client, lambda said: hint_of_facts(said, self._facts, config.cluster))
            self._accepted.add(request)


def may_change_request(key: str) -> bool:
    """Return whether what a job asks for may vary with an override of this key: a field of the cluster, or a config group."""
    name = key.lstrip("+~").partition("@")[0]
    return "." not in name or name.startswith("cluster.")


def client_of(config: Config, others: Iterable[Config] = ()) -> SlurmClient:
    """Check that SLURM is there, and has what the configs ask for, before anything is created, and return its client.

    Args:
        others: further points of a sweep, on the same cluster.

    Raises:
        ConfigError: SLURM would never start the job of one.
        ClusterError: SLURM is not there, or would refuse one.
    """
    look = PointLook(config)
    asking = {repr(each.cluster): each for each in (config, *others)}
    for each in islice(asking.values(), MOST_REQUESTS):
        look(each)
    return look.client


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
    facts = read_facts(client.glance, whole=False)
    client.named = facts.name or None
    return client, facts
