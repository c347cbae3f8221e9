"""Members of `Choice` in the typed config, where omegaconf holds text: it knows an enum by the names of its members only.

`structured` gives omegaconf the schema with text in place of each Choice, and `typed` makes the `Config` of what it has
composed. This is the only place that refuses a word which a field does not know.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, TypeVar

from slurmtrain.choices import Choice, JobKind
from slurmtrain.config.field_types import hints, shown
from slurmtrain.errors import ConfigError

T = TypeVar("T")


@functools.cache
def structured(schema: type) -> type:
    """Return a dataclass like `schema`, and like those within it, in which every Choice is plain text."""
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(schema):
        kind: Any = hints(schema)[field.name]
        default: Any = field.default
        factory: Any = field.default_factory
        if dataclasses.is_dataclass(kind):
            kind = factory = structured(kind)  # type: ignore[arg-type]
        elif choice := choice_of(kind):
            kind = list[str] if typing.get_origin(kind) is list else str if kind is choice else str | None
            default = str(default) if isinstance(default, Choice) else default
        fields.append((field.name, kind, dataclasses.field(default=default, default_factory=factory)))
    return dataclasses.make_dataclass(schema.__name__, fields)


def typed(part: Any, schema: type[T], where: str = "") -> T:
    """Return the values of `part`, an object of `structured(schema)`, as one of `schema`.

    Args:
        where: the part's key, with a dot at its end.

    Raises:
        ConfigError: a word is not one of its field's Choice.
    """
    kinds = hints(schema)  # type: ignore[arg-type]
    names = [field.name for field in dataclasses.fields(schema)]  # type: ignore[arg-type]
    return schema(**{name: _typed(getattr(part, name), kinds[name], f"{where}{name}") for name in names})


def choice_of(kind: Any) -> type[Choice] | None:
    """Return the Choice that a field's type is, may be, or is a list of."""
    kinds = (kind, *typing.get_args(kind))
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, Choice)), None)


def words_of(choice: type[Choice]) -> list[str]:
    """Return the words that a person may type for a Choice."""
    return [str(word) for word in choice if word not in (JobKind.EVALUATE, JobKind.PREFLIGHT)]


def _typed(value: Any, kind: Any, key: str) -> Any:
    if dataclasses.is_dataclass(kind) and dataclasses.is_dataclass(value):
        return typed(value, typing.cast("type", kind), f"{key}.")
    choice = choice_of(kind)
    if choice is None:
        return value
    if isinstance(value, list) and typing.get_origin(kind) is list:
        return [_typed(word, choice, key) for word in value]
    if not isinstance(value, str):
        return value  # null, or what `check_types` refuses
    try:
        return choice(value)
    except ValueError:
        optional = type(None) in typing.get_args(kind)
        known = ", ".join([*(["null"] if optional else []), *words_of(choice)])
        raise ConfigError(f"{key}={shown(value)} is not known", hint=f"one of: {known}") from None
