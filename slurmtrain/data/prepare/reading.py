"""Reading: a piece of an input -> its records, one after another: a document's text, a conversation, or why it is bad.

A bad record is no error: it is counted, and the end of `prepare` decides what to do about it. What keeps a whole file
from being read is an error, except in a compressed file: where it is truncated or damaged, one bad record is counted
and the file ends.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
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


def records_of(piece: InputPiece, text_field: str | None) -> Iterator[Record]:
    """Yield all records of a piece.

    Args:
        text_field: the field that holds a document; None: records are conversations.

    Raises:
        ConfigError: the file has changed since the plan was made, or it is not of its format.
        OSError: the file cannot be read, or no longer exists.
    """
    before = _facts(piece.source)
    if before != (piece.source.size, piece.source.modified):
        raise _changed(piece.source)
    yield from _READERS[piece.source.format](piece, text_field)
    if _facts(piece.source) != before:
        raise _changed(piece.source)


def _facts(source: InputFile) -> tuple[int, int]:
    facts = os.stat(source.path)
    return facts.st_size, facts.st_mtime_ns


def _changed(source: InputFile) -> ConfigError:
    return ConfigError(
        f"{source.path} was changed while it was being prepared", hint="prepare the data set again, with another output"
    )


def _jsonl(piece: InputPiece, text_field: str | None) -> Iterator[Record]:
    number = 0
    try:
        for number, line in enumerate(_lines(piece), start=1):
            yield number, _document(line, text_field) if isinstance(line, bytes) else line
    except _DAMAGE as error:
        yield number + 1, _torn(piece, error)


def _lines(piece: InputPiece) -> Iterator[bytes | BadRecord]:
    """Yield the lines that begin in the piece."""
    with _opened(piece.source) as file:
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


def _text(piece: InputPiece, text_field: str | None) -> Iterator[Record]:
    try:
        with _opened(piece.source) as file:
            yield 1, file.read().decode("utf-8-sig")
    except _DAMAGE as error:
        yield 1, _torn(piece, error)
    except UnicodeDecodeError as error:
        yield 1, BadRecord(f"invalid UTF-8 ({error.reason} at byte {error.start})")


# What is raised for a compressed file that ends too early (the first), or is damaged.
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)


def _torn(piece: InputPiece, error: Exception) -> BadRecord:
    name = {"gz": "gzip", "zst": "zstd"}[piece.source.packing or ""]
    return BadRecord(f"the {name} file is " + ("truncated" if isinstance(error, EOFError) else f"damaged: {error}"))


def _opened(source: InputFile) -> BinaryIO:
    if source.packing == "gz":
        return gzip.open(source.path)  # type: ignore[return-value]
    return io.BufferedReader(_Zstd(source.path) if source.packing else io.FileIO(source.path), BLOCK)


class _Zstd(io.RawIOBase):
    """The content of a .zst file, which may be several frames, end to end.

    The package's own reader is not used since it accepts a truncated file.
    """

    def __init__(self, path: Path):
        zstandard = needed("zstandard", "a .zst file")
        self._file, self._error = io.FileIO(path), zstandard.ZstdError
        # The largest window that there is: of `zstd --long=31`.
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None  # begun, and not yet at its end
        self._packed, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._packed = self._packed or self._file.read(BLOCK)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError
                return 0
            frame = self._frame or self._unpacker.decompressobj()
            try:
                self._content = memoryview(frame.decompress(self._packed))
            except self._error as error:
                raise zlib.error(str(error)) from None
            self._packed, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _parquet(piece: InputPiece, text_field: str | None) -> Iterator[Record]:
    pyarrow, parquet = needed("pyarrow", "Parquet"), needed("pyarrow.parquet", "Parquet")
    path, number = piece.source.path, 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = _columns(path, file.schema_arrow, text_field)
            groups = _row_groups(file.metadata, piece)
            for batch in file.iter_batches(ROWS, row_groups=groups, columns=columns, use_threads=False):
                yield from _rows_of(batch, number, text_field)
                number += len(batch)
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


def _rows_of(batch: Any, before: int, name: str | None) -> Iterator[Record]:
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


_READERS: dict[str, Callable[[InputPiece, str | None], Iterator[Record]]] = {
    "jsonl": _jsonl,
    "text": _text,
    "parquet": _parquet,
}
