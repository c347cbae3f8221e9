"""The sampler and the pruner of a search: an Optuna study in this process, made again from the log of the search.

Settings, search space and sampler are those of `hydra/sweeper=optuna` (hydra-optuna-sweeper), whose own functions read
them. What it does not have is trials one by one: it asks for a batch, and waits for all of it.

A study is made again by asking and telling it the same in the same order. Its sampler has a seed, so it is then where it
was. A sampler that chooses otherwise the second time (one without a seed, another version of Optuna) gets the trials as
they are, and goes on with other random numbers.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmtrain.choices import Pruner
from slurmtrain.config.schema import SearchConfig
from slurmtrain.errors import UsageError
from slurmtrain.sweep.trials import LogEvent, Trial, TrialState

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

TARGET = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
ATTRIBUTES_BYTES = 2000  # of a trial; CMA-ES keeps its whole state there, and works without


class Proposal(NamedTuple):
    """What the sampler has chosen for a trial. The names are those of `Trial`."""

    overrides: tuple[str, ...]
    params: dict[str, Any]
    attributes: dict[str, Any]


class Study:
    """The study of a search.

    Args:
        composed: the config of the program with its node `hydra`.
        words: the overrides of the command line.
        search: the pruner's settings.
    """

    def __init__(self, composed: Any, words: Sequence[str], search: SearchConfig):
        self._composed, self._words = composed, list(words)
        self._search = search
        self._set_up()

    def _set_up(self) -> None:
        import functools

        import optuna
        from hydra.utils import instantiate
        from hydra_plugins.hydra_optuna_sweeper._impl import create_params_from_overrides

        optuna.logging.set_verbosity(logging.WARNING)
        sweeper = instantiate(self._composed.hydra.sweeper).sweeper
        sweeper.config = self._composed
        sweeper._process_searchspace_config()
        chosen, self._fixed = create_params_from_overrides([*sweeper._parse_sweeper_params_config(), *self._words])
        space = {**(sweeper.search_space_distributions or {}), **chosen}
        self._space = {name: each for name, each in space.items() if name not in self._fixed}
        sampler, self.n_trials = sweeper.sampler, int(sweeper.n_trials)
        self._is_grid = isinstance(sampler, functools.partial) and sampler.func == optuna.samplers.GridSampler
        if self._is_grid:
            choices = {name: sweeper._to_grid_sampler_choices(each) for name, each in self._space.items()}
            sampler = sampler(choices)
            self.n_trials = min(self.n_trials, _product(len(each) for each in choices.values()))
        (direction,) = sweeper._get_directions()
        self.n_jobs, self.maximize = int(sweeper.n_jobs), bool(direction == "maximize")
        self.kept_elsewhere = sweeper.storage is not None
        self._sweeper = sweeper
        self._study = optuna.create_study(
            study_name=sweeper.study_name,
            storage=opened(sweeper.storage) if self.kept_elsewhere else None,
            sampler=sampler,
            pruner=pruner_of(self._search),
            direction=direction,
            load_if_exists=True,
        )
        self._trials: dict[int, optuna.trial.Trial] = {}  # by number; those that have not ended, at least
        self._asked = 0
        # Asha judges a value once. A search that was killed before it had noted the verdict finds it here.
        self.given_up = set[int]()
        # Trials whose end a storage knows, and the log does not, as after a power cut.
        self._ended_before = set[int]()

    def ask(self) -> Proposal:
        """Return what the sampler chooses for the next trial."""
        trial = self._study.ask()
        (overrides,) = self._sweeper._configure_trials([trial], self._space, self._fixed)
        self._trials[self._asked] = trial
        self._asked += 1
        attributes = {"id": trial._trial_id} if self.kept_elsewhere else _small(trial.system_attrs)
        return Proposal(tuple(overrides), dict(trial.params), attributes)

    def report(self, number: int, step: int, value: float) -> bool:
        """Tell an intermediate value of a trial, and return whether it is to be pruned."""
        if number in self._ended_before:
            return False
        self._report(number, step, value)
        if self._trials[number].should_prune():
            self.given_up.add(number)
        return number in self.given_up

    def _report(self, number: int, step: int, value: float) -> None:
        if self.kept_elsewhere and math.isnan(value):  # Optuna's tables have no place for it
            value = -math.inf if self.maximize else math.inf
        self._trials[number].report(value, step)

    def tell(self, number: int, state: TrialState, value: float | None) -> None:
        """Tell how a trial has ended."""
        import optuna

        if number in self._ended_before:
            return
        told = optuna.trial.TrialState[state.name]
        try:
            self._study.tell(self._trials[number], value if state == TrialState.COMPLETE else None, state=told)
        except RuntimeError as error:
            # With its last point GridSampler stops a study's own loop, which this is not.
            if not self._is_grid or "Study.stop" not in str(error):
                raise

    def add(self, trial: Trial) -> None:
        """Add the result of a trial that had failed, and was tried again, as a trial of its own."""
        params, distributions = self._known(trial.params)
        self._add_trial(state="COMPLETE", params=params, distributions=distributions, value=trial.value)

    def replay(self, lines: Sequence[Mapping[str, Any]], trials: Sequence[Trial]) -> None:
        """Bring a study in which nothing has happened to where the lines of the log end.

        Args:
            trials: what the lines say of each trial.
        """
        if self.kept_elsewhere:
            self._take_up_stored(trials)
        elif not self._told_the_same(lines, trials):
            log.info("the sampler does not choose the same points again; it goes on from the results of those")
            self._set_up()
            self._put_in(trials)

    def _told_the_same(self, lines: Sequence[Mapping[str, Any]], trials: Sequence[Trial]) -> bool:
        ended = set[int]()
        for line in lines:
            number = line["trial"]
            match line["event"]:
                case LogEvent.ASKED:
                    if self.ask().overrides != trials[number].overrides:
                        return False
                case LogEvent.VALUE:
                    self.report(number, line["step"], line["value"])
                case LogEvent.TOLD if number not in ended:
                    ended.add(number)
                    self.tell(number, TrialState(line["state"]), line.get("value"))
                case LogEvent.TOLD:
                    self.add(trials[number])
        return True

    def _put_in(self, trials: Sequence[Trial]) -> None:
        """Put trials into the study as they are."""
        for trial in trials:
            params, distributions = self._known(trial.params)
            if trial.state == TrialState.RUNNING:
                fixed = {**trial.attributes, "fixed_params": params}
                self._add_trial(state="WAITING", system_attrs=fixed)
                self.ask()  # takes that one, for which the sampler chooses in vain
                for name, attribute in trial.attributes.items():
                    self._trials[trial.number].set_system_attr(name, attribute)
                for step, value in trial.values.items():
                    self._report(trial.number, step, value)
                continue
            last = trial.values.get(trial.last_step)
            results = {TrialState.COMPLETE: trial.value, TrialState.PRUNED: last}
            self._add_trial(
                state=trial.state.name,
                params=params,
                distributions=distributions,
                value=results.get(trial.state),
                intermediate_values=dict(trial.values),
                system_attrs=dict(trial.attributes),
            )
            self._asked += 1
        self._study.sampler.reseed_rng()

    def _add_trial(self, *, state: str, **facts: Any) -> None:
        import optuna

        with warnings.catch_warnings():  # it was experimental in Optuna 2, and has stayed as it was
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState[state], **facts))

    def _take_up_stored(self, trials: Sequence[Trial]) -> None:
        """Find the trials in a storage that Optuna keeps, and tell it what it has not heard.

        Raises:
            UsageError: the storage does not have them.
        """
        import optuna

        for trial in trials:
            self._asked += 1
            try:
                stored = self._study._storage.get_trial(int(trial.attributes["id"]))
            except KeyError:
                raise UsageError(
                    f"hydra.sweeper.storage does not have trial {trial.number} of this search",
                    hint="--again searches anew, with the study as it is",
                ) from None
            if stored.state.is_finished():
                if trial.state == TrialState.RUNNING:
                    self._ended_before.add(trial.number)
                continue
            self._trials[trial.number] = optuna.trial.Trial(self._study, stored._trial_id)
            for step, value in trial.values.items():
                if step not in stored.intermediate_values:
                    self._report(trial.number, step, value)
            if trial.state != TrialState.RUNNING:
                self.tell(trial.number, trial.state, trial.value)
        self._study.sampler.reseed_rng()  # the same random numbers would choose the same points again

    def _known(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return those of these parameters whose distribution is known, and that.

        Those that custom_search_space has added are known while a trial has them.
        """
        known = dict(self._space)
        for trial in self._trials.values():
            known.update(trial.distributions)
        names = [name for name in params if name in known]
        return {name: params[name] for name in names}, {name: known[name] for name in names}


def opened(storage: Any) -> Any:
    """Return the storage at a URL; one that is an object of Optuna's already is returned unchanged.

    Optuna 2 writes the version of its tables without a commit. SQLAlchemy 1 committed by itself; with SQLAlchemy 2 that
    version is lost, and the storage refused. So it is written here, before Optuna looks for it.

    Raises:
        UsageError: the database cannot be opened.
    """
    import optuna

    if not isinstance(storage, str) or storage.startswith("redis"):
        return optuna.storages.get_storage(storage)
    import alembic.config
    import alembic.migration
    import alembic.script
    import sqlalchemy

    config = alembic.config.Config()
    config.set_main_option("script_location", str(Path(optuna.storages.__file__).parent / "_rdb" / "alembic"))
    script = alembic.script.ScriptDirectory.from_config(config)
    try:
        engine = sqlalchemy.create_engine(optuna.storages.RDBStorage._fill_storage_url_template(storage))
        with engine.begin() as connection:
            version = alembic.migration.MigrationContext.configure(connection)
            if version.get_current_revision() is None:
                version.stamp(script, "head")
        engine.dispose()
        return optuna.storages.get_storage(storage)
    except (sqlalchemy.exc.SQLAlchemyError, ImportError, RuntimeError) as error:
        name = storage.rpartition("@")[2]  # without user and password
        raise UsageError(
            f"hydra.sweeper.storage={name} cannot be opened: {str(error).splitlines()[0]}",
            hint="a study in a file of SQLite is hydra.sweeper.storage=sqlite:////home/me/study.db",
        ) from None


def pruner_of(search: SearchConfig) -> optuna.pruners.BasePruner:
    """Return Optuna's pruner of these settings."""
    import optuna

    if search.pruner == Pruner.MEDIAN:
        return optuna.pruners.MedianPruner(
            n_startup_trials=search.startup_trials, n_warmup_steps=search.prune_after_steps
        )
    if search.pruner == Pruner.ASHA:
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=search.prune_after_steps or "auto", reduction_factor=search.reduction_factor
        )
    return optuna.pruners.NopPruner()


def _small(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those attributes of a trial that can be kept in its line of the log."""
    found = {}
    for name, value in attributes.items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            continue
        if len(text) <= ATTRIBUTES_BYTES:
            found[name] = json.loads(text)
    return found


def _product(sizes: Any) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
