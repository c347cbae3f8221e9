"""Reading: a piece of an input -> its records, one after another: a document's text, a conversation, or why it is bad.

A bad record is no error: it is counted, and the end of `prepare` decides what to do about it. What keeps a whole file
from being read is an error, except in a compressed file: where it is truncated or damaged, one bad record is counted
and the file ends.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from slurmtrain.data.format.tokenizers import needed
from slurmtrain.data.prepare.conversation import BadRecord, Conversation, conversation_of, kind_of
from slurmtrain.data.prepare.sources import InputFile
from slurmtrain.data.prepare.unit_plan import InputPiece
from slurmtrain.errors import ConfigError

BLOCK = 1 << 20
LONGEST_LINE = 1 << 30  # bytes; whole files of one line, say a JSON array, need not fit into memory
ROWS = 1024  # number of rows of a table that are read in one go


# A record's number in its piece, from 1 on, and its text or conversation; None for a blank line, which is no record.
Record = tuple[int, str | Conversation | BadRecord | None]


@dataclass
class Reading:
    """A piece of an input while it is being read.

    Attributes:
        text_field: the field that holds a document; None: records are conversations.
        done: bytes of the piece read so far, for the progress.
    """

    piece: InputPiece
    text_field: str | None
    done: int = field(default=0, init=False)

    def records(self) -> Iterator[Record]:
        """Yield all records of the piece.

        Raises:
            ConfigError: the file has changed since the plan was made, or it is not of its format.
            OSError: the file cannot be read, or no longer exists.
        """
        source = self.piece.source
        before = _facts(source)
        if before[0] != source.size or before[1] != source.modified:
            raise _changed(source)
        yield from _READERS[source.format](self)
        if _facts(source) != before:
            raise _changed(source)
        self.done = self.piece.size


def _facts(source: InputFile) -> tuple[int, int]:
    facts = os.stat(source.path)
    return facts.st_size, facts.st_mtime_ns


def _changed(source: InputFile) -> ConfigError:
    return ConfigError(
        f"{source.path} was changed while it was being prepared", hint="prepare the data set again, with another output"
    )


def _jsonl(reading: Reading) -> Iterator[Record]:
    number = 0
    try:
        for number, line in enumerate(_lines(reading), start=1):
            yield number, _document(line, reading.text_field) if isinstance(line, bytes) else line
    except _TornError as torn:
        yield number + 1, BadRecord(str(torn))


def _lines(reading: Reading) -> Iterator[bytes | BadRecord]:
    """Yield the lines that begin in the piece."""
    piece = reading.piece
    with _opened(reading) as file:
        position = piece.start
        if piece.start:
            file.seek(piece.start - 1)
            rest = file.readline(piece.size)  # no more: of a long line, each of its pieces would read all that follows
            if not rest.endswith(b"\n"):
                return
            position += len(rest) - 1
        while piece.source.packing or position < piece.end:
            line, size = _next_line(file)
            if not size:
                break
            position += size
            if not piece.source.packing:
                reading.done = position - piece.start
            yield line


def _next_line(file: BinaryIO) -> tuple[bytes | BadRecord, int]:
    """Return the next line and its size in bytes; the size is 0 at the end of the file."""
    line = part = file.readline(LONGEST_LINE)
    size = len(line)
    while len(part) == LONGEST_LINE and not part.endswith(b"\n"):
        part = file.readline(LONGEST_LINE)
        size += len(part)
    if size > LONGEST_LINE:
        return BadRecord(f"longer than {LONGEST_LINE:,} bytes; a JSON array is no JSON lines"), size
    return line, size


def _document(line: bytes, text_field: str | None) -> str | Conversation | BadRecord | None:
    try:
        text = line.decode()
        record = json.loads(text)
    except UnicodeDecodeError as error:
        return BadRecord(f"invalid UTF-8 ({error.reason})")
    except json.JSONDecodeError as error:
        if not line.strip():
            return None
        if line.startswith(codecs.BOM_UTF8):  # in front of a file's first line
            return _document(line.removeprefix(codecs.BOM_UTF8), text_field)
        return BadRecord(f"no JSON ({error.msg} at character {error.pos + 1})")
    except (ValueError, RecursionError) as error:  # a number too long, a list too deep
        return BadRecord(f"no JSON ({error})")
    if not isinstance(record, dict):
        return BadRecord(f"no JSON object, but {type(record).__name__}")
    if text_field is None:
        return conversation_of(record)
    if text_field not in record:
        return BadRecord(f"no field {text_field!r}")
    value = record[text_field]
    if not isinstance(value, str):
        return BadRecord(f"{text_field!r} is no string, but {kind_of(value)}")
    return _checked(value)


def _checked(text: str) -> str | BadRecord:
    """Return `text`, or a bad record if it holds half of a surrogate pair.

    JSON can spell such a half, but it is no Unicode text.
    """
    return text if text.isascii() or _encodable(text) else BadRecord("invalid Unicode (half of a surrogate pair)")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(reading: Reading) -> Iterator[Record]:
    try:
        with _opened(reading) as file:
            yield 1, file.read().decode("utf-8-sig")
    except _TornError as torn:
        yield 1, BadRecord(str(torn))
    except UnicodeDecodeError as error:
        yield 1, BadRecord(f"invalid UTF-8 ({error.reason} at byte {error.start})")


class _TornError(Exception):
    """A compressed file ends too early, or is damaged."""


def _opened(reading: Reading) -> BinaryIO:
    file, packing = io.FileIO(reading.piece.source.path), reading.piece.source.packing
    return io.BufferedReader(_Unpacked(file, _UNPACKERS[packing](), reading) if packing else file, BLOCK)


@dataclass(frozen=True)
class _Unpacker:
    """The decompressor of one frame of a file; gzip and zstd files may be several frames, end to end, and each needs a new one.

    Attributes:
        name: name of the format, for messages.
        begin: makes a decompressor.
        error: exception that the decompressor raises for damaged content.
        padding: byte that may follow a frame without beginning another one.
    """

    name: str
    begin: Callable[[], Any]
    error: type[Exception]
    padding: bytes = b""


def _gzip() -> _Unpacker:
    return _Unpacker("gzip", lambda: zlib.decompressobj(wbits=31), zlib.error, padding=b"\0")


def _zstd() -> _Unpacker:
    zstandard = needed("zstandard", "a .zst file")
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # the largest there is: of `zstd --long=31`
    return _Unpacker("zstd", unpacker.decompressobj, zstandard.ZstdError)


_UNPACKERS = {"gz": _gzip, "zst": _zstd}


class _Unpacked(io.RawIOBase):
    """The content of a compressed file as a stream.

    The packages' own readers are not used since they accept a truncated zstd file.
    """

    def __init__(self, file: io.FileIO, unpacker: _Unpacker, reading: Reading):
        self._file, self._unpacker, self._reading = file, unpacker, reading
        self._frame: Any = None  # begun, and not yet at its end
        self._after_one = False  # there was a frame before
        self._packed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            if not self._packed:
                self._packed = self._file.read(BLOCK)
                self._reading.done = self._file.tell()
            if not self._packed:
                if self._frame is not None:
                    raise _TornError(f"the {self._unpacker.name} file is truncated")
                return 0
            self._content = memoryview(self._unpack())
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _unpack(self) -> bytes:
        if self._frame is None and self._after_one:
            self._packed = self._packed.lstrip(self._unpacker.padding)
            if not self._packed:
                return b""
        frame = self._frame or self._unpacker.begin()
        try:
            content: bytes = frame.decompress(self._packed)
        except self._unpacker.error as error:
            raise _TornError(f"the {self._unpacker.name} file is damaged: {error}") from None
        self._packed = frame.unused_data if frame.eof else b""
        self._frame, self._after_one = None if frame.eof else frame, True
        return content

    def close(self) -> None:
        self._file.close()
        super().close()


def _parquet(reading: Reading) -> Iterator[Record]:
    pyarrow, parquet = needed("pyarrow", "Parquet"), needed("pyarrow.parquet", "Parquet")
    piece, path = reading.piece, reading.piece.source.path
    try:
        with parquet.ParquetFile(path) as file:
            columns = _columns(path, file.schema_arrow, reading.text_field)
            groups = _row_groups(file.metadata, piece)
            batches = file.iter_batches(ROWS, row_groups=groups, columns=columns, use_threads=False)
            total, number = sum(file.metadata.row_group(group).num_rows for group in groups), 0
            for batch in batches:
                yield from _records_of(batch, number, reading.text_field)
                number += len(batch)
                reading.done = piece.size * number // total
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # one without a number is pyarrow's
            raise
        raise ConfigError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from None


def _row_groups(metadata: Any, piece: InputPiece) -> list[int]:
    """Return the row groups that belong to the piece, by each one's share of all bytes.

    The offsets in the footer are not reliable.
    """
    sizes = [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
    total, before, found = max(1, sum(sizes)), 0, []
    for index, size in enumerate(sizes):
        if piece.start <= min(piece.source.size * before // total, piece.source.size - 1) < piece.end:
            found.append(index)
        before += size
    return found


def _columns(path: Path, schema: Any, name: str | None) -> list[str] | None:
    """Return the columns that are read; None for all of them, which is for conversations."""
    if name is None:
        return None
    if name not in schema.names:
        raise ConfigError(
            f"{path} has no column {name!r}, but {', '.join(schema.names)}", hint="prepare.text_field names it"
        )
    kind = schema.field(name).type
    values = getattr(kind, "value_type", None) if str(kind).startswith("dictionary") else kind
    if str(values) not in ("string", "large_string"):
        raise ConfigError(f"{path}: the column {name!r} is {kind}, no text", hint="prepare.text_field names another")
    return [name]


def _records_of(batch: Any, before: int, name: str | None) -> Iterator[Record]:
    if name is not None:
        yield from _rows(batch.column(name), before, name)
        return
    for index in range(len(batch)):
        try:
            (row,) = batch.slice(index, 1).to_pylist()
            yield before + index + 1, conversation_of(_without_nulls(row))
        except UnicodeDecodeError as error:
            yield before + index + 1, BadRecord(f"invalid UTF-8 ({error.reason})")


def _without_nulls(value: Any) -> Any:
    """Return a row without its null fields, at any depth: a table gives each call of a tool the arguments of all others."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _rows(column: Any, before: int, name: str) -> Iterator[Record]:
    if str(column.type).startswith("dictionary"):  # texts that come again are stored once, as numbers of a table
        column = column.dictionary_decode()
    # Read as bytes: otherwise one row that is no UTF-8 would make all of them unreadable.
    rows = column.view("large_binary" if str(column.type) == "large_string" else "binary").to_pylist()
    for number, row in enumerate(rows, start=before + 1):
        try:
            yield number, BadRecord(f"{name!r} is no string, but null") if row is None else row.decode()
        except UnicodeDecodeError as error:
            yield number, BadRecord(f"invalid UTF-8 ({error.reason})")


_READERS: dict[str, Callable[[Reading], Iterator[Record]]] = {
    "jsonl": _jsonl,
    "text": _text,
    "parquet": _parquet,
}
