"""Check that every value of a composed config has the type that the schema gives its field.

omegaconf checks scalars, but lets a list of texts hold a dict or Hydra's `glob(*)`, and lets a dict be any text that an
interpolation gives. Such a value would later be a traceback in the batch script, or in the job.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, Union

from slurmtrain.errors import ConfigError

SHOWN = 80  # characters of a value that an error repeats
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def check_types(part: Any, where: str = "") -> None:
    """Raise for the first value of a schema's dataclass that is not of its field's type.

    Args:
        part: the config, or a part of it.
        where: the part's key, with a dot at its end.

    Raises:
        ConfigError: a value has a wrong type; the message gives the key, the value and the expected type.
    """
    kinds = hints(part.__class__)
    for field in dataclasses.fields(part):
        _check(f"{where}{field.name}", getattr(part, field.name), kinds[field.name])


@functools.cache
def hints(part: type) -> dict[str, Any]:
    """Return the types of a dataclass's annotations. It is cached since it takes longer than all checks together."""
    return typing.get_type_hints(part)


def shown(value: Any) -> str:
    """Return the value as an error message repeats it: on one line, and shortened."""
    text = repr(value) if not isinstance(value, str) or not value.isprintable() else value
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def _check(key: str, value: Any, expected: Any) -> None:
    if dataclasses.is_dataclass(expected):
        if not dataclasses.is_dataclass(value):
            raise _wrong(key, value, "a group of fields", hint=f"write {key}.FIELD=VALUE")
        check_types(value, f"{key}.")
    elif expected is Any:
        _check_plain(key, value)
    elif typing.get_origin(expected) is list:
        if not isinstance(value, list):
            raise _wrong(key, value, "a list", hint=f"write {key}=[a,b]")
        for index, item in enumerate(value):
            _check(f"{key}[{index}]", item, typing.get_args(expected)[0])
    elif typing.get_origin(expected) is dict:
        if not isinstance(value, dict):
            raise _wrong(
                key, value, "a mapping of keys to values", hint=f"write +{key}.NAME=VALUE, or {key}='{{NAME: VALUE}}'"
            )
        for name, item in value.items():
            _check(f"a key of {key}", name, str)
            _check(f"{key}.{name}", item, typing.get_args(expected)[1])
    elif not _is_one_of(value, _alternatives(expected)):
        kinds = _alternatives(expected)
        raise _wrong(key, value, " or ".join(map(_name, kinds)))
    elif isinstance(value, str):
        _check_encodable(key, value)


def _check_plain(key: str, value: Any) -> None:
    """Raise unless the value can be written as yaml."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check(f"a key of {key}", name, str)
            _check_plain(f"{key}.{name}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(f"{key}[{index}]", item)
    elif isinstance(value, str):
        _check_encodable(key, value)
    elif not isinstance(value, (int, float, bool, type(None))):
        raise _wrong(key, value, "text, a number, true, false, null, a list or a mapping of them")


def _check_encodable(key: str, text: str) -> None:
    """Raise for text that is not UTF-8, from the command line or a variable: Python keeps such bytes, but no file can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(
            key, text, "text in UTF-8", hint="check the locale of the shell, or the file it came from"
        ) from None


def _name(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, str):  # text itself, or a Choice
        return "text"
    return _NAMES.get(kind, "a list of numbers")


def _alternatives(expected: Any) -> tuple[Any, ...]:
    return typing.get_args(expected) if typing.get_origin(expected) in (Union, types.UnionType) else (expected,)


def _is_one_of(value: Any, kinds: tuple[Any, ...]) -> bool:
    return any(_is(value, kind) for kind in kinds)


def _is(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        return isinstance(value, (list, tuple)) and all(_is(item, float) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _wrong(key: str, value: Any, expected: str, *, hint: str | None = None) -> ConfigError:
    return ConfigError(
        f"{key}={shown(value)} is not {expected}",
        hint=hint
        or "python -m slurmtrain --cfg job shows all fields; quote text that looks like something else: '\"[a]\"'",
    )
