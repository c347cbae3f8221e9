"""The manifest of a prepared data set: which shards it has, what they hold, and which tokenizer made them.

The manifest is written last and atomically, so its presence marks a data set as complete. Nothing in it depends on
when, where or by how many processes the data was prepared: equal manifests are equal data sets, byte for byte. Imports
no torch.

    OUTPUT/
      manifest.json                      this
      tokenizer.json                     a copy of the tokenizer's file, if it has one
      chat_template.jinja                of chat data: the template that was used, beside the tokenizer's other settings
      train/00000.tokens                 uint8, uint16 or uint32 [tokens]: documents end to end, with bos and eos, if any
      train/00000.ends                   uint64 [documents]: where each document ends in the shard, in tokens
      train/00000.bytes                  uint32 [documents]: UTF-8 bytes of each document's text
      train/00000.loss_mask              uint8 [tokens]: 1 for tokens that count as targets; only of chat data
      valid/00000.tokens ...             another split

All numbers are little-endian. A shard without documents has no files and is not listed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from slurmtrain.errors import ConfigError
from slurmtrain.system import files
from slurmtrain.system.files import fsync_directory

FORMAT = 1
CHAT_FORMAT = 2  # with the entry `chat` and a file more per shard
FILE_NAME = "manifest.json"
SHARED_MODE = 0o666  # the umask decides who reads a data set
TOKEN_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}  # bytes of one token, by dtype
KINDS = ("tokens", "ends", "bytes")  # the files of a shard, by suffix
LOSS_MASK = "loss_mask"  # a further one of chat data
TOKENIZER_KINDS = ("bytes", "tokenizers")
T = TypeVar("T")


@dataclass(frozen=True)
class TokenizerFacts:
    """The identity of the tokenizer that made the tokens.

    Attributes:
        kind: one of TOKENIZER_KINDS.
        file: name of the tokenizer's file, copied beside the manifest; None: it has no file.
        sha256: digest of the tokenizer's file, which identifies the tokenizer.
        vocab_size: all token ids are below this number.
        bos: id before each document; None: there is none.
        eos: id after each document; None: there is none.
    """

    kind: str
    file: str | None
    sha256: str | None
    vocab_size: int
    bos: int | None
    eos: int | None

    @property
    def dtype(self) -> str:
        """The smallest integer type that holds all token ids of the vocabulary."""
        return next(dtype for dtype, width in TOKEN_BYTES.items() if self.vocab_size <= 1 << 8 * width)


@dataclass(frozen=True)
class ChatFacts:
    """How the conversations of chat data became tokens.

    Attributes:
        template_sha256: digest of the chat template; None: questions and answers were put end to end.
        loss_on: which parts count as targets, see `LossOn`.
    """

    template_sha256: str | None
    loss_on: str


@dataclass(frozen=True)
class Shard:
    """One shard of a split.

    Attributes:
        name: file name without suffix.
        documents: number of documents.
        tokens: number of tokens.
        bytes: UTF-8 bytes of its documents' texts.
        sha256: digest of each of its files, by kind.
    """

    name: str
    documents: int
    tokens: int
    bytes: int
    sha256: dict[str, str]

    def file_sizes(self, dtype: str) -> dict[str, int]:
        """Return the size in bytes of each of the shard's files, by kind."""
        sizes = {"tokens": self.tokens * TOKEN_BYTES[dtype], "ends": self.documents * 8, "bytes": self.documents * 4}
        return {**sizes, LOSS_MASK: self.tokens} if LOSS_MASK in self.sha256 else sizes


@dataclass(frozen=True)
class Split:
    """The shards of a split, in their order."""

    shards: tuple[Shard, ...]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class InputRecord:
    """An input file, or all text files of one folder (whose name then ends with a slash).

    Attributes:
        name: path relative to the folder that all inputs have in common.
        bytes: size on disk.
        records: lines, rows or files read, without blank lines.
        empty: records whose text is empty; they are left out.
        bad: records that could not be read; they are left out.
    """

    name: str
    bytes: int
    records: int
    empty: int
    bad: int


@dataclass(frozen=True)
class Manifest:
    """The description of a prepared data set; `splits` are by name, in the order "train", "valid"; `chat` is None for text."""

    dtype: str
    tokenizer: TokenizerFacts
    splits: dict[str, Split]
    sources: tuple[InputRecord, ...]
    chat: ChatFacts | None = None

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of manifest.json; data sets with equal fingerprints are equal, byte for byte."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def text(self) -> str:
        """Return the content of manifest.json."""
        splits = {
            name: {"documents": split.documents, "tokens": split.tokens, "bytes": split.bytes, **_plain(split)}
            for name, split in self.splits.items()
        }
        value = {
            "format": FORMAT if self.chat is None else CHAT_FORMAT,
            "dtype": self.dtype,
            "tokenizer": _plain(self.tokenizer),
            **({} if self.chat is None else {"chat": _plain(self.chat)}),
            "splits": splits,
            "sources": [_plain(source) for source in self.sources],
        }
        return json.dumps(value, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Replace the manifest of `folder` atomically; it is on the disk when this returns."""
        replace_file(folder / FILE_NAME, self.text().encode())


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the prepared data set in `folder`, without looking at the shards.

    Raises:
        ConfigError: there is no manifest, it cannot be read, or it is not what `prepare` writes.
    """
    path = folder / FILE_NAME
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {FILE_NAME}, so it is not a prepared data set, or an incomplete one",
            hint="`slurmtrain prepare` writes it last; repeat the prepare command to continue",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint="data.path is the folder that `prepare` wrote"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", hint="prepare the data set again") from None
    if isinstance(value, dict) and value.get("format") not in (FORMAT, CHAT_FORMAT):
        raise ConfigError(
            f"{path} has format {value.get('format')!r}, expected {FORMAT} or {CHAT_FORMAT}",
            hint="prepare the data set again, or read it with the version that wrote it",
        )
    try:
        manifest = _parsed(value)
    except _MalformedError as error:
        raise ConfigError(f"{path}: {error}", hint="prepare the data set again") from None
    return manifest


def shard_file(folder: Path, split: str, shard: str, kind: str) -> Path:
    """Return the path of one of the files of a shard; `kind` is one of KINDS or LOSS_MASK."""
    return folder / split / f"{shard}.{kind}"


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file atomically: a reader sees the old content or all of the new one, which is on the disk when this returns.

    Unlike the files of a run, it may be read by everybody whom the umask permits, since data sets are shared.
    """
    files.replace_file(path, content, mode=SHARED_MODE)
    fsync_directory(path.parent)


class _MalformedError(Exception):
    """An error in a manifest's content, described by half a sentence."""


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dataclasses.asdict(value)
    return plain


def _parsed(value: Any) -> Manifest:
    of_chat = isinstance(value, dict) and value.get("format") == CHAT_FORMAT
    _keys(value, "the file", ("format", "dtype", "tokenizer", "splits", "sources", *(("chat",) if of_chat else ())))
    chat = _build(ChatFacts, value["chat"], "chat") if of_chat else None
    kinds = (*KINDS, LOSS_MASK) if of_chat else KINDS
    tokenizer = _build(TokenizerFacts, value["tokenizer"], "tokenizer")
    if tokenizer.kind not in TOKENIZER_KINDS:
        raise _MalformedError(f"tokenizer.kind is {tokenizer.kind!r}, expected one of {', '.join(TOKENIZER_KINDS)}")
    if not 0 < tokenizer.vocab_size <= 1 << 32:
        raise _MalformedError(f"tokenizer.vocab_size is {tokenizer.vocab_size}")
    if value["dtype"] != tokenizer.dtype:
        raise _MalformedError(
            f"dtype is {value['dtype']!r}, but {tokenizer.vocab_size} token ids need {tokenizer.dtype!r}"
        )
    if not isinstance(value["splits"], dict) or not value["splits"]:
        raise _MalformedError("splits is empty")
    splits = {name: _split(name, split, kinds) for name, split in value["splits"].items()}
    sources = tuple(_build(InputRecord, source, "sources") for source in _list(value["sources"], "sources"))
    return Manifest(value["dtype"], tokenizer, splits, sources, chat)


def _split(name: str, value: Any, kinds: tuple[str, ...]) -> Split:
    where = f"splits.{name}"
    if not name or name.startswith(".") or "/" in name:
        raise _MalformedError(f"{name!r} cannot be the name of a split")
    _keys(value, where, ("documents", "tokens", "bytes", "shards"))
    split = Split(tuple(_shard(shard, where, kinds) for shard in _list(value["shards"], f"{where}.shards")))
    for what in ("documents", "tokens", "bytes"):
        if value[what] != getattr(split, what):
            raise _MalformedError(f"{where}.{what} is {value[what]!r}, but its shards have {getattr(split, what)}")
    return split


def _shard(value: Any, where: str, kinds: tuple[str, ...]) -> Shard:
    shard = _build(Shard, value, f"{where}.shards")
    if not shard.name or shard.name.startswith(".") or "/" in shard.name:
        raise _MalformedError(f"{shard.name!r} in {where} cannot be the name of a shard")
    _keys(shard.sha256, f"shard {shard.name} of {where}: sha256", kinds)
    return shard


def _build(kind: Callable[..., T], value: Any, where: str) -> T:
    """Return a dataclass from a JSON object that has exactly its fields, of its types, and no negative numbers."""
    _keys(value, where, tuple(field.name for field in dataclasses.fields(kind)))  # type: ignore[arg-type]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        one = value[field.name]
        allowed: type = {"str": str, "int": int, "dict": dict}[str(field.type).partition("[")[0].partition(" ")[0]]
        if one is None and str(field.type).endswith("None"):
            continue
        if not isinstance(one, allowed) or isinstance(one, bool) or (isinstance(one, int) and one < 0):
            raise _MalformedError(f"{where}: {field.name} is {one!r}")
    return kind(**value)


def _keys(value: Any, where: str, expected: tuple[str, ...]) -> None:
    found = tuple(value) if isinstance(value, dict) else ()
    if set(found) != set(expected):
        raise _MalformedError(f"{where} has {', '.join(found) or 'no fields'}, expected {', '.join(expected)}")


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _MalformedError(f"{where} is no list")
    return value
