"""One unit of work: its records are read, tokenised and written into a folder, as one shard per split and a record of the unit.

The folder is renamed when it is complete. A kill at any moment leaves temporary files, which are removed when all units are
done.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.format.manifest import KINDS, LOSS_MASK, Shard, TokenizerFacts, replace_file
from slurmtrain.data.format.tokenizers import Ids, Tokenizer
from slurmtrain.data.prepare.chat_template import RenderedText
from slurmtrain.data.prepare.conversation import BadRecord, Conversation
from slurmtrain.data.prepare.inputs import records_of
from slurmtrain.data.prepare.unit_plan import PreparePlan, Unit
from slurmtrain.errors import ConfigError
from slurmtrain.system.files import fsync_directory, temporary_beside

BATCH = 1 << 20  # characters that are tokenised at a time
SPLITS = ("train", "valid")
RECORD_FILE = "unit.json"


@dataclass
class PieceCounts:
    """The counts of a piece of an input.

    Attributes:
        lines: number of the last record: lines or rows, or 1 for a text file.
        records: records that were not blank.
        empty: records without text.
        bad: (number in the piece, reason) of each record that was left out.
    """

    lines: int = 0
    records: int = 0
    empty: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class UnitRecord:
    """The result of a unit.

    Attributes:
        pieces: counts of each piece of the unit.
        shards: shards by split, without splits that got no documents.
    """

    pieces: list[PieceCounts]
    shards: dict[str, Shard]


def read_record(plan: PreparePlan, unit: Unit) -> UnitRecord:
    """Return the record of a unit that is done.

    Raises:
        ConfigError: it is damaged.
    """
    path = plan.output / unit.name / RECORD_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=UnitRecord)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}", hint="remove its folder, and repeat the prepare command") from None


def prepare_unit(plan: PreparePlan, unit: Unit, tokenizer: Tokenizer) -> UnitRecord:
    """Prepare a unit.

    Raises:
        ConfigError: an input has changed, or is not of its format.
        OSError: an input cannot be read, or the output cannot be written.
    """
    folder = plan.output / unit.name
    # Named after this process, since another attempt or user may be doing the same unit.
    temporary = temporary_beside(plan.work_folder / "begun" / unit.name)
    temporary.mkdir(parents=True)
    try:
        masked = plan.chat is not None
        writers = {split: _ShardWriter(temporary, split, unit.name, plan.facts, masked=masked) for split in SPLITS}
        pieces = [PieceCounts() for _ in unit.pieces]
        for batch in _batches(unit, pieces, plan):
            documents = _tokenise(batch, tokenizer, plan.valid_fraction)
            for split, writer in writers.items():
                writer.write([document for document in documents if document.split == split])
        shards = {split: shard for split, writer in writers.items() if (shard := writer.close()) is not None}
        record = UnitRecord(pieces, shards)
        replace_file(temporary / RECORD_FILE, json.dumps(asdict(record)).encode())
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else it has been done meanwhile, with the same bytes
                raise
        fsync_directory(plan.output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return record


@dataclass(frozen=True)
class _Document:
    """A document.

    Attributes:
        split: name of its split.
        size: UTF-8 bytes of its text.
        ids: its tokens.
        loss_mask: of a conversation 1 for each token that counts as a target, else 0.
    """

    split: str
    size: int
    ids: Ids
    loss_mask: NDArray[np.uint8] | None


Batch = list[tuple[RenderedText, PieceCounts]]


def _batches(unit: Unit, pieces: Sequence[PieceCounts], plan: PreparePlan) -> Iterator[Batch]:
    """Yield the unit's texts in batches, each with the counts of its piece, which are updated on the way."""
    batch: Batch = []
    length = 0
    for piece, counts in zip(unit.pieces, pieces, strict=True):
        for number, record in records_of(piece, plan.text_field if plan.chat is None else None):
            found: RenderedText | BadRecord | None = record if isinstance(record, BadRecord) else None
            if isinstance(record, Conversation):
                assert plan.chat is not None
                found = plan.chat.render(record)
            elif isinstance(record, str):
                found = RenderedText(record, None)
            counts.lines = number
            counts.records += found is not None
            if isinstance(found, BadRecord):
                counts.bad.append((number, found.reason))
            elif found is not None:
                batch.append((found, counts))
                length += len(found.text)
            if length >= BATCH:
                yield batch
                batch, length = [], 0
    yield batch


def _tokenise(batch: Batch, tokenizer: Tokenizer, valid_fraction: float) -> list[_Document]:
    """Return the documents of a batch, without those that have no tokens."""
    texts, spans = [each.text for each, _ in batch], [each.spans for each, _ in batch if each.spans is not None]
    encoded: Iterable[tuple[Ids, NDArray[np.uint8] | None]]
    encoded = tokenizer.encode_chats(texts, spans) if spans else ((ids, None) for ids in tokenizer.encode_batch(texts))
    documents = []
    for (each, counts), (ids, loss_mask) in zip(batch, encoded, strict=True):
        text = each.text.encode()
        # Chosen by a digest of the text, so that equal texts are always in the same split.
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        if len(ids):
            split = "valid" if number < valid_fraction * 2**64 else "train"
            documents.append(_Document(split, len(text), ids, loss_mask))
        else:
            counts.empty += 1
    return documents


class _ShardWriter:
    """The writer of the files of one shard, which also digests them. A shard without documents gets no files."""

    def __init__(self, folder: Path, split: str, name: str, facts: TokenizerFacts, *, masked: bool):
        self._folder, self._split, self._name = folder, split, name
        self._dtype = np.dtype(facts.dtype).newbyteorder("<")
        self._before, self._after = (
            [np.array([special], self._dtype)] if special is not None else [] for special in (facts.bos, facts.eos)
        )
        self._files: dict[str, Any] = {}
        self._digests = {kind: hashlib.sha256() for kind in ((*KINDS, LOSS_MASK) if masked else KINDS)}
        self._documents = self._tokens = self._bytes = 0

    def write(self, documents: Sequence[_Document]) -> None:
        """Append documents."""
        if not documents:
            return
        parts: list[NDArray[Any]] = []
        for document in documents:
            parts += [*self._before, document.ids, *self._after]
        special = len(self._before) + len(self._after)
        lengths = np.array([len(document.ids) + special for document in documents], np.int64)
        self._append("tokens", np.concatenate(parts, dtype=self._dtype, casting="same_kind"))
        self._append("ends", (self._tokens + np.cumsum(lengths)).astype("<u8"))
        if LOSS_MASK in self._digests:
            self._append(LOSS_MASK, np.concatenate([self._mask_of(document) for document in documents]))
        self._documents += len(documents)
        self._tokens += int(lengths.sum())
        self._bytes += sum(document.size for document in documents)

    def close(self) -> Shard | None:
        """Close the files, which are on the disk when this returns. Return None for no documents."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        digests = {kind: digest.hexdigest() for kind, digest in self._digests.items()}
        return Shard(self._name, self._documents, self._tokens, self._bytes, digests) if self._documents else None

    def _mask_of(self, document: _Document) -> NDArray[np.uint8]:
        """Return the mask of a document with its bos, which is no target, and its eos, which the model has to learn."""
        assert document.loss_mask is not None
        before, after = np.zeros(len(self._before), np.uint8), np.ones(len(self._after), np.uint8)
        return np.concatenate([before, document.loss_mask, after])

    def _append(self, kind: str, values: NDArray[Any]) -> None:
        if kind not in self._files:
            self._files[kind] = (self._folder / f"{self._split}.{kind}").open("wb")
        self._files[kind].write(values.data)
        self._digests[kind].update(values.data)
