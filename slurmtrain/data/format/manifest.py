"""The manifest of a prepared data set: which shards it has, what they hold, and which tokenizer made them.

The manifest is written last and atomically, so its presence marks a data set as complete. Nothing in it depends on
when, where or by how many processes the data was prepared: equal manifests are equal data sets, byte for byte. Imports
no torch.

    OUTPUT/
      manifest.json                      this
      tokenizer.json                     a copy of the tokenizer's file, if it has one
      chat_template.jinja                of chat data: the template that was used, beside the tokenizer's other settings
      00000/train.tokens                 uint8, uint16 or uint32 [tokens]: documents end to end, with bos and eos, if any
      00000/train.ends                   uint64 [documents]: where each document ends in the shard, in tokens
      00000/train.loss_mask              uint8 [tokens]: 1 for tokens that count as targets; only of chat data
      00000/valid.tokens ...             another split

All numbers are little-endian. A shard without documents has no files and is not listed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from slurmtrain.errors import ConfigError
from slurmtrain.system import files
from slurmtrain.system.files import fsync_directory

FILE_NAME = "manifest.json"
SHARED_MODE = 0o666  # the umask decides who reads a data set
TOKEN_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}  # bytes of one token, by dtype
KINDS = ("tokens", "ends")  # the files of a shard, by suffix
LOSS_MASK = "loss_mask"  # a further one of chat data
AGAIN = "prepare the data set again"
Kind = Literal["bytes", "tokenizers"]  # of a tokenizer
Natural = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[^./][^/]*$")]  # of a file or folder


@dataclass(frozen=True)
class TokenizerFacts:
    """The identity of the tokenizer that made the tokens.

    Attributes:
        file: name of the tokenizer's file, copied beside the manifest; None: it has no file.
        sha256: digest of the tokenizer's file, which identifies the tokenizer.
        vocab_size: all token ids are below this number.
        bos: id before each document; None: there is none.
        eos: id after each document; None: there is none.
    """

    kind: Kind
    file: str | None
    sha256: str | None
    vocab_size: Annotated[int, msgspec.Meta(gt=0, le=1 << 32)]
    bos: Natural | None
    eos: Natural | None

    @property
    def dtype(self) -> str:
        """The smallest integer type that holds all token ids of the vocabulary."""
        return next(dtype for dtype, width in TOKEN_BYTES.items() if self.vocab_size <= 1 << 8 * width)


@dataclass(frozen=True)
class ChatFacts:
    """How the conversations of chat data became tokens.

    Attributes:
        template_sha256: digest of the chat template.
        loss_on: which parts count as targets, see `LossOn`.
    """

    template_sha256: str
    loss_on: str


@dataclass(frozen=True)
class Shard:
    """One shard of a split.

    Attributes:
        name: name of its folder.
        documents: number of documents.
        tokens: number of tokens.
        bytes: UTF-8 bytes of its documents' texts.
        sha256: digest of each of its files, by kind.
    """

    name: Name
    documents: Natural
    tokens: Natural
    bytes: Natural
    sha256: dict[str, str]

    def file_sizes(self, dtype: str) -> dict[str, int]:
        """Return the size in bytes of each of the shard's files, by kind."""
        sizes = {"tokens": self.tokens * TOKEN_BYTES[dtype], "ends": self.documents * 8}
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
class Manifest:
    """The description of a prepared data set.

    Attributes:
        splits: by name, in the order "train", "valid".
        chat: None for text.
        records: lines, rows or files of the inputs that were read, without blank lines.
        empty: records whose text is empty; they are left out.
        bad: records that could not be read; they are left out.
    """

    tokenizer: TokenizerFacts
    splits: Annotated[dict[Name, Split], msgspec.Meta(min_length=1)]
    chat: ChatFacts | None = None
    records: Natural = 0
    empty: Natural = 0
    bad: Natural = 0

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of manifest.json; data sets with equal fingerprints are equal, byte for byte."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def text(self) -> str:
        """Return the content of manifest.json."""
        value = {"format": 1, "dtype": self.tokenizer.dtype, **dataclasses.asdict(self)}
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
    except OSError as error:
        raise ConfigError(
            f"{folder} has no {FILE_NAME} that can be read ({error.strerror}): no prepared data set, or not complete",
            hint="`slurmtrain prepare` writes it last; repeat the prepare command to continue",
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", hint=AGAIN) from None
    try:
        return msgspec.convert(value, Manifest)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", hint=AGAIN) from None


def verify(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Compare every byte of a prepared data set with its digest; yield a sentence for each file that is missing or differs."""

    def problem(path: Path, sha256: str | None) -> str | None:
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        return None if digest == sha256 else f"{path} differs from its digest: it is damaged"

    files = [
        (shard_file(folder, split, shard.name, kind), shard.sha256.get(kind))
        for split, content in manifest.splits.items()
        for shard in content.shards
        for kind in shard.file_sizes(manifest.tokenizer.dtype)
    ]
    if manifest.tokenizer.file is not None:
        files.insert(0, (folder / manifest.tokenizer.file, manifest.tokenizer.sha256))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashing leaves other threads alone
        yield from filter(None, pool.map(problem, *zip(*files, strict=True)))


def shard_file(folder: Path, split: str, shard: str, kind: str) -> Path:
    """Return the path of one of the files of a shard; `kind` is one of KINDS or LOSS_MASK."""
    return folder / shard / f"{split}.{kind}"


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file atomically: a reader sees the old content or all of the new one, which is on the disk when this returns.

    Unlike the files of a run, it may be read by everybody whom the umask permits, since data sets are shared.
    """
    files.replace_file(path, content, mode=SHARED_MODE)
    fsync_directory(path.parent)
