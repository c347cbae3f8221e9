"""The keys of the schema, and what people write for them: which key they meant, and the form that Hydra accepts.

Imports no Hydra: `compose.parse` reads overrides by its grammar.
"""

from __future__ import annotations

import difflib
import functools
import re
import shlex
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from slurmtrain.config.fields import GROUP, plain
from slurmtrain.config.folders import config_groups
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
CHANGES = ("eval.cluster.", "eval.parallel.")  # open groups with fields of `cluster` and `parallel`
OPEN = tuple(f"eval.{group}{end}" for group in ("sets", "metrics", "cluster", "parallel") for end in ".=")


@functools.cache
def all_keys() -> tuple[str, ...]:
    """Return every key of the schema, groups and fields, with dots: "train", "train.steps", ..."""
    return tuple(_keys_of(Config, ""))


def _keys_of(schema: Any, where: str) -> Iterator[str]:
    for name, kind in schema.__annotations__.items():
        yield f"{where}{name}"
        if isinstance(kind, GROUP):
            yield from _keys_of(kind, f"{where}{name}.")


@functools.cache
def kind_of(key: str) -> Any:
    """Return the type of the field, or the class of the group, with this dotted key; Any where the schema does not say."""
    if key.startswith(CHANGES):
        key = key.removeprefix("eval.")
    return functools.reduce(kind_inside, key.split("."), Config)


def kind_inside(kind: Any, name: str) -> Any:
    """Return the type of what a group or a mapping of this type has under a name."""
    if isinstance(kind, GROUP):
        return kind.__annotations__.get(name, Any)
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else Any


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


def unknown_field(key: str, where: str = "") -> UsageError | None:
    """Return the error for a dotted key that the schema does not have, or None. Keys of open groups are not checked.

    Args:
        where: ends the sentence, such as " (in 'train.step=1')".
    """
    schema, path = Config, list[str]()
    for word in key.split("."):
        if not isinstance(schema, GROUP):
            return None
        kinds = schema.__annotations__
        if word not in kinds:
            what = f"{'.'.join(path)} has no field" if path else "there is no config key"
            names = kinds if path else [*kinds, "experiment"]
            hint = (None if path else meant(word)) or nearest(word, names, "".join(f"{each}." for each in path))
            return UsageError(f"{what} {word!r}{where}", hint=hint)
        schema = kinds[word]
        path.append(word)
    return None


def fields_instead(key: str, value: str) -> str | None:
    """Return a hint how to set single fields instead of `key=value`; None if `key` is no group of fields of the schema."""
    group = kind_of(key)
    if not isinstance(group, GROUP):
        return None
    kinds = group.__annotations__
    for name, kind in kinds.items():
        alternatives = [plain(kind), *map(plain, typing.get_args(plain(kind)))]
        if any(isinstance(each, type) and issubclass(each, StrEnum) and value in list(each) for each in alternatives):
            return f"write {key}.{name}={value}"
    return f"set its fields one by one: {', '.join(f'{key}.{name}' for name in kinds)}"


def literal_override(key: str, text: str) -> str:
    """Return the override that sets a field to this text, whatever characters are in it.

    `${oc.env:NAME}` alone keeps its meaning, which it also has in the frozen config.
    """
    text = re.sub(r"(\\*)\$\{(?!oc\.env:)", lambda match: match.group(1) * 2 + r"\${", text)
    text = re.sub(r"(\\*)'", lambda match: match.group(1) * 2 + r"\'", text)
    text = re.sub(r"(\\+)\Z", lambda match: match.group(1) * 2, text)
    return f"{key}='{text}'"


def in_shell(word: str) -> str:
    """Return a word as a person types it in a shell."""
    return shlex.quote(word) if re.search(r'[$`"!]', word) else f'"{word}"'


def normalise(override: str) -> str:
    """Return an override in the form that Hydra accepts, so that a plus in front is optional.

    Both `cluster=a100x4` and `+cluster=a100x4` are accepted: conf/config.yaml lists the group, so Hydra wants no plus.
    Both are also accepted for additions to `eval`, whose sets, metrics and changes have names that nobody can know.
    """
    if override.startswith(OPEN):
        return f"++{override}"
    group = override.partition("=")[0].removeprefix("+")
    return override.removeprefix("+") if group in shipped_groups() else override


@functools.cache
def shipped_groups() -> frozenset[str]:
    """Return the names of the config groups."""
    return frozenset(config_groups())
