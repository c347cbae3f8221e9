"""The page `config` of the manual is made of the schema: every field with its type, range, unit, default and comment.

python -m pytest tests/unit/config/test_reference.py --update-goldens    writes slurmtrain/docs/config.md anew
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, NamedTuple

import pytest

from slurmtrain.config import schema
from slurmtrain.config.compose import compose
from slurmtrain.config.fields import Range, Share, words_of
from slurmtrain.config.folders import PACKAGE
from slurmtrain.config.frozen import to_values

COLUMNS = 120
UNITS = {
    "_gb_per_s": "GB/s",
    "_s": "seconds",
    "_min": "minutes",
    "_minutes": "minutes",
    "_hours": "hours",
    "_gb": "GB",
    "_mb": "MB",
}
DIFFERS = ("cluster", "model", "data")  # groups whose options have other defaults each

HEAD = """\
# Config: every field with its type, unit, default and meaning

    python -m slurmtrain --cfg job                               # the composed config, with every field
    python -m slurmtrain --cfg job +cluster=a100x4 train.steps=1000
    python -m slurmtrain +cluster=a100x4 train.steps=1000 submit # set a field: group.field=value

This page is generated from `slurmtrain/config/schema.py`, which is the only list of fields. It shows the defaults of a
command without overrides; for `cluster`, it shows the defaults that a cluster file starts from. `model` and `data` are
open: they hold whatever their `_target_` accepts. An unknown field is refused with exit code 2 before anything is
submitted. A value of the wrong type or outside of its range, or a combination of values that cannot work, is refused
with exit code 78. All such errors of a command are shown at once.

Some defaults follow the length of the run: while they are null, `config.yaml` of the run gets a share of train.steps.
"""

TAIL = """\
## Limits

Fields that only a cluster, a model or a data set can check (a partition, for example) are checked where they are used:
`submit` shows the error message of sbatch.
"""


class Field(NamedTuple):
    """A field of the schema as a person reads it: `comment` is empty where its name says everything."""

    name: str
    type: str
    default: str
    comment: str


def test_the_page_names_every_field_of_today(request: pytest.FixtureRequest) -> None:
    path = PACKAGE / "docs" / "config.md"
    if request.config.getoption("--update-goldens"):
        path.write_text(page())
    assert path.read_text() == page(), f"python -m pytest {__file__} --update-goldens"


def page() -> str:
    """Return the page as Markdown."""
    values = to_values(compose(["job.runs_dir=runs"]))  # which SLURMTRAIN_RUNS changes
    nodes = ast.parse(_source()).body
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef) and node.bases}
    sections = [HEAD]
    for group, kind in schema.Config.__annotations__.items():
        if kind.__name__ not in classes:
            continue
        defaults = {} if group in DIFFERS else values[group]
        text = "\n".join(_lines(f"{group}.", classes[kind.__name__], classes, defaults))
        about = ast.get_docstring(classes[kind.__name__]) or ""
        sections.append(f"## {group}\n\n{_escaped(about)}\n\n{text}\n" if about else f"## {group}\n\n{text}\n")
    secrets = next(field for field in _fields(classes["Config"], {}) if field.name == "secrets")
    sections.append("## secrets\n\n" + "\n".join(_bullet("secrets.NAME", secrets)) + "\n")
    return "\n".join([*sections, TAIL])


def _source() -> str:
    return inspect.getsource(schema)


def _lines(
    prefix: str, owner: ast.ClassDef, classes: Mapping[str, ast.ClassDef], defaults: Mapping[str, Any]
) -> Iterator[str]:
    for field in _fields(owner, defaults):
        if field.type in classes:
            yield from _lines(f"{prefix}{field.name}.", classes[field.type], classes, {})
        else:
            yield from _bullet(prefix + field.name, field)


def _bullet(key: str, field: Field) -> Iterator[str]:
    unit = next((f", in {unit}" for end, unit in UNITS.items() if field.name.endswith(end)), "")
    head = f"- `{key}`: {field.type}{unit}, default `{field.default}`"
    # Only what is too long: a default may have blanks that are its own.
    yield from textwrap.wrap(head, COLUMNS, subsequent_indent="  ") if len(head) > COLUMNS else [head]
    yield from textwrap.wrap(_escaped(field.comment), COLUMNS, initial_indent="  ", subsequent_indent="  ")


def _fields(owner: ast.ClassDef, defaults: Mapping[str, Any]) -> Iterator[Field]:
    """Yield the fields of a class in the order of the source, each with the comment beside it or right above it."""
    lines = _source().splitlines()
    for node in owner.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        assert node.end_lineno is not None
        above: list[str] = []
        row = node.lineno - 2
        while lines[row].strip().startswith("#"):
            above.insert(0, lines[row].strip().lstrip("# "))
            row -= 1
        beside = [_comment(line) for line in lines[node.lineno - 1 : node.end_lineno]]
        name = node.target.id
        kind = getattr(schema, owner.name).__annotations__[name]
        share = next((each for each in typing.get_args(kind) if isinstance(each, Share)), None)
        default = _yaml(defaults[name]) if name in defaults and share is None else _default(node.value)
        if share is not None:
            default = f"{100 * share.fraction:g} % of train.steps, at most {share.most}"
        yield Field(name, _type(kind), default, " ".join(part for part in [*above, *beside] if part))


def _type(kind: Any) -> str:
    """Return a field's type as a person reads it, with its range, or the words that it takes."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        ranges = [str(each) for each in arguments[1:] if isinstance(each, Range)]
        return " ".join([_type(arguments[0]), *(f"({each})" for each in ranges)])
    if kind is Any:
        return "Any"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return " | ".join(f"`{word}`" for word in words_of(kind))
    if typing.get_origin(kind) in (list, dict, tuple):
        return f"{typing.get_origin(kind).__name__}[{', '.join(map(_type, arguments))}]"
    if arguments:
        return " | ".join(map(_type, sorted(arguments, key=lambda each: each is NoneType)))
    return "None" if kind is NoneType else str(kind.__name__)


def _comment(line: str) -> str:
    found = re.search(r"  # (.*)$", line)
    return found.group(1) if found else ""


def _default(value: ast.expr | None) -> str:
    """Return a default of the schema as a person would write it in YAML."""
    try:
        return _yaml(ast.literal_eval(value)) if value is not None else "null"
    except ValueError:  # default_factory=..., or a member of an enum
        assert value is not None
        if isinstance(value, ast.Name):  # a share of train.steps
            return "null"
        if isinstance(value, ast.Attribute):
            return str(functools.reduce(getattr, ast.unparse(value).split("."), schema))
        return "{}" if "dict" in ast.unparse(value) else "[]"


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _escaped(text: str) -> str:
    """Return the text so that Markdown shows it as it is."""
    return re.sub(r"(?<!`)(_target_|<[\w./]+>(?:/<[^>]+>)*)", r"`\1`", text)
