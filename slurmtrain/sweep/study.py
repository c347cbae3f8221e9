"""The trials of a search: an Optuna study whose journal, in the folder of the sweep, is the record of all of them.

Each value is chosen by a sampler made for that trial alone, with a seed derived from the search's and the number of the
trial. What it chooses then depends on the results so far, and not on how often the process was killed in between.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slurmtrain.choices import BestMode, Pruner
from slurmtrain.config.schema import Config, SearchConfig
from slurmtrain.errors import UsageError
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.sweep.plan import identity_of, short_key
from slurmtrain.system.records import read_tail

if TYPE_CHECKING:
    import optuna

TARGET = "slurmtrain.sweep.search.Search"  # hydra.sweeper._target_ of conf/hydra/sweeper/optuna.yaml
GRID = "optuna.samplers.GridSampler"
HOW_LONG = ("n_trials", "n_jobs")  # with other values of these it is the same search, which goes on


def remove_cut_line(path: Path) -> None:
    """Remove what a shell that was cut short, or had no disk space, has left after the last whole line."""
    if read_tail(path, 1) not in (b"", b"\n"):
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


class TrialState(StrEnum):
    """The state of a trial, by Optuna's names."""

    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAIL = "failed"


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        number: its number in the study.
        chosen: the values that were chosen for it, as text by key.
        value: its result; None if it has none.
        last_step: the step of its last intermediate value; -1 without one.
        run: the ID of its run; None if it was refused, or has not been started yet.
        pruned_at: the step at which it was decided to prune it.
        why: why it has failed.
        steps: the last step that it has logged.
    """

    number: int
    chosen: dict[str, str]
    state: TrialState
    value: float | None = None
    last_step: int = -1
    run: str | None = None
    pruned_at: int | None = None
    why: str = ""
    steps: int | None = None

    @property
    def in_words(self) -> str:
        return " ".join(f"{short_key(key)}={value}" for key, value in self.chosen.items())


class Study:
    """The study of a search. It is opened by the process that controls the search.

    Args:
        sweeper: the settings hydra.sweeper.
        space: the overrides whose values are chosen, by key.
        base: the config without the choices.

    Raises:
        UsageError: Optuna is missing, or the settings cannot be those of a search.
    """

    def __init__(self, sweeper: Mapping[str, Any], space: Mapping[str, Any], base: Config):
        try:
            import optuna
        except ImportError:
            raise UsageError(
                "hydra/sweeper=optuna needs Optuna 4, which is not installed", hint="pip install 'slurmtrain[search]'"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        for name in HOW_LONG:
            if not isinstance(sweeper[name], int) or sweeper[name] < 1:
                raise UsageError(f"hydra.sweeper.{name}={sweeper[name]}: expected a number of trials, at least 1")
        self.n_trials, self.n_jobs = (int(sweeper[name]) for name in HOW_LONG)
        self.maximize = base.checkpoint.best_mode == BestMode.MAX
        self.identity = _identity(sweeper, space, base)
        self._space: dict[str, Any] = {key: _distribution(override) for key, override in space.items()}
        self._settings: dict[str, Any] = dict(sweeper["sampler"])
        if self._settings["_target_"] == GRID:
            grid = {key: _grid_values(key.replace("+job.args.", "+", 1), each) for key, each in self._space.items()}
            self._settings["search_space"] = grid
            self.n_trials = min(self.n_trials, math.prod(map(len, grid.values())))
        self._seed = self._settings["seed"]
        if self._seed is None:
            self._seed = int(hashlib.sha256(self.identity.encode()).hexdigest()[:8], 16)
        self._pruner = _pruner(base.search)
        with _explaining():
            self._sampler(0)

    def open(self, sweep: Sweep) -> None:
        """Open the journal, within the claim of the sweep."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        remove_cut_line(sweep.trials_file)
        with _explaining():
            self._storage = optuna.storages.JournalStorage(JournalFileBackend(str(sweep.trials_file)))
            self._study = optuna.create_study(
                study_name=sweep.id,
                storage=self._storage,
                sampler=optuna.samplers.RandomSampler(),
                pruner=self._pruner,
                direction="maximize" if self.maximize else "minimize",
                load_if_exists=True,
            )
        for frozen in self._frozen():
            if frozen.state.name == "RUNNING" and len(frozen.params) < len(self._space):  # killed while it chose
                self.tell(frozen.number, TrialState.FAIL)

    @property
    def trials(self) -> list[Trial]:
        """All trials so far whose values have been chosen, by number."""
        whole = (each for each in self._frozen() if len(each.params) == len(self._space))
        return [self._seen(frozen) for frozen in whole]

    def trial(self, number: int) -> Trial:
        return self._seen(self._frozen()[number])

    def _frozen(self) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _seen(self, frozen: optuna.trial.FrozenTrial) -> Trial:
        return Trial(
            frozen.number,
            {key: str(frozen.params[key]) for key in self._space},
            TrialState[frozen.state.name],
            value=frozen.value if frozen.state.name == "COMPLETE" else None,
            last_step=-1 if frozen.last_step is None else frozen.last_step,
            **frozen.user_attrs,
        )

    @property
    def left(self) -> int:
        """Number of trials that are still to be asked for."""
        return max(0, self.n_trials - len(self.trials))

    def ask(self) -> Trial:
        """Choose the values of the next trial."""
        usual = self._study.sampler  # it has no opinion on the ends of trials, as GridSampler has
        with _explaining():
            self._study.sampler = self._sampler(len(self._frozen()))
            try:
                return self.trial(self._study.ask(self._space).number)
            finally:
                self._study.sampler = usual

    def note(self, number: int, **facts: Any) -> None:
        """Record facts of a trial: fields of `Trial`."""
        for key, value in facts.items():
            self._storage.set_trial_user_attr(self._id(number), key, value)

    def report(self, number: int, step: int, value: float) -> bool:
        """Report an intermediate value of a trial, and return whether the pruner gives it up."""
        self._storage.set_trial_intermediate_value(self._id(number), step, value)
        return self._pruner.prune(self._study, self._frozen()[number])

    def tell(self, number: int, state: TrialState, value: float | None = None) -> None:
        """Record how a trial has ended."""
        import optuna

        result = value if state == TrialState.COMPLETE else None
        self._study.tell(number, result, state=optuna.trial.TrialState[state.name])

    def best(self) -> Trial | None:
        """Return the complete trial with the best result; None when there is none."""
        complete = [trial for trial in self.trials if trial.value is not None]
        return (max if self.maximize else min)(complete, key=lambda trial: trial.value or 0.0, default=None)

    def _id(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        from hydra.utils import instantiate

        # A grid is shuffled by its seed, so it is the same for all trials.
        of_trial = hashlib.sha256(f"{self._seed}/{number}".encode()).digest()
        seed = self._seed if "search_space" in self._settings else int.from_bytes(of_trial[:4], "big")
        sampler: optuna.samplers.BaseSampler = instantiate({**self._settings, "seed": seed}, _convert_="all")
        return sampler


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Raise errors of Optuna or a sampler as one sentence."""
    try:
        yield
    except Exception as error:
        told = error.__cause__ or error  # Hydra's own error only says where the sampler was made
        raise UsageError(
            f"the sampler of this search gave up: {type(told).__name__}: {told}",
            hint="its settings are those of hydra.sweeper.sampler: `help sweeps`",
        ) from None


def _identity(sweeper: Mapping[str, Any], space: Mapping[str, Any], base: Config) -> str:
    """Return the identity of a search: fixed values, sampler, choices and pruner, but not how long it searches."""
    how = {key: value for key, value in sweeper.items() if key not in HOW_LONG}
    choices = {key: override.input_line.partition("=")[2] for key, override in space.items()}
    pruning = {**msgspec.to_builtins(base.search), "max_failures_in_a_row": 0}
    return json.dumps([identity_of(base), how, choices, pruning], sort_keys=True)


def _distribution(override: Any) -> optuna.distributions.BaseDistribution:
    """Return what Hydra's grammar says about a value, in Optuna's words."""
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    try:
        if isinstance(value, IntervalSweep):
            log, whole = "log" in value.tags, isinstance(value.start, int) and isinstance(value.end, int)
            return (IntDistribution if whole else FloatDistribution)(value.start, value.end, log=log)  # type: ignore[arg-type]
        if isinstance(value, RangeSweep):
            values = [*value.range()]
            whole = all(isinstance(each, int) for each in values)
            kind = IntDistribution if whole else FloatDistribution
            return kind(min(values), max(values), step=abs(value.step))  # type: ignore[arg-type]
        return CategoricalDistribution([*override.sweep_string_iterator()])
    except ValueError as error:
        typed = override.input_line.replace("+job.args.", "+", 1)
        hint = "the smaller number comes first, and is above 0 with log: interval(1e-4,1e-1)"
        raise UsageError(f"{typed!r} is no search space: {error}", hint=hint) from None


def _grid_values(key: str, each: Any) -> Sequence[Any]:
    if hasattr(each, "choices"):
        return list(each.choices)
    if not each.step:
        raise UsageError(
            f"hydra/sweeper/sampler=grid needs choices, but {key} is an interval",
            hint=f"{key}=1,2,3 or {key}=range(...)",
        )
    count = round((each.high - each.low) / each.step) + 1
    return [each.low + number * each.step for number in range(count)]


def _pruner(search: SearchConfig) -> optuna.pruners.BasePruner:
    from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner

    if search.pruner == Pruner.MEDIAN:
        return MedianPruner(n_startup_trials=search.startup_trials, n_warmup_steps=search.prune_after_steps)
    if search.pruner == Pruner.ASHA:
        return SuccessiveHalvingPruner(
            min_resource=search.prune_after_steps or "auto", reduction_factor=search.reduction_factor
        )
    return NopPruner()
