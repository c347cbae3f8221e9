"""From one command line with choices to the plan of a sweep: its points, their configs, the resources of each, the same ones.

The grammar and the order of points are Hydra's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.choices import Backend, JobKind, RequeueMode
from slurmtrain.config.frozen import freeze, to_values
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, SlurmtrainError, UsageError
from slurmtrain.launch.code_source import find_source
from slurmtrain.launch.script import PLACEHOLDER_ID, JobPaths, render_script

if TYPE_CHECKING:
    from slurmtrain.config.compose import Composer
    from slurmtrain.runs.run_dir import RunDir


@dataclass(frozen=True)
class Grid:
    """The points that a command line with choices stands for.

    Attributes:
        points: the overrides of every point, in the order and form in which Hydra's own sweeper numbers them.
        keys: the keys that vary, in the order of the command line.
    """

    points: Sequence[tuple[str, ...]]
    keys: tuple[str, ...]

    def varied(self, number: int) -> dict[str, str]:
        """Return what distinguishes a point from others: key -> value, as text."""
        return {short_key(key): value for key, value in values_of(self.points[number], self.keys).items()}


def short_key(key: str) -> str:
    """Return a key as a person knows it: without Hydra's plus, and of an argument of a program only its name."""
    return key.lstrip("+").removeprefix("job.args.")


def values_of(overrides: Iterable[str], keys: Iterable[str] | None = None) -> dict[str, str]:
    """Return key -> value, as text and without Hydra's plus, of all overrides, or of those whose key is in `keys`."""
    values = {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides)}
    return values if keys is None else {key: values[key] for key in (key.lstrip("+") for key in keys) if key in values}


@dataclass(frozen=True)
class Choices:
    """A command line with choices like `a=1,2`, `a=range(3)`, `group=glob(*)`, and those of hydra.sweeper.params, taken apart.

    Attributes:
        sweeper: the settings hydra.sweeper, of what expands or chooses the points.
        fixed: the overrides that give no choice.
        by_key: all overrides by key, of which the last one counts, as Hydra has parsed them.
    """

    sweeper: Mapping[str, Any]
    fixed: Sequence[str]
    by_key: Mapping[str, Any]

    @property
    def space(self) -> dict[str, Any]:
        """The overrides that vary, by key."""
        return {key: override for key, override in self.by_key.items() if override.is_sweep_override()}

    def grid(self) -> Grid:
        """Return the points.

        Raises:
            UsageError: only a sweeper that chooses values understands an override.
        """
        choices: dict[str, list[str]] = {}
        for key, override in self.by_key.items():
            if not override.is_sweep_override():
                hydra = override.is_hydra_override()
                choices[key] = [override.input_line if hydra else f"{key}={override.get_value_element_as_str()}"]
            elif override.is_discrete_sweep():
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
                if not choices[key]:
                    raise UsageError(f"{short_key(key)} has no choices", hint="write them with commas: key=1,2,3")
            else:
                raise UsageError(
                    f"{override.input_line.replace('+job.args.', '+', 1)!r} gives a range, not choices",
                    hint="a sweeper that chooses values is needed: hydra/sweeper=optuna",
                )
        return Grid([tuple(point) for point in itertools.product(*choices.values())], tuple(self.space))


def choices_of(composer: Composer, overrides: Sequence[str]) -> Choices:
    """Take a command line with choices apart.

    Raises:
        UsageError: an override cannot be read, or Hydra's own settings vary.
    """
    fixed = [word for word in overrides if not composer.parse(word).is_sweep_override()]
    sweeper = composer.values(fixed)["hydra"]["sweeper"]
    found = {}
    for word in (*(f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()), *overrides):
        override = composer.parse(word)
        if override.is_hydra_override() and override.is_sweep_override():
            raise UsageError(f"{word!r}: Hydra's own settings cannot vary", hint="submit two sweeps")
        found[override.get_key_element()] = override
    return Choices(sweeper, fixed, found)


def validated(composer: Composer, grid: Grid) -> Iterator[tuple[Config, ParallelDims]]:
    """Compose and validate every point, in order, and yield it with its parallel dims.

    Raises:
        ConfigError: a point is wrong; the message says which.
    """
    for number, point in enumerate(grid.points):
        with naming_point(grid, number):
            config = composer.compose(point)
            dims = validate(config)
        yield config, dims


@contextmanager
def naming_point(grid: Grid, number: int) -> Iterator[None]:
    """Add the number and values of a point to an error about it."""
    try:
        yield
    except SlurmtrainError as error:
        what = " ".join(f"{key}={value}" for key, value in grid.varied(number).items())
        raise ConfigError(f"point {number} ({what}): {error.message}", hint=error.hint) from None


def identity_of(config: Config) -> str:
    """Return 16 hex digits over the values that decide a result, independent of the order of keys.

    The places of runs and code, hooks, loggers, what a search does with its trials, and the sources of secrets are left out.
    """
    return _identity(to_values(config))


def _identity(values: Mapping[str, Any]) -> str:
    left_out = ("hooks", "secrets", "watchdog", "observe", "search")
    decisive = {key: part for key, part in values.items() if key not in left_out}
    places = ("runs_dir", "snapshot", "snapshot_max_mb")
    decisive["job"] = {key: value for key, value in values["job"].items() if key not in places}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


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
        search: for a sweep whose points are chosen by earlier results: what they are chosen by, as text.
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
        """Eight hex digits, the same for the same points in any order, or for the same search."""
        text = "\n".join(sorted(self.identities)) if self.search is None else self.search
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def add(self, config: Config) -> str:
        """Add one more point, and return the identity of its config.

        Raises:
            ConfigError: it cannot be in one sweep with the others.
        """
        check_belongs(config, self.first)
        values = to_values(config)
        identity = _identity(values)
        self.identities.append(identity)
        if identity not in self.frozen:
            self.frozen[identity] = freeze(values)
            self.shapes[identity] = _shape(values)
            self.asking.setdefault(self.shapes[identity], config)
            self.steps[identity] = config.train.steps if config.job.kind == JobKind.TRAIN else None
        return identity

    def add_copies(self, config: Config, count: int) -> None:
        """Add so many points with this one config, each a run of its own.

        Raises:
            ConfigError: it cannot be a point of this sweep.
        """
        check_belongs(config, self.first)
        values = to_values(config)
        same, frozen, shape = _identity(values), freeze(values), _shape(values)
        self.asking[shape] = config
        for number in range(len(self.identities), len(self.identities) + count):
            identity = f"{same}-{number}"
            self.identities.append(identity)
            self.frozen[identity], self.shapes[identity], self.steps[identity] = frozen, shape, None

    @property
    def id(self) -> str:
        return f"{self.first.job.name}.sweep-{self.identity}"

    def run_ids(self, stamp: str) -> dict[str, str]:
        """Return the run id of every config, by identity: it has the number of the first point with that config."""
        found: dict[str, str] = {}
        for number, identity in enumerate(self.identities):
            found.setdefault(identity, f"{stamp}-{number:04d}")
        return found


def check_belongs(config: Config, first: Config) -> None:
    """Check that a config can be a point of a sweep with this first point.

    Raises:
        ConfigError: it cannot be a point of any sweep, or not of this one.
    """
    names = [(each.job.name, each.job.runs_dir) for each in (first, config)]
    if names[0] != names[1]:
        raise ConfigError(
            "all points of a sweep need the same job.name and job.runs_dir; "
            f"these differ: {first.job.name!r}, {config.job.name!r}",
            hint="`sweep collect` shows varied keys as columns, so they need not be in the name",
        )
    clusters = [(each.backend, each.slurm_conf, each.sandbox) for each in (first.cluster, config.cluster)]
    if clusters[0] != clusters[1]:
        raise ConfigError("the points of a sweep must be on the same cluster", hint="submit a sweep for each")
    if config.sweep.pack != first.sweep.pack:
        raise ConfigError(
            f"all points of a sweep must have the same sweep.pack, but these differ: {first.sweep.pack}, {config.sweep.pack}",
            hint="submit a separate sweep for each",
        )
    if config.cluster.backend == Backend.LOCAL:
        return
    if config.requeue.mode == RequeueMode.CHAIN:
        raise ConfigError(
            "requeue.mode=chain in a sweep: the tasks of an array cannot wait for different jobs",
            hint="requeue=resubmit, or requeue=requeue where the cluster allows it",
        )
    if config.sweep.pack > 1 and config.requeue.mode == RequeueMode.RESUBMIT:
        raise ConfigError(
            f"sweep.pack={config.sweep.pack} with requeue.mode=resubmit: runs of one job cannot be resubmitted separately",
            hint="requeue=requeue, where the cluster allows it, or requeue=off and `sweep retry`",
        )


def _shape(values: Mapping[str, Any]) -> str:
    """Return a digest of everything in a config that the script shows. The program is read from the run's own config."""
    job = {key: value for key, value in values["job"].items() if key not in ("command", "args")}
    parts = [*(values[key] for key in ("cluster", "requeue", "hooks", "secrets")), job]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


# The distribution of runs to array jobs. An array has one script, so runs that ask for different resources need different
# arrays. MaxArraySize limits the *index* (slurm.conf(5): the largest index is one less), so the second half of a long array has
# to begin at 0 again. One task of an array is one run, or a pack of runs that share it: the members 0 to pack - 1 are task 0.


def plan_arrays(shapes: Sequence[Hashable], *, max_size: int | None = None, pack: int = 1) -> list[list[int]]:
    """Return the numbers of the points of each array, out of points 0 to len(shapes) - 1.

    Args:
        shapes: what each point asks for; points of one array have the same shape.
        max_size: greatest number of tasks of an array.
        pack: number of points that share a task.
    """
    by_shape: dict[Hashable, list[int]] = {}
    for number, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(number)
    size = (max_size or len(shapes)) * pack
    return [numbers[begin : begin + size] for numbers in by_shape.values() for begin in range(0, len(numbers), size)]


def tasks_at_once(parallelism: int | None, pack: int) -> int | None:
    """Return how many tasks of an array may run at the same time, so that at most `parallelism` points do; at least one."""
    return None if parallelism is None else max(1, parallelism // pack)


def preview(
    sweep_plan: SweepPlan, cwd: Path, parallelism: int | None = None, after: Sequence[RunDir] = ()
) -> list[str]:
    """Return the scripts that would be passed to sbatch, one per array. Nothing is created."""
    job = sweep_plan.first.job
    runs = [Path(job.runs_dir) / sweep_plan.id / run_id for run_id in sweep_plan.run_ids(PLACEHOLDER_ID).values()]
    source = find_source(job, cwd, sweep_plan.first.cluster)
    shapes = [sweep_plan.shapes[identity] for identity in sweep_plan.run_ids("")]
    if sweep_plan.first.cluster.backend == Backend.LOCAL:
        return []
    scripts, pack = [], sweep_plan.first.sweep.pack
    for members in plan_arrays(shapes, pack=pack):
        config = sweep_plan.asking[shapes[members[0]]]
        if after:
            from slurmtrain.launch.dependencies import waiting_for_runs
            from slurmtrain.launch.submit import slurm_conf_of

            config = waiting_for_runs(config, after, slurm_conf_of(config))
        paths = JobPaths(
            [runs[member] for member in members],
            source.workdir,
            sys.executable,
            parallelism=tasks_at_once(parallelism, pack),
            pack=pack,
            roots=source.roots,
            submit_dir=cwd,
        )
        scripts.append(render_script(config, paths))
    return scripts
