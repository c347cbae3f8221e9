"""The plan: which part of which input becomes which shard.

It is a pure function of the inputs' names and sizes and of the settings.

The first process writes the plan into the output folder; all others, in this attempt and in later ones, must have the
same plan, since otherwise they would make shards of different data sets. How the work is shared by tasks or parts of an
array is no part of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from slurmtrain.choices import RawFormat, RecordKind
from slurmtrain.config.schema import PrepareConfig
from slurmtrain.data.format.manifest import TokenizerFacts, replace_file
from slurmtrain.data.format.reading import DataError
from slurmtrain.data.format.tokenizers import NO_TOKEN, Tokenizer, TokenizerChoice, load_tokenizer, needed
from slurmtrain.data.prepare.chat_template import ChatTemplate, load_chat_template
from slurmtrain.data.prepare.inputs import InputFile, InputPiece, find_sources
from slurmtrain.errors import ConfigError
from slurmtrain.system.files import temporary_beside


@dataclass(frozen=True)
class Unit:
    """The pieces that one process turns into one shard of each split."""

    number: int
    pieces: tuple[InputPiece, ...]

    @property
    def name(self) -> str:
        return f"{self.number:05d}"

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class PreparePlan:
    """All units of a data set that is to be prepared, and the settings that decide the shards.

    Attributes:
        output: the folder of the data set.
        tokenizer: how the tokenizer is loaded.
        facts: the identity that the loaded tokenizer must have.
        chat: how conversations become text; None: records are documents.
    """

    output: Path
    sources: tuple[InputFile, ...]
    units: tuple[Unit, ...]
    text_field: str
    valid_fraction: float
    unit_bytes: int
    tokenizer: TokenizerChoice
    facts: TokenizerFacts
    chat: ChatTemplate | None = None

    @property
    def work_folder(self) -> Path:
        """The folder of the plan, and of units that were begun."""
        return self.output / ".prepare"


def make_plan(config: PrepareConfig) -> PreparePlan:
    """Look at the inputs and cut them into units.

    Raises:
        ConfigError: an input or the tokenizer does not exist, or its format is not known.
    """
    assert config.output is not None
    output = Path(config.output)
    sources = find_sources(config.inputs, config.format, output)
    for source in sources:
        if source.packing or source.format == RawFormat.PARQUET:
            needed("pyarrow", str(source.path))
    choice = _tokenizer_choice(config)
    tokenizer, _ = load_tokenizer(choice)
    unit_bytes = max(1, int(config.unit_mb * 1e6))
    return PreparePlan(
        output,
        tuple(sources),
        tuple(Unit(number, pieces) for number, pieces in enumerate(_grouped(sources, unit_bytes))),
        config.text_field,
        config.valid_fraction,
        unit_bytes,
        choice,
        tokenizer.facts,
        _chat_template(config, choice, tokenizer, sources),
    )


def agree_on(plan: PreparePlan) -> None:
    """Write the plan into the output folder, or compare it with the one that is there.

    Raises:
        ConfigError: another data set is prepared there, or inputs have changed since; the message says what differs.
        DataError: the disk is full.
    """
    path = plan.work_folder / "plan.json"
    used = any(next(plan.output.glob(pattern), None) for pattern in ("manifest.json", "*/unit.json"))
    if used and not path.exists():
        raise ConfigError(f"{plan.output} holds a data set that was not prepared there", hint="choose another output")
    mine = _facts(plan)
    folder = temporary_beside(plan.work_folder)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"prepare.output={plan.output} cannot be used: {error.strerror}") from None
    with file_errors_reported(plan.output):
        try:
            replace_file(folder / path.name, json.dumps(mine, indent=1).encode())
            with contextlib.suppress(OSError):  # of several that begin at once, one is the first
                folder.rename(plan.work_folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        there = json.loads(path.read_bytes())
    for name in {**mine, **there}:
        before, now = there.get(name, "missing"), mine.get(name, "missing")
        if before != now:
            raise ConfigError(
                f"{plan.output} was started with other settings: {name} was {before}, now {now}",
                hint="give what it was begun with, or choose another output, or remove that one",
            )


def _tokenizer_choice(config: PrepareConfig) -> TokenizerChoice:
    eos = config.eos
    if config.records == RecordKind.CHAT and config.chat_template != NO_TOKEN and eos is None:
        eos = NO_TOKEN  # the template writes the tokens that end turns
    return TokenizerChoice(config.tokenizer, config.bos, eos)


def _chat_template(
    config: PrepareConfig, choice: TokenizerChoice, tokenizer: Tokenizer, sources: Sequence[InputFile]
) -> ChatTemplate | None:
    if config.records != RecordKind.CHAT:
        return None
    for source in sources:
        if source.format == RawFormat.TEXT:
            raise ConfigError(
                f"prepare.records=chat, but {source.path} is text, which has no fields",
                hint="give conversations as JSON lines or Parquet",
            )
    tokenizer.encode_chats([], [])  # refuses a kind without special tokens
    return load_chat_template(choice, config.chat_template, config.loss_on)


def _grouped(sources: Sequence[InputFile], unit_bytes: int) -> Iterator[tuple[InputPiece, ...]]:
    """Yield the pieces of each unit: large files are cut evenly, small ones are grouped, always in the order of the sources."""
    group: list[InputPiece] = []
    size = 0
    for piece in (piece for source in sources for piece in _cut(source, unit_bytes)):
        if group and size + piece.size > unit_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(piece)
        size += piece.size
    if group:
        yield tuple(group)


def _cut(source: InputFile, unit_bytes: int) -> list[InputPiece]:
    count = max(1, round(source.size / unit_bytes)) if source.divisible else 1
    edges = [source.size * index // count for index in range(count + 1)]
    return [InputPiece(source, start, end) for start, end in pairwise(edges)]


def _facts(plan: PreparePlan) -> dict[str, Any]:
    """Return everything that decides the shards, under the names of the user's settings."""
    chat = plan.chat
    return {
        **{f"the input {source.name}": f"{source.size} bytes of {source.format}" for source in plan.sources},
        "prepare.text_field": plan.text_field,
        "prepare.loss_on": chat and str(chat.loss_on),
        "the sha256 of prepare.chat_template": chat and chat.facts.template_sha256,
        "the tokens of prepare.chat_template": chat and dict(chat.tokens),
        "prepare.valid_fraction": plan.valid_fraction,
        "prepare.unit_mb": plan.unit_bytes / 1e6,
        **{f"tokenizer.{name}": value for name, value in asdict(plan.facts).items()},
        **{f"the last change of {source.name}": source.modified for source in plan.sources},
    }


RERUN_HINT = "the same command again goes on where this one ended"


@contextlib.contextmanager
def file_errors_reported(output: Path) -> Iterator[None]:
    """Raise errors of the file system as DataError. `output` is the folder that most is written to."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"there is no space left for {output}", hint=f"free some space; {RERUN_HINT}") from None
        raise DataError(f"{error.filename or output}: {error.strerror or error}", hint=RERUN_HINT) from None
