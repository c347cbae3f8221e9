"""A sweep before it is made: all its points composed and validated, what each asks of the cluster, which are the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.config.compose import freeze, to_values
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.launch.after import waiting_for_runs
from slurmtrain.launch.arrays import Array, plan_arrays
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.sbatch import JobPaths, render_script
from slurmtrain.launch.snapshot import find_source
from slurmtrain.launch.submit import PLACEHOLDER_ID, no_chain, slurm_conf_of, steps_of
from slurmtrain.rundir import RunDir


def identity_of(config: Config) -> str:
    """16 hex digits over what decides a result, whatever the order of keys.

    Where runs and code lie, who hears of their end and where secrets come from does not.
    """
    values = to_values(config)
    del values["hooks"], values["secrets"]
    for key in ("runs_dir", "snapshot", "snapshot_max_mb"):
        del values["job"][key]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Draft:
    """All points of a sweep that is to be made, composed and validated. Keeps text, not configs: there may be thousands.

    Attributes:
        first: the first point's config; name and folder of the runs are the same for all.
        frozen: configs by identity.
        shapes: what they ask of the cluster, by identity.
        steps: that they are to do, by identity.
        identities: of every point, in order.
        asking: a config of every shape.
        search: of a sweep whose points are chosen on the way: what they are chosen by, as text.
    """

    first: Config
    frozen: dict[str, str] = dataclasses.field(default_factory=dict)
    shapes: dict[str, str] = dataclasses.field(default_factory=dict)
    steps: dict[str, int | None] = dataclasses.field(default_factory=dict)
    identities: list[str] = dataclasses.field(default_factory=list)
    asking: dict[str, Config] = dataclasses.field(default_factory=dict)
    search: str | None = None

    @property
    def identity(self) -> str:
        """8 hex digits, the same for the same points in any order, or for the same search."""
        text = "\n".join(sorted(self.identities)) if self.search is None else self.search
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def add(self, config: Config) -> str:
        """Take in one more point. Returns the identity of its config.

        Raises:
            ConfigError: it does not fit to the others.
        """
        first = self.first.job
        if (config.job.name, config.job.runs_dir) != (first.name, first.runs_dir):
            raise ConfigError(
                f"the points of a sweep share job.name and job.runs_dir, and these differ: {first.name!r}, {config.job.name!r}",
                hint="what varies is a column of `sweep collect`; it need not be in the name",
            )
        identity = identity_of(config)
        self.identities.append(identity)
        if identity not in self.frozen:
            check_belongs(config, self.first)
            self.frozen[identity] = freeze(config)
            self.shapes[identity] = _shape(config)
            self.asking.setdefault(self.shapes[identity], config)
            self.steps[identity] = steps_of(config)
        return identity

    @property
    def id(self) -> str:
        return f"{self.first.job.name}.sweep-{self.identity}"

    def run_ids(self, stamp: str) -> dict[str, str]:
        """The run of every config, by identity: it has the number of the first point with that config."""
        found: dict[str, str] = {}
        for number, identity in enumerate(self.identities):
            found.setdefault(identity, f"{stamp}-{number:04d}")
        return found

    def arrays(self, max_array_size: int | None, parallelism: int | None) -> list[Array]:
        """Which of the configs, in the order of `run_ids`, are in which array; with cluster=local there are none."""
        if self.first.cluster.backend == "local":
            return []
        shapes = [self.shapes[identity] for identity in self.run_ids("")]
        return plan_arrays(shapes, max_size=max_array_size, parallelism=parallelism, pack=self.first.sweep.pack)


def draft_of(configs: Iterable[Config], cwd: Path) -> Draft:
    """Take in every point's config; whatever is wrong with one ends it before anything is made.

    Raises:
        ConfigError: a point is wrong, or they do not belong together.
    """
    found: Draft | None = None
    for config in configs:
        config = with_absolute_paths(config, cwd)
        if found is None:
            found = Draft(config)
        found.add(config)
    assert found is not None
    return found


def check_belongs(config: Config, first: Config) -> None:
    """
    Raises:
        ConfigError: it cannot be a point of any sweep, or not of one with this first point.
    """
    if _cluster_of(config) != _cluster_of(first):
        raise ConfigError("the points of a sweep are on different clusters", hint="submit a sweep for each")
    if config.sweep.pack != first.sweep.pack:
        raise ConfigError(
            f"the points of a sweep share sweep.pack, and these differ: {first.sweep.pack}, {config.sweep.pack}",
            hint="submit a sweep for each",
        )
    if config.cluster.backend == "local":
        return
    if config.requeue.mode == "chain":
        raise no_chain("in a sweep")
    if config.sweep.pack > 1 and config.requeue.mode == "resubmit":
        raise ConfigError(
            f"sweep.pack={config.sweep.pack} with requeue.mode=resubmit: runs of one job cannot each go on in one of their own",
            hint="requeue=requeue, where the cluster allows it, or requeue=off and `sweep retry`",
        )


def _cluster_of(config: Config) -> tuple[str | None, ...]:
    return (config.cluster.backend, config.cluster.slurm_conf, config.cluster.sandbox)


def _shape(config: Config) -> str:
    """Whatever the script shows of a config."""
    values = to_values(config)
    parts = [values[key] for key in ("cluster", "requeue", "hooks", "secrets", "job")]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def preview(draft: Draft, cwd: Path, parallelism: int | None = None, after: Sequence[RunDir] = ()) -> list[str]:
    """The scripts that would be handed to sbatch, one an array. Nothing is made."""
    job = draft.first.job
    runs = [Path(job.runs_dir) / draft.id / run_id for run_id in draft.run_ids(PLACEHOLDER_ID).values()]
    source = find_source(job, cwd, interpreter_of(draft.first.cluster))
    shapes = [draft.shapes[identity] for identity in draft.run_ids("")]
    scripts = []
    for array in draft.arrays(None, parallelism):
        config = draft.asking[shapes[array.members[0]]]
        if after:
            config = waiting_for_runs(config, after, slurm_conf_of(config))
        members = [runs[member] for member in array.members]
        paths = JobPaths(
            members,
            source.workdir,
            sys.executable,
            parallelism=array.parallelism,
            pack=draft.first.sweep.pack,
            roots=source.roots,
            submit_dir=cwd,
        )
        scripts.append(render_script(config, paths))
    return scripts
