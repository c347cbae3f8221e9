"""Checks of prepared data and mixtures that a config names.

Does the data exist, does the model know all its token ids, and are the weights valid?

They are made before a job is queued, and again by every rank. Imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from slurmtrain.config.known_models import HUGGING_FACE
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.system.paths import absolute

PREPARED = "slurmtrain.data.PreparedText"
MIXTURE = "slurmtrain.data.Mixture"


def check_prepared(config: Config) -> None:
    """Check the mixtures that a config names, and all prepared data that this machine sees.

    Raises:
        ConfigError: a mixture's weights are not valid; the model cannot mask documents although the data asks for it;
            or a manifest is damaged, or has more token ids than the model knows.
    """
    groups = (config.data, config.eval.sets)
    for values in (values for group in groups for values in _settings_of(MIXTURE, "sources", Mapping, group)):
        weights = values.get("weights")
        if weights is None or isinstance(weights, Mapping):
            shares_of(list(values["sources"]), weights)
    for values in (values for group in groups for values in _settings_of(PREPARED, "path", object, group)):
        _check_mask(values, config.model)
        if not isinstance(values.get("path"), str):
            raise ConfigError(
                f"data.path={values.get('path')!r} is not the path of a folder",
                hint="give the one that `prepare` has written; several folders are a mixture, see conf/data/mixture.yaml",
            )
        folder = Path(values["path"]).expanduser()
        if (manifest := folder / "manifest.json").exists():
            of_data = _vocab_size(folder, manifest.stat().st_mtime_ns)
            check_vocabulary(config.model.get("vocab_size"), of_data)


def prepared_folders(values: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folders of prepared data that a config group names, at any depth."""
    for found in _settings_of(PREPARED, "path", str, values):
        yield Path(found["path"])


@functools.lru_cache(maxsize=16)
def _vocab_size(folder: Path, changed_ns: int) -> int:
    """Read a manifest once for all points of a sweep, since that of a large data set is long; most configs name none."""
    from slurmtrain.data.format.manifest import (
        read_manifest,
    )  # most configs name no prepared data: submit answers at once

    return read_manifest(folder).tokenizer.vocab_size


def check_vocabulary(of_model: Any, of_data: Any) -> None:
    """Raise ConfigError if the model's vocabulary is too small; a size that is no number is not known and passes."""
    if isinstance(of_model, int) and isinstance(of_data, int) and of_model < of_data:
        raise ConfigError(
            f"model.vocab_size={of_model} is too small for data with {of_data} token ids",
            hint=f"set model.vocab_size={of_data}, or more",
        )


def _check_mask(values: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    masks = values.get("packing") == "best_fit" and values.get("document_mask") is not False
    if masks and model.get("_target_") == HUGGING_FACE:
        raise ConfigError(
            "rows of the data hold several documents, which models of transformers do not tell apart",
            hint="set data.document_mask=false to let documents see those before them, or data.packing=documents",
        )


def with_absolute_paths(values: Mapping[str, Any], cwd: Path) -> dict[str, Any]:
    """Return the config group `data` or `eval.sets` with absolute paths, for a job that runs in another folder than `cwd`."""
    here: dict[str, Any] = {
        key: with_absolute_paths(value, cwd) if isinstance(value, Mapping) else value for key, value in values.items()
    }
    if here.get("_target_") == PREPARED and isinstance(here.get("path"), str):
        here["path"] = str(absolute(here["path"], cwd))
    return here


def _settings_of(target: str, key: str, kind: type, values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each object with this `_target_`, at any depth of `values`, whose `key` is of the given type."""
    if values.get("_target_") == target and isinstance(values.get(key), kind):
        yield values
    for value in values.values():
        if isinstance(value, Mapping):
            yield from _settings_of(target, key, kind, value)


# The shares of a mixture's sources, from weights of any sum.


FINEST = 2**30  # shares are multiples of its inverse; products of two of them stay within 64 bits


def shares_of(names: Sequence[str], weights: Mapping[str, float] | None) -> list[Fraction] | None:
    """Return the weights of the sources `names` scaled to add up to one; None for no weights.

    Raises:
        ConfigError: there are no sources, or the weights are not positive numbers for exactly these sources.
    """
    if not names:
        raise ConfigError("data.sources is empty", hint="name at least one, see conf/data/mixture.yaml")
    if weights is None:
        return None
    if set(weights) != set(names):
        odd = sorted(set(weights) ^ set(names))
        raise ConfigError(
            f"data.weights and data.sources differ in {', '.join(odd)}",
            hint="every source needs a weight, and no other name one",
        )
    values = [_fraction(name, weights[name]) for name in names]
    total = sum(values)
    exact = [value / total for value in values]
    sums = [round(sum(exact[: count + 1]) * FINEST) for count in range(len(exact))]
    rounded = [Fraction(after - before, FINEST) for before, after in zip([0, *sums], sums, strict=False)]
    for name, share in zip(names, rounded, strict=True):
        if not share:
            raise ConfigError(f"data.weights.{name} is less than a billionth of all", hint="leave it out")
    return rounded


def _fraction(name: str, weight: float) -> Fraction:
    try:
        value = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise ConfigError(
            f"data.weights.{name} is {weight}", hint="a weight is a number above 0; leave out what is not wanted"
        )
    return value
