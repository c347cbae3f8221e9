"""The page `config` of the manual is made of the schema: every field with its type, range, unit, default and comment.

python -m pytest tests/unit/config/test_reference.py --update-goldens    writes slurmtrain/docs/config.md anew
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any

import pytest

from slurmtrain.config import schema
from slurmtrain.config.compose import compose
from slurmtrain.config.fields import GROUP, Range, Share, words_of
from slurmtrain.config.folders import PACKAGE

COLUMNS = 120
UNITS = {"_gb_per_s": "GB/s", "_s": "seconds", "_min": "minutes", "_minutes": "minutes", "_hours": "hours"}
UNITS |= {"_gb": "GB", "_mb": "MB"}

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


def test_the_page_names_every_field_of_today(request: pytest.FixtureRequest) -> None:
    path = PACKAGE / "docs" / "config.md"
    if request.config.getoption("--update-goldens"):
        path.write_text(page())
    assert path.read_text() == page(), f"python -m pytest {__file__} --update-goldens"


def page() -> str:
    """Return the page as Markdown."""
    config = compose(["job.runs_dir=runs"])  # which SLURMTRAIN_RUNS changes
    sections = [HEAD]
    for group, kind in schema.Config.__annotations__.items():
        if isinstance(kind, GROUP):
            about = f"{_escaped(inspect.getdoc(kind) or '')}\n\n" if kind.__doc__ else ""
            lines = _lines(f"{group}.", schema.ClusterConfig() if group == "cluster" else getattr(config, group))
            sections.append(f"## {group}\n\n{about}" + "\n".join(lines) + "\n")
    comment = _comments(schema.Config)["secrets"]
    sections.append("## secrets\n\n" + "\n".join(_bullet("secrets.NAME", "dict[str, str]", "{}", comment)) + "\n")
    return "\n".join([*sections, TAIL])


def _lines(prefix: str, group: Any) -> Iterator[str]:
    """Yield the fields of a group, with its values as defaults."""
    comments = _comments(type(group))
    for name, kind in type(group).__annotations__.items():
        if isinstance(kind, GROUP):
            yield from _lines(f"{prefix}{name}.", kind())
            continue
        share = next((each for each in typing.get_args(kind) if isinstance(each, Share)), None)
        default = _yaml(getattr(group, name))
        if share is not None:
            default = f"{100 * share.fraction:g} % of train.steps, at most {share.most}"
        yield from _bullet(prefix + name, _type(kind), default, comments[name])


def _bullet(key: str, kind: str, default: str, comment: str) -> Iterator[str]:
    unit = next((f", in {unit}" for end, unit in UNITS.items() if key.endswith(end)), "")
    head = f"- `{key}`: {kind}{unit}, default `{default}`"
    # Only what is too long: a default may have blanks that are its own.
    yield from textwrap.wrap(head, COLUMNS, subsequent_indent="  ") if len(head) > COLUMNS else [head]
    yield from textwrap.wrap(_escaped(comment), COLUMNS, initial_indent="  ", subsequent_indent="  ")


def _comments(owner: type) -> dict[str, str]:
    """Return the comment of each field of a class: right above it, and beside it."""
    source, found = inspect.getsource(owner), {}
    lines = source.splitlines()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = row = node.lineno - 1
            while lines[row - 1].strip().startswith("#"):
                row -= 1
            beside = [line.partition("  # ")[2] for line in lines[first : node.end_lineno]]
            above = [line.strip().lstrip("# ") for line in lines[row:first]]
            found[node.target.id] = " ".join(filter(None, [*above, *beside]))
    return found


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
