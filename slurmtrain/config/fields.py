"""From plain values to a dataclass of the schema: the types of fields, their ranges, and everything that is wrong at once.

A field's type says all that can be checked by the field alone: `Annotated[int, Range(1)]`, one of the choices, a `Pattern`.
"""

from __future__ import annotations

import copy
import math
import re
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar, Union

from msgspec import Struct

from slurmtrain.choices import JobKind
from slurmtrain.errors import ConfigError, SlurmtrainError, UsageError, nearest, shown

S = TypeVar("S", bound=Struct)

GROUP = type(Struct)  # of groups of fields, such as that of `cluster`
LINES = "lines"  # in Annotated: text that may have several lines, such as a command for bash
MISSING = "???"  # a value that a config file leaves to the person
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = {"None": "null", "True": "true", "False": "false"}
_HINT = "python -m slurmtrain --cfg job shows all fields; quote text that looks like something else: '\"[a]\"'"
_UNITS = {"_gb": "GiB", "_mb": "MiB", "_s": "seconds", "_min": "minutes", "_minutes": "minutes"}  # by the ends of names
_SCALE = {"s": 1, "m": 60, "h": 3600, "d": 86400, "M": 1, "G": 1024, "T": 1024**2}  # of units, by their first letters


def typed(values: Any, schema: type[S]) -> S:
    """Build an object of the schema from plain values; fields that they lack have their defaults.

    Raises:
        UsageError, ConfigError: for all unknown fields, or for all values that cannot be used.
    """
    problems: list[SlurmtrainError] = []
    built = _group(values, schema, "", problems)
    raise_all(problems)
    return built


def raise_all(problems: list[SlurmtrainError]) -> None:
    """Raise one error for all problems, if there are any; unknown names hide what is wrong with values."""
    found = [error for error in problems if isinstance(error, UsageError)] or problems
    if len(found) == 1:
        raise found[0]
    if found:
        lines = [f"{each.message} ({each.hint})" if each.hint else each.message for each in found]
        raise type(found[0])(f"{len(found)} things are wrong:\n  " + "\n  ".join(dict.fromkeys(lines)))


def plain(kind: Any) -> Any:
    """Return a type without its constraints, and without None where it is optional."""
    if typing.get_origin(kind) is Annotated:
        return plain(typing.get_args(kind)[0])
    others = [each for each in _alternatives(kind) if each is not type(None)]
    return plain(others[0]) if len(others) == 1 and others[0] is not kind else kind


def words_of(choice: type[StrEnum]) -> list[str]:
    """Return the words that a person may type for a field of few words."""
    return [str(word) for word in choice if word not in (JobKind.EVALUATE, JobKind.PREFLIGHT)]


def written(value: Any) -> str:
    """Return a value as a person types it."""
    return _NULL.get(repr(value), shown(value))


def wrong(key: str, value: Any, expected: str, hint: str = _HINT) -> ConfigError:
    """Return the error for a value of a wrong type."""
    return ConfigError(f"{key}={written(value)} is not {expected}", hint=hint)


def _group(values: Any, schema: type[S], where: str, problems: list[SlurmtrainError]) -> S:
    kinds, found = schema.__annotations__, dict[str, Any]()
    if not isinstance(values, Mapping):
        key = where.removesuffix(".") or "the config"
        problems.append(wrong(key, values, "a group of fields", f"write {where}FIELD=VALUE"))
        return schema()
    for name in values:
        if name not in kinds:
            what = f"{where.removesuffix('.')} has no field" if where else "there is no config key"
            problems.append(UsageError(f"{what} {shown(name)!r}", hint=nearest(str(name), kinds, where)))
    for (name, kind), default in zip(kinds.items(), schema.__struct_defaults__, strict=True):
        if name not in values or (values[name] is None and default is None):
            continue  # it has its default
        if isinstance(kind, GROUP):
            found[name] = _group(values[name], kind, f"{where}{name}.", problems)
            continue
        try:
            found[name] = _value(f"{where}{name}", values[name], kind)
        except SlurmtrainError as error:
            problems.append(error)
    return schema(**found)


def _value(key: str, value: Any, kind: Any, *, lines: bool = False) -> Any:
    """Return a value as the field's type has it, or raise ConfigError."""
    if value == MISSING:
        raise ConfigError(f"{key} is not set, and has no default", hint=f"write {key}=VALUE")
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        value = _value(key, value, inner[0], lines=LINES in inner)
        for constraint in inner[1:]:
            if isinstance(constraint, Range | Pattern):
                constraint.check(key, value)
            elif callable(constraint):  # a parser that raises for what it cannot read
                constraint(value)
        return value
    if kind is Any and isinstance(value, str):
        return _checked_text(key, value, lines=True)
    if kind is Any and not isinstance(value, Mapping | list | tuple):
        if isinstance(value, int | float | None):
            return value
        raise wrong(key, value, "text, a number, true, false, null, a list or a mapping of them")
    if kind is Any:  # what yaml can hold
        origin, inner = (dict, (str, Any)) if isinstance(value, Mapping) else (list, (Any,))
    if origin is dict:
        return _mapping(key, value, *inner)
    if origin in (list, tuple):
        items = [value] if isinstance(value, str) else value  # a single word is a list of one
        if not isinstance(items, list | tuple):
            raise wrong(key, value, "a list", f"write {key}=[a,b]")
        kinds = inner if origin is tuple else inner * len(items)
        if len(items) != len(kinds):
            raise wrong(key, value, f"a list of {len(kinds)}", f"write {key}=[0.9,0.95]")
        return origin(_value(f"{key}[{at}]", *pair) for at, pair in enumerate(zip(items, kinds, strict=True)))
    kinds = _alternatives(kind)
    for each in kinds:
        found, fits = _scalar(value, each)
        if fits:
            return _checked_text(key, found, lines) if isinstance(found, str) else found
    for each in kinds:  # a range or a pattern of an optional field
        if typing.get_origin(each) in (Annotated, list):
            return _value(key, value, each, lines=lines)
    choice = next((each for each in kinds if isinstance(each, type) and issubclass(each, StrEnum)), None)
    if choice is not None and isinstance(value, str):
        known = [*(["null"] if type(None) in kinds else []), *words_of(choice)]
        raise ConfigError(f"{key}={shown(value)} is not known", hint=f"one of: {', '.join(known)}")
    names = [_NAMES.get(each, "text") for each in kinds if each is not type(None)]
    unit = next((words for end, words in _UNITS.items() if key.endswith(end) and not key.endswith("_per_s")), None)
    number = re.match(r"(\d+)\s*([A-Za-z])", value) if unit and isinstance(value, str) else None
    hint = _HINT
    if unit and number:
        letter, own = number[2].lower() if unit.islower() else number[2].upper(), _SCALE[unit[0]]
        amount = int(number[1]) * _SCALE.get(letter, own) // own
        hint = f"{key} is a number of {unit}, without a unit, such as {max(1, amount)}"
    raise wrong(key, value, " or ".join([*names, *(["null"] if type(None) in kinds else [])]), hint)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def _scalar(value: Any, kind: Any) -> tuple[Any, bool]:
    """Return a value as this type, and whether it can be one: YAML has 1e-3 and quoted numbers as text."""
    if kind is type(None):
        return None, value is None
    if kind is bool:
        found = value if isinstance(value, bool) else _BOOLEANS.get(value.lower()) if isinstance(value, str) else None
        return found, found is not None
    if kind is str:
        if isinstance(value, bool):
            return str(value).lower(), True
        return str(value), isinstance(value, str | int | float)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # YAML's word for `off`
        return (kind(word), True) if isinstance(word, str) and word in list(kind) else (None, False)
    if kind in (int, float) and not isinstance(value, bool) and isinstance(value, str | int | float):
        try:
            number = kind(value)
            return number, math.isfinite(number) and (number == value or isinstance(value, str))
        except (ValueError, OverflowError):
            return None, False
    return None, False


def _checked_text(key: str, text: str, lines: bool = False) -> str:
    """Return the text if it can be a part of a script and of a file."""
    if not lines and CONTROL.search(text):
        raise wrong(key, repr(text), "a single line", "control characters such as a line end are not allowed in it")
    if "\0" in text:
        raise wrong(key, repr(text), "text", "no command and no file can contain a null byte")
    try:
        text.encode()
    except UnicodeEncodeError:  # Python keeps such bytes of the command line and of variables, but no file can
        raise wrong(key, text, "text in UTF-8", "check the locale of the shell, or the file it came from") from None
    return text


def _mapping(key: str, value: Any, names: Any, kind: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong(key, value, "a mapping of keys to values", f"write +{key}.NAME=VALUE, or {key}='{{NAME: VALUE}}'")
    for name in value:
        if not isinstance(name, str):
            raise wrong(f"a key of {key}", name, "text")
        if typing.get_origin(names) is Annotated:
            pattern = typing.get_args(names)[1]
            if not re.fullmatch(pattern.regex, name):
                raise ConfigError(f"{key} has {shown(name)!r}, which is not {pattern.what}", hint=pattern.hint)
        _checked_text(f"a key of {key}", name)
    return {name: _value(f"{key}.{name}", item, kind) for name, item in value.items()}


def merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Merge values key by key: mappings are merged, all else is replaced; ??? leaves what is there."""
    for key, value in values.items():
        if isinstance(value, dict):
            inside = into.get(key)
            if not isinstance(inside, dict):
                inside = into[key] = {}
            merge(inside, value)
        elif value != MISSING or key not in into:
            into[key] = copy.deepcopy(value)


RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?")
NODES_MAX = 65536  # every size of a range is tried
UNPRIVILEGED = 1024  # ports below are root's
HIGHEST = 65535


# What a field alone can be: these stand in the types of the schema, as in `Annotated[int, Range(1)]`.


class Range(Struct, frozen=True):
    """The numbers that a field takes; `hint` says what to write instead of others."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    hint: str | None = None

    def __str__(self) -> str:
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)

    def check(self, key: str, value: Any) -> None:
        """Raise ConfigError if the value is not in the range."""
        if (
            (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        ):
            raise ConfigError(f"{key}={shown(value)} must be {self}", hint=self.hint)


class Pattern(Struct, frozen=True):
    """The form of a text: a regular expression for all of it, and the same in words."""

    regex: str
    what: str
    hint: str

    def check(self, key: str, value: str) -> None:
        """Raise ConfigError if the text has another form."""
        if not re.fullmatch(self.regex, value):
            raise ConfigError(f"{key}={shown(value)!r} is not {self.what}", hint=self.hint)


class Share(Struct, frozen=True):
    """A default that follows train.steps while a field is null: this fraction of them, at least 1 and at most `most`."""

    fraction: float
    most: int


def _ends(key: str, value: str | int, what: str, hint: str) -> tuple[int, int]:
    """Return both ends of the range that a text such as "2-4" or "4" stands for, or raise ConfigError."""
    match = RANGE.fullmatch(str(value))
    if match is None:
        raise ConfigError(f"{key}={value!r:.100} is not {what}", hint=hint)
    first, last = int(match.group(1)), int(match.group(2) or match.group(1))
    if last < first:
        raise ConfigError(f"{key}={value}: {last} is less than {first}", hint=f"{key}={last}-{first}")
    return first, last


class NodeRange(Struct, frozen=True):
    """The nodes that a job may have: from `least` to `most`. Both are the same for a job of a fixed size."""

    least: int
    most: int

    @classmethod
    def parse(cls, value: int | str) -> NodeRange:
        """Return the range that `value`, such as 4 or "2-4", stands for: as many of these nodes as SLURM can give.

        Raises:
            ConfigError: it is no such number or range.
        """
        hint = "cluster.nodes=4, or cluster.nodes=2-4 for as many of them as SLURM can give"
        least, most = _ends("cluster.nodes", value, "a number of nodes or a range of such numbers", hint)
        if not 1 <= least <= most <= NODES_MAX:
            raise ConfigError(f"cluster.nodes={value} must be at least 1 and at most {NODES_MAX}", hint=hint)
        return cls(least, most)

    @property
    def elastic(self) -> bool:
        """Whether SLURM may choose the number."""
        return self.least != self.most

    def __str__(self) -> str:
        """Return the text as sbatch takes it: "4" or "2-4"."""
        return f"{self.least}-{self.most}" if self.elastic else str(self.most)


def ports_of(value: str | int) -> range:
    """Return the TCP ports that a value such as "29000-29100" or 29500 stands for.

    Raises:
        ConfigError: it is no such range, or has ports that a program of a person may not use.
    """
    first, last = _ends("cluster.port_range", value, "a range of ports", "cluster.port_range=29000-29100")
    if first < UNPRIVILEGED or last > HIGHEST:
        raise ConfigError(
            f"cluster.port_range={value} is outside of the ports from {UNPRIVILEGED} to {HIGHEST}, which a program may use",
            hint="cluster.port_range=29000-29100, or the ports that your site has opened between its nodes",
        )
    return range(first, last + 1)
