"""`-m hydra/sweeper=... submit`: Hydra's sweepers that choose values by results, such as Optuna's, over runs of ours.

The sweeper asks a launcher for the results of some points; `Search` is the part of that launcher that knows runs. The
result of a point is the number that `sweep collect` shows as its best: the best value of checkpoint.best_metric. A run
that fails is a job that failed, with the run's own words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurmtrain.choices import Pruner
from slurmtrain.config.folders import search_path
from slurmtrain.config.validate import validate
from slurmtrain.data.sources.config_check import check_prepared
from slurmtrain.errors import RunFailedError, SlurmtrainError, UsageError
from slurmtrain.launch.memory_check import check_memory
from slurmtrain.launch.named_paths import check_named_paths
from slurmtrain.planner.fit import check_fits
from slurmtrain.report import collect
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.sweep.adaptive import OpenSweep, Wanted
from slurmtrain.sweep.hydra_launcher import without_hydra
from slurmtrain.sweep.local import alone
from slurmtrain.sweep.plan import identity_of
from slurmtrain.sweep.points import Composer, values_of
from slurmtrain.system.paths import current_folder

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

    from slurmtrain.config.schema import Config

log = logging.getLogger(__name__)

OF_ITS_LENGTH = ("n_trials", "n_jobs", "max_failure_rate")  # settings of Optuna's: with more trials, a search continues
LAUNCHER = "hydra/launcher=slurmtrain_search"


class Search:
    """The task function that is passed to Hydra.

    Args:
        open_sweep: the sweep that gets the points.
        searched: the keys whose values the sweeper chooses.
    """

    def __init__(self, composer: Composer, open_sweep: OpenSweep, searched: Sequence[str]):
        self._composer, self._open_sweep = composer, open_sweep
        self._searched = searched
        self._best: tuple[float, str] | None = None

    def __call__(self, config: object) -> None:
        raise NotImplementedError("Hydra hands this to the launcher, which hands it points")

    def sweep(self, overrides: Sequence[str]) -> None:
        """Let the sweeper choose until it is done.

        Raises:
            RunFailedError: more points failed than the sweeper accepts.
            ClusterError: a job cannot be submitted.
            UsageError: the sweeper itself refuses its settings.
        """
        from hydra.core.global_hydra import GlobalHydra

        hydra, primary = GlobalHydra.instance().hydra, self._composer.primary
        assert hydra is not None
        folder = str(self._open_sweep.sweep.path).replace("'", "\\'")
        words = [*overrides, LAUNCHER, f"hydra.sweep.dir='{folder}'", search_path(primary.folders[1:])]
        with alone(self._open_sweep.sweep), explaining_sweeper():
            hydra.multirun(primary.name, self, words)

    def launch(self, jobs: Sequence[tuple[Sequence[str], Any]]) -> list[JobReturn]:
        """Return the results of some points, in their order, when all have ended.

        Args:
            jobs: overrides of each point, and its config as Hydra composes it for a job of a multirun.
        """
        wanted: list[Wanted] = []
        refused: dict[int, SlurmtrainError] = {}
        for position, (overrides, _) in enumerate(jobs):
            try:
                config = checked(self._composer, overrides)
                self._open_sweep.check(config)
            except SlurmtrainError as error:  # other combinations of values may be valid
                refused[position] = error
            else:
                wanted.append(Wanted(values_of(overrides, self._searched), config))
        ended = iter(self._open_sweep.run(wanted, self._tell))
        return [_job_return(job, refused.get(position) or next(ended)) for position, job in enumerate(jobs)]

    def _tell(self, run_dir: RunDir, now: RunState) -> None:
        varied = " ".join(run_dir.info()["varied"])
        try:
            goal, value = result_of(run_dir, now)
        except RunFailedError as failure:
            log.info("%s %s: %s", run_dir.id, varied, failure.message)
            return
        better = self._best is None or goal.best([value, self._best[0]]) == value
        if better:
            self._best = (value, varied)
        best = ", the best so far" if better else ""
        log.info("%s %s: %s %.6g%s", run_dir.id, varied, goal.metric, value, best)


def checked(composer: Composer, overrides: Sequence[str]) -> Config:
    """Return a point's config after all checks that find what would make its job fail."""
    config = composer.compose(overrides)
    dims = validate(config)
    check_fits(config, dims)
    check_prepared(config)
    for warning in check_named_paths(config, current_folder()):
        log.warning(warning)
    for warning in check_memory(config, dims):
        log.warning(warning)
    return config


@contextlib.contextmanager
def explaining_sweeper() -> Iterator[None]:
    """Raise errors of a sweeper itself as one sentence; errors of our part of the launcher pass unchanged."""
    try:
        yield
    except Exception as error:
        ours = any(frame.f_code is Search.launch.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))
        if isinstance(error, SlurmtrainError) or ours:
            raise
        raise UsageError(
            f"the sweeper gave up: {type(error).__name__}: {error}",
            hint="python -m slurmtrain --cfg hydra shows its settings, hydra.sweeper",
        ) from None


def result_of(run_dir: RunDir, now: RunState) -> tuple[collect.Goal, float]:
    """Return goal and best value of a run.

    Raises:
        RunFailedError: it has not finished, or has logged no metric.
    """
    if now.status != RunStatus.FINISHED:
        raise RunFailedError(f"run {run_dir.id} {now.status}: {now.explanation}", hint=f"status {run_dir.id}")
    table = collect.table_of([collect.Point(0, {}, run_dir, now.status)])
    value = table.column(table.goal.column)[0] if table.goal is not None else None
    if table.goal is not None and value is None:
        raise RunFailedError(f"run {run_dir.id} has finished, but its {table.goal.metric} was never finite")
    if table.goal is None or value is None:
        raise RunFailedError(f"run {run_dir.id} has finished and logged no metric", hint="set checkpoint.best_metric")
    return table.goal, float(value)


def _job_return(job: tuple[Sequence[str], Any], outcome: SlurmtrainError | tuple[RunDir, RunState]) -> JobReturn:
    """Return what Hydra returns for a job that has run."""
    from hydra.core.utils import JobReturn, JobStatus
    from omegaconf import OmegaConf

    overrides, config = job
    hydra_config = OmegaConf.masked_copy(config, ["hydra"])
    returned = JobReturn(list(overrides), without_hydra(config), hydra_config, task_name=config.hydra.job.name)
    try:
        if isinstance(outcome, SlurmtrainError):
            raise outcome
        returned.working_dir = str(outcome[0].path)
        returned.return_value = result_of(*outcome)[1]
        returned.status = JobStatus.COMPLETED
    except SlurmtrainError as error:
        returned.return_value = error
        returned.status = JobStatus.FAILED
    return returned


def identity_text(base: Config, sweeper: Mapping[str, Any], choices: Mapping[str, str]) -> str:
    """Return the identity of a search: fixed values, sweeper, choices and pruner, but not how long it searches."""
    chooses = {key: value for key, value in sweeper.items() if key not in OF_ITS_LENGTH}
    facts: list[Any] = [identity_of(base), chooses, choices]
    if base.search.pruner != Pruner.NONE:
        pruner = {**dataclasses.asdict(base.search)}
        del pruner["max_failures_in_a_row"]
        facts.append(pruner)
    return json.dumps(facts, sort_keys=True)


def seeds(sweeper: Mapping[str, Any], identity: str) -> Iterator[str]:
    """Yield overrides that seed every part of a sweeper without a seed: only a reproducible search can be continued."""
    seed = int(hashlib.sha256(identity.encode()).hexdigest()[:8], 16) >> 1

    def unseeded(part: Mapping[str, Any], path: str) -> Iterator[str]:
        for key, value in part.items():
            if key == "seed" and value is None:
                yield f"{path}.{key}={seed}"
            elif isinstance(value, Mapping):
                yield from unseeded(value, f"{path}.{key}")

    return unseeded(sweeper, "hydra.sweeper")
