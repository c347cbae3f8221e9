"""The content of a cluster's file: fields with their comments; and its text."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import yaml

from slurmtrain.launch.cluster_file.words import on_one_line

WIDTH = 112
COMMENT_COLUMN = 26


@dataclass(frozen=True)
class Entry:
    """A field of the file.

    Attributes:
        value: what is written; with `question` a proposal, in a comment. None: there is none to propose.
        why: where it comes from, or the question.
    """

    field: str
    value: object
    why: str
    question: bool = False


@dataclass(frozen=True)
class ClusterFile:
    """The content of a cluster's file.

    Attributes:
        name: of the file without .yaml, and so of the cluster in commands.
    """

    name: str
    partition: str
    title: str
    entries: tuple[Entry, ...]

    @property
    def values(self) -> dict[str, object]:
        """The fields that it sets."""
        return {each.field: each.value for each in self.entries if not each.question}

    @property
    def questions(self) -> tuple[str, ...]:
        return tuple(f"{each.field}: {each.why}" for each in self.entries if each.question)

    def text(self) -> str:
        """Return the file."""
        lines = [*_comment(self.title), ""]
        for entry in self.entries:
            lines += _lines_of(entry)
        return "\n".join(lines) + "\n"


def _lines_of(entry: Entry) -> list[str]:
    """Return a field with its comment beside it, or above it where it is long."""
    value = "..." if entry.value is None else _yaml(entry.value)
    setting = f"{'# ' if entry.question else ''}{entry.field}: {value}"
    why = on_one_line(entry.why)
    beside = f"{setting.ljust(COMMENT_COLUMN)} # {why}"
    return [beside] if len(beside) <= WIDTH else [*_comment(why), setting]


def _yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        on_one_line(text),
        WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
        break_long_words=False,
    )
