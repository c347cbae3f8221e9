"""From one command line with choices to the points of a sweep: the overrides of each, and its config.

The grammar and the order of points are Hydra's. Composing takes Hydra a tenth of a second, so it composes once for each
combination of groups; the plain values of a point are put into a copy of that, by Hydra's own function.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slurmtrain.config.compose import composed_by_hydra, explaining, finish, initialized
from slurmtrain.config.folders import Primary
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.errors import ConfigError, SlurmtrainError, UsageError

BASES = 64  # compositions kept: sweeps vary few groups, and each takes a few hundred kilobytes


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
        return values_of(self.points[number], self.keys)


def values_of(overrides: Iterable[str], keys: Iterable[str] | None = None) -> dict[str, str]:
    """Return key -> value, as text and without Hydra's plus, of all overrides, or of those whose key is in `keys`."""
    values = {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides)}
    return values if keys is None else {key: values[key] for key in (key.lstrip("+") for key in keys) if key in values}


class Composer:
    """A composer of points. Hydra is set up while it is open.

    Args:
        primary: the primary config of all points.
    """

    def __init__(self, primary: Primary, loader: Any):
        from slurmtrain.config.override_parser import TypedOverridesParser

        self.primary, self._loader = primary, loader
        self._parser = TypedOverridesParser.create(config_loader=loader)
        self._parsed = functools.lru_cache(maxsize=4096)(self._parse_one)
        self._base = functools.lru_cache(maxsize=BASES)(self._compose_base)
        self._with_hydra = functools.lru_cache(maxsize=1)(self._compose_with_hydra)

    def expand(self, overrides: Sequence[str]) -> Grid:
        """Return the points of choices like `a=1,2`, `a=range(3)` and `group=glob(*)`, including those of hydra.sweeper.params.

        Raises:
            UsageError: an override cannot be read, or only a sweeper that chooses values understands it.
        """
        words = self._with_configured(overrides)
        choices: dict[str, list[str]] = {}
        sweeps: dict[str, bool] = {}
        for word in words:
            override = self._parsed(word)
            key = override.get_key_element()
            sweeps[key] = override.is_sweep_override()
            if override.is_hydra_override():
                if override.is_sweep_override():
                    raise UsageError(f"{word!r}: Hydra's own settings cannot vary", hint="submit two sweeps")
                choices[key] = [word]
            elif not override.is_sweep_override():
                choices[key] = [f"{key}={override.get_value_element_as_str()}"]
            elif override.is_discrete_sweep():
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            else:
                raise UsageError(
                    f"{word!r} gives a range, not choices",
                    hint="a sweeper that chooses values is needed: hydra/sweeper=optuna",
                )
        for key, values in choices.items():
            if not values:
                raise UsageError(f"{key} has no choices", hint="write them with commas: key=1,2,3")
        keys = tuple(key for key in choices if sweeps[key])
        return Grid([tuple(point) for point in itertools.product(*choices.values())], keys)

    def sweeper(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return hydra.sweeper as plain values: the sweeper that expands or chooses the points."""
        from omegaconf import OmegaConf

        with explaining(overrides, self.primary):
            composed = self._with_hydra(tuple(self.fixed(overrides)))
            values = OmegaConf.to_container(composed.hydra.sweeper, enum_to_str=True)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}

    def of_the_program(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides that are not Hydra's own."""
        return [word for word in overrides if not self._parsed(word).is_hydra_override()]

    def with_hydra(self, overrides: Sequence[str]) -> Any:
        """Return the DictConfig that these overrides, without the choices in them, compose to, with its node `hydra`."""
        with explaining(overrides, self.primary):
            return self._with_hydra(tuple(self.fixed(overrides)))

    def fixed(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides that give no choice."""
        return [word for word in overrides if not self._parsed(word).is_sweep_override()]

    def choices(self, overrides: Sequence[str]) -> dict[str, str]:
        """Return the keys that vary, each with its choices as text."""
        words = [word for word in self._with_configured(overrides) if self._parsed(word).is_sweep_override()]
        return dict(word.partition("=")[::2] for word in words)

    def compose(self, overrides: Sequence[str]) -> Config:
        """Return the same `Config` as `compose` does.

        Raises:
            UsageError, ConfigError: as `compose`.
        """
        from hydra._internal.config_loader_impl import ConfigLoaderImpl

        groups, values = [], []
        for word in overrides:
            override = self._parsed(word)
            if override.is_hydra_override() or self._chooses_group(override):
                groups.append(word)
            else:
                values.append(override)
        with explaining(overrides, self.primary):
            composed = self._base(tuple(groups))()
            ConfigLoaderImpl._apply_overrides_to_config(values, composed)
            return finish(composed, overrides)

    def _parse_one(self, word: str) -> Any:
        with explaining([word], self.primary):
            return self._parser.parse_overrides([word])[0]

    def _chooses_group(self, override: Any) -> bool:
        """Return whether an override chooses a group, by Hydra's own rule (hydra._internal.defaults_list.Overrides)."""
        group = self._loader.repository.group_exists(override.key_or_group)
        return bool(group) and not isinstance(override.value(), dict)

    def _compose_with_hydra(self, overrides: tuple[str, ...]) -> Any:
        return composed_by_hydra(self.primary, overrides, with_hydra=True)

    def _compose_base(self, groups: tuple[str, ...]) -> Callable[[], Any]:
        """Return a function that copies the config that these choices of groups compose to."""
        composed = composed_by_hydra(self.primary, groups)
        try:
            pickled = pickle.dumps(composed)
        except (pickle.PicklingError, AttributeError, TypeError):  # a user's class that is defined inside a function
            return functools.partial(copy.deepcopy, composed)
        return functools.partial(pickle.loads, pickled)  # a sixth of deepcopy's time

    def _with_configured(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides, with the choices that the config itself has as hydra.sweeper.params."""
        params: Mapping[str, Any] = self.sweeper(overrides).get("params") or {}
        return [*(f"{key}={value}" for key, value in params.items()), *overrides]


@contextmanager
def composing(primary: Primary) -> Iterator[Composer]:
    """Set Hydra up and give a composer of points."""
    from hydra.core.global_hydra import GlobalHydra

    with initialized(primary):
        yield Composer(primary, GlobalHydra.instance().config_loader())


def check(composer: Composer, grid: Grid) -> Iterator[tuple[Config, ParallelDims]]:
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
