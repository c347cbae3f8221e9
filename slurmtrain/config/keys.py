"""Find the key that a person meant: the schema's keys, the config groups, and words that other tools use for them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from slurmtrain.config.field_types import hints
from slurmtrain.config.schema import Config
from slurmtrain.errors import UsageError, nearest

# Names in other tools -> hints with our names.
ELSEWHERE = {
    **dict.fromkeys(
        ("logger", "loggers", "wandb", "mlflow", "report_to"),
        "metrics go to metrics.jsonl and TensorBoard; also observe.wandb.enabled=true, observe.mlflow.enabled=true",
    ),
    **dict.fromkeys(("trainer", "training", "runner"), "did you mean train?"),
    **dict.fromkeys(("optimizer", "optimiser", "scheduler"), "did you mean optim?"),
    **dict.fromkeys(("dataset", "datamodule", "dataloader"), "did you mean data?"),
    **dict.fromkeys(("slurm", "launcher", "resources", "sbatch"), "did you mean cluster?"),
    **dict.fromkeys(("strategy", "distributed", "fsdp", "ddp"), "did you mean parallel?"),
    **dict.fromkeys(("learning_rate",), "did you mean optim.lr?"),
    **dict.fromkeys(("batch_size",), "did you mean train.global_batch_size?"),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps"), "did you mean train.steps?"),
    **dict.fromkeys(("gpus", "num_gpus", "devices"), "did you mean cluster.gpus_per_node?"),
    **dict.fromkeys(("time", "timeout_min", "walltime"), "did you mean cluster.time_limit_min?"),
}

_SWITCHES = {
    **dict.fromkeys(("off", "false", "no", "none", "null"), "false"),
    **dict.fromkeys(("on", "true", "yes"), "true"),
}


@functools.cache
def all_keys() -> tuple[str, ...]:
    """Return every key of the schema, groups and fields, with dots: "train", "train.steps", ..."""
    return tuple(_keys_of(Config, ""))


def meant(word: str) -> str | None:
    """Return a hint that names the key which `word`, without leading dashes, probably stands for.

    The result is None when no key is similar.
    """
    if word in ELSEWHERE:
        return ELSEWHERE[word]
    last = word.rpartition(".")[2].replace("-", "_")
    same = [key for key in all_keys() if key.rpartition(".")[2] == last]
    close = same or difflib.get_close_matches(word, all_keys(), n=3, cutoff=0.75)
    return f"did you mean {' or '.join(close[:3])}?" if close else None


def unknown_field(key: str, where: str) -> UsageError | None:
    """Return the error for a dotted key that the schema does not have, or None. Keys of open dicts are not checked."""
    schema: Any = Config
    path: list[str] = []
    for word in re.sub(r"\[[^\]]*\]", "", key).split("."):  # omegaconf names an element of a list: cluster.setup[0]
        if not dataclasses.is_dataclass(schema):
            return None
        names = {field.name: field for field in dataclasses.fields(schema)}
        if word not in names:
            what = f"{'.'.join(path)} has no field" if path else "there is no config key"
            hint = None if path else meant(word)
            return UsageError(
                f"{what} {word!r}{where}", hint=hint or nearest(word, names if path else [*names, "experiment"])
            )
        default = names[word].default_factory
        schema = default if default is not dataclasses.MISSING and dataclasses.is_dataclass(default) else None
        path.append(word)
    return None


def fields_instead(key: str, value: str) -> str | None:
    """Return a hint how to set single fields instead of `key=value`; None if `key` is no group of fields of the schema."""
    group: Any = Config
    for word in key.split("."):
        group = _fields_of(group).get(word)
    kinds = _fields_of(group)
    if not kinds:
        return None
    for name, kind in kinds.items():
        choices = [
            each for each in (kind, *typing.get_args(kind)) if isinstance(each, type) and issubclass(each, StrEnum)
        ]
        if any(value in list(each) for each in choices):
            return f"write {key}.{name}={value}"
    if "enabled" in kinds and value.lower() in _SWITCHES:
        return f"write {key}.enabled={_SWITCHES[value.lower()]}"
    return f"set its fields one by one: {', '.join(f'{key}.{name}' for name in kinds)}"


def _fields_of(group: Any) -> dict[str, Any]:
    """Return the types of a group's fields, by name; none if it is no group of the schema."""
    return hints(group) if isinstance(group, type) and dataclasses.is_dataclass(group) else {}


def _keys_of(schema: Any, where: str) -> Iterator[str]:
    for field in dataclasses.fields(schema):
        yield f"{where}{field.name}"
        if dataclasses.is_dataclass(field.default_factory):
            yield from _keys_of(field.default_factory, f"{where}{field.name}.")
