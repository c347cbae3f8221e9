"""One unit of work: its records are read, tokenised and written as one shard per split; then a record says that it is done.

A kill at any moment leaves temporary files, which are removed when all units are done, or shards without a record, which are
written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.format.manifest import KINDS, LOSS_MASK, Shard, TokenizerFacts, replace_file, shard_file
from slurmtrain.data.format.tokenizers import Ids, Tokenizer
from slurmtrain.data.prepare.chat_template import ChatTemplate, RenderedText
from slurmtrain.data.prepare.conversation import BadRecord, Conversation
from slurmtrain.data.prepare.reading import records_of
from slurmtrain.data.prepare.unit_plan import PreparePlan, Settings, Unit
from slurmtrain.system.files import fsync_directory

BATCH = 1 << 20  # characters that are tokenised at a time
READERS = 8  # threads that read records, and how many they take at a time
STRETCH = 64
SPLITS = ("train", "valid")


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
        plan: digest of the plan that the unit belongs to.
        pieces: counts of each piece of the unit.
        shards: shards by split, without splits that got no documents.
    """

    plan: str
    pieces: list[PieceCounts]
    shards: dict[str, Shard]


def read_record(plan: PreparePlan, unit: Unit) -> UnitRecord | None:
    """Return the record of a unit that is done.

    Returns:
        None when there is no record, it belongs to another plan, or one of its shards' files is missing or of another
            size.
    """
    try:
        record = msgspec.json.decode(_record_file(plan, unit).read_bytes(), type=UnitRecord)
        for split, shard in record.shards.items():
            for kind, size in shard.file_sizes(plan.settings.facts.dtype).items():
                if shard_file(plan.output, split, shard.name, kind).stat().st_size != size:
                    return None
    except (FileNotFoundError, ValueError):
        return None
    return record if record.plan == plan.digest else None


def read_records(plan: PreparePlan, units: Sequence[Unit]) -> Iterator[UnitRecord | None]:
    """Yield the records of many units in their order, read by threads since each takes several round trips to a file server."""
    stretches = [units[begin : begin + STRETCH] for begin in range(0, len(units), STRETCH)]
    with ThreadPoolExecutor(READERS) as pool:
        for records in pool.map(lambda stretch: [read_record(plan, unit) for unit in stretch], stretches):
            yield from records


def prepare_unit(plan: PreparePlan, unit: Unit, tokenizer: Tokenizer) -> UnitRecord:
    """Prepare a unit, whether it was done before or not.

    Raises:
        ConfigError: an input has changed, or is not of its format.
        OSError: an input cannot be read, or the output cannot be written.
    """
    temporary = _fresh_folder(plan, unit)
    try:
        settings = plan.settings
        masked = settings.chat is not None
        writers = {split: _ShardWriter(temporary, split, unit.name, settings.facts, masked=masked) for split in SPLITS}
        pieces = [PieceCounts() for _ in unit.pieces]
        for batch in _batches(unit, pieces, settings):
            for split, chosen in _by_split(_tokenise(batch, tokenizer), settings.valid_fraction).items():
                writers[split].write(chosen)
        shards = {split: shard for split, writer in writers.items() if (shard := writer.close(plan.output)) is not None}
        record = UnitRecord(plan.digest, pieces, shards)
        replace_file(_record_file(plan, unit), json.dumps(asdict(record)).encode())
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return record


def _record_file(plan: PreparePlan, unit: Unit) -> Path:
    return plan.units_folder / f"{unit.name}.json"


def _fresh_folder(plan: PreparePlan, unit: Unit) -> Path:
    """Make a folder for temporary files, named after this process, since another attempt or user may be doing the same unit."""
    folder = plan.begun_folder / f"{unit.name}.{os.uname().nodename}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that had our pid before us
    folder.mkdir(parents=True)
    return folder


@dataclass(frozen=True)
class _Document:
    """The UTF-8 bytes of a text, its token ids, and of a conversation 1 for each token that counts as a target, else 0."""

    text: bytes
    ids: Ids
    loss_mask: NDArray[np.uint8] | None = None


Batch = list[tuple[RenderedText, PieceCounts]]


def _batches(unit: Unit, pieces: Sequence[PieceCounts], settings: Settings) -> Iterator[Batch]:
    """Yield the unit's texts in batches, each with the counts of its piece, which are updated on the way."""
    batch: Batch = []
    length = 0
    for piece, counts in zip(unit.pieces, pieces, strict=True):
        for number, record in records_of(piece, settings.text_field if settings.chat is None else None):
            found = _rendered(record, settings.chat)
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


def _rendered(
    record: str | Conversation | BadRecord | None, template: ChatTemplate | None
) -> RenderedText | BadRecord | None:
    if isinstance(record, Conversation):
        assert template is not None
        return template.render(record)
    return RenderedText(record, None) if isinstance(record, str) else record


def _tokenise(batch: Batch, tokenizer: Tokenizer) -> list[_Document]:
    """Return the documents of a batch, without those that have no tokens."""
    texts, spans = [each.text for each, _ in batch], [each.spans for each, _ in batch if each.spans is not None]
    encoded: Iterable[tuple[Ids, NDArray[np.uint8] | None]]
    encoded = tokenizer.encode_chats(texts, spans) if spans else ((ids, None) for ids in tokenizer.encode_batch(texts))
    documents = []
    for (each, counts), (ids, loss_mask) in zip(batch, encoded, strict=True):
        if len(ids):
            documents.append(_Document(each.text.encode(), ids, loss_mask))
        else:
            counts.empty += 1
    return documents


def _by_split(documents: list[_Document], valid_fraction: float) -> dict[str, list[_Document]]:
    """Return the documents of each split, chosen by a digest of the text, so that equal texts are always in the same split."""
    if not valid_fraction:
        return {"train": documents}
    limit = int(valid_fraction * 2**64)
    held_out = [
        int.from_bytes(hashlib.blake2b(document.text, digest_size=8).digest(), "little") < limit
        for document in documents
    ]
    return {
        split: [document for document, out in zip(documents, held_out, strict=True) if out == (split == "valid")]
        for split in SPLITS
    }


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
        sizes = np.array([len(document.text) for document in documents], "<u4")
        self._append("tokens", np.concatenate(parts, dtype=self._dtype, casting="same_kind"))
        self._append("ends", (self._tokens + np.cumsum(lengths)).astype("<u8"))
        self._append("bytes", sizes)
        if LOSS_MASK in self._digests:
            self._append(LOSS_MASK, np.concatenate([self._mask_of(document) for document in documents]))
        self._documents += len(documents)
        self._tokens += int(lengths.sum())
        self._bytes += int(sizes.sum(dtype=np.int64))

    def close(self, output: Path) -> Shard | None:
        """Move the files to their place in the data set, where they are on the disk when this returns.

        Return None for no documents.
        """
        if not self._documents:
            return None
        folder = output / self._split
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            fsync_directory(output)
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._temporary(kind).replace(shard_file(output, self._split, self._name, kind))
        fsync_directory(folder)
        digests = {kind: digest.hexdigest() for kind, digest in self._digests.items()}
        return Shard(self._name, self._documents, self._tokens, self._bytes, digests)

    def _mask_of(self, document: _Document) -> NDArray[np.uint8]:
        """Return the mask of a document with its bos, which is no target, and its eos, which the model has to learn."""
        assert document.loss_mask is not None
        before, after = np.zeros(len(self._before), np.uint8), np.ones(len(self._after), np.uint8)
        return np.concatenate([before, document.loss_mask, after])

    def _append(self, kind: str, values: NDArray[Any]) -> None:
        if kind not in self._files:
            self._files[kind] = self._temporary(kind).open("wb")
        self._files[kind].write(values.data)
        self._digests[kind].update(values.data)

    def _temporary(self, kind: str) -> Path:
        return self._folder / f"{self._split}.{kind}"
