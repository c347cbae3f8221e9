"""A sweep before it is created: all its points composed and validated, the resources of each, and which are the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.config.frozen import freeze, to_values
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.launch.arrays import Array, plan_arrays
from slurmtrain.launch.dependencies import waiting_for_runs
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.script import render_script
from slurmtrain.launch.script_parts import JobPaths
from slurmtrain.launch.snapshot import find_source
from slurmtrain.launch.submit import PLACEHOLDER_ID, no_chain, slurm_conf_of, steps_of
from slurmtrain.runs.run_dir import RunDir


def identity_of(config: Config) -> str:
    """Return 16 hex digits over the values that decide a result, independent of the order of keys.

    The places of runs and code, hooks, loggers, what a search does with its trials, and the sources of secrets are left out.
    """
    values = to_values(config)
    for key in ("hooks", "secrets", "watchdog", "observe", "search"):
        del values[key]
    for key in ("runs_dir", "snapshot", "snapshot_max_mb"):
        del values["job"][key]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class SweepPlan:
    """All points of a sweep that is to be created, composed and validated.

    It keeps text, not configs: there may be thousands.

    Attributes:
        first: the first point's config; name and folder of the runs are the same for all.
        frozen: configs as text, by identity.
        shapes: what configs ask of the cluster, by identity.
        steps: number of training steps, by identity.
        identities: identity of every point, in order.
        asking: a config for every shape.
        programs: a config for every program.
        search: for a sweep whose points are chosen by earlier results: what they are chosen by, as text.
    """

    first: Config
    frozen: dict[str, str] = dataclasses.field(default_factory=dict)
    shapes: dict[str, str] = dataclasses.field(default_factory=dict)
    steps: dict[str, int | None] = dataclasses.field(default_factory=dict)
    identities: list[str] = dataclasses.field(default_factory=list)
    asking: dict[str, Config] = dataclasses.field(default_factory=dict)
    programs: dict[str | None, Config] = dataclasses.field(default_factory=dict)
    search: str | None = None

    @property
    def identity(self) -> str:
        """Eight hex digits, the same for the same points in any order, or for the same search."""
        text = "\n".join(sorted(self.identities)) if self.search is None else self.search
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def check(self, config: Config) -> None:
        """Check that a config can be one more point.

        Raises:
            ConfigError: it cannot be in one sweep with the others.
        """
        first = self.first.job
        if (config.job.name, config.job.runs_dir) != (first.name, first.runs_dir):
            raise ConfigError(
                "all points of a sweep need the same job.name and job.runs_dir; "
                f"these differ: {first.name!r}, {config.job.name!r}",
                hint="`sweep collect` shows varied keys as columns, so they need not be in the name",
            )
        check_belongs(config, self.first)

    def add(self, config: Config) -> str:
        """Add one more point, and return the identity of its config.

        Raises:
            ConfigError: it cannot be in one sweep with the others.
        """
        self.check(config)
        identity = identity_of(config)
        self.identities.append(identity)
        if identity not in self.frozen:
            self.frozen[identity] = freeze(config)
            self.shapes[identity] = _shape(config)
            self.asking.setdefault(self.shapes[identity], config)
            self.programs.setdefault(config.job.command, config)
            self.steps[identity] = steps_of(config)
        return identity

    def add_copies(self, config: Config, count: int) -> None:
        """Add so many points with this one config, each a run of its own.

        Raises:
            ConfigError: it cannot be a point of this sweep.
        """
        check_belongs(config, self.first)
        same, frozen, shape = identity_of(config), freeze(config), _shape(config)
        self.asking[shape] = self.programs[config.job.command] = config
        for number in range(len(self.identities), len(self.identities) + count):
            identity = f"{same}-{number}"
            self.identities.append(identity)
            self.frozen[identity], self.shapes[identity], self.steps[identity] = frozen, shape, steps_of(config)

    @property
    def id(self) -> str:
        return f"{self.first.job.name}.sweep-{self.identity}"

    def run_ids(self, stamp: str) -> dict[str, str]:
        """Return the run id of every config, by identity: it has the number of the first point with that config."""
        found: dict[str, str] = {}
        for number, identity in enumerate(self.identities):
            found.setdefault(identity, f"{stamp}-{number:04d}")
        return found

    def arrays(self, max_array_size: int | None, parallelism: int | None) -> list[Array]:
        """Return which of the configs, in the order of `run_ids`, are in which array; with cluster=local there are none."""
        if self.first.cluster.backend == Backend.LOCAL:
            return []
        shapes = [self.shapes[identity] for identity in self.run_ids("")]
        return plan_arrays(shapes, max_size=max_array_size, parallelism=parallelism, pack=self.first.sweep.pack)


def plan_sweep(configs: Iterable[Config], cwd: Path) -> SweepPlan:
    """Plan a sweep of these configs; an error in one ends it before anything is created.

    Raises:
        ConfigError: a point is wrong, or they cannot be in one sweep.
    """
    found: SweepPlan | None = None
    for config in configs:
        config = with_absolute_paths(config, cwd)
        if found is None:
            found = SweepPlan(config)
        found.add(config)
    assert found is not None
    return found


def check_belongs(config: Config, first: Config) -> None:
    """Check that a config can be a point of a sweep with this first point.

    Raises:
        ConfigError: it cannot be a point of any sweep, or not of this one.
    """
    if _cluster_of(config) != _cluster_of(first):
        raise ConfigError("the points of a sweep must be on the same cluster", hint="submit a sweep for each")
    if config.sweep.pack != first.sweep.pack:
        raise ConfigError(
            f"all points of a sweep must have the same sweep.pack, but these differ: {first.sweep.pack}, {config.sweep.pack}",
            hint="submit a separate sweep for each",
        )
    if config.cluster.backend == Backend.LOCAL:
        return
    if config.requeue.mode == RequeueMode.CHAIN:
        raise no_chain("in a sweep")
    if config.sweep.pack > 1 and config.requeue.mode == RequeueMode.RESUBMIT:
        raise ConfigError(
            f"sweep.pack={config.sweep.pack} with requeue.mode=resubmit: runs of one job cannot be resubmitted separately",
            hint="requeue=requeue, where the cluster allows it, or requeue=off and `sweep retry`",
        )


def _cluster_of(config: Config) -> tuple[str | None, ...]:
    return (config.cluster.backend, config.cluster.slurm_conf, config.cluster.sandbox)


def _shape(config: Config) -> str:
    """Return a digest of everything in a config that the script shows. The program is read from the run's own config."""
    values = to_values(config)
    del values["job"]["command"]
    parts = [values[key] for key in ("cluster", "requeue", "hooks", "secrets", "job")]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def preview(
    sweep_plan: SweepPlan, cwd: Path, parallelism: int | None = None, after: Sequence[RunDir] = ()
) -> list[str]:
    """Return the scripts that would be passed to sbatch, one per array. Nothing is created."""
    job = sweep_plan.first.job
    runs = [Path(job.runs_dir) / sweep_plan.id / run_id for run_id in sweep_plan.run_ids(PLACEHOLDER_ID).values()]
    source = find_source(job, cwd, interpreter_of(sweep_plan.first.cluster))
    shapes = [sweep_plan.shapes[identity] for identity in sweep_plan.run_ids("")]
    scripts = []
    for array in sweep_plan.arrays(None, parallelism):
        config = sweep_plan.asking[shapes[array.members[0]]]
        if after:
            config = waiting_for_runs(config, after, slurm_conf_of(config))
        members = [runs[member] for member in array.members]
        paths = JobPaths(
            members,
            source.workdir,
            sys.executable,
            parallelism=array.parallelism,
            pack=sweep_plan.first.sweep.pack,
            roots=source.roots,
            submit_dir=cwd,
        )
        scripts.append(render_script(config, paths))
    return scripts
