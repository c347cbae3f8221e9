"""Reading: a piece of an input -> its records, one after another: a document's text, a conversation, or why it is bad.

A bad record is no error: it is counted, and the end of `prepare` decides what to do about it. What keeps a whole file
from being read is an error, except in a compressed file: where it is truncated or damaged, one bad record is counted
and the file ends; so does what is read together with the damage, a block at most.
"""

from __future__ import annotations

import codecs
import io
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from slurmtrain.data.format.tokenizers import needed
from slurmtrain.data.prepare.conversation import BadRecord, Conversation, conversation_of, kind_of
from slurmtrain.data.prepare.sources import InputFile
from slurmtrain.data.prepare.unit_plan import InputPiece
from slurmtrain.errors import ConfigError

BLOCK = 1 << 20
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
            yield number, _of_line(line, text_field)
    except OSError as error:
        yield number + 1, _damaged(piece, error)


def _lines(piece: InputPiece) -> Iterator[bytes]:
    """Yield the lines that begin in the piece."""
    with _opened(piece.source) as file:
        position = piece.start
        if piece.start:
            file.seek(piece.start - 1)
            rest = file.readline(piece.size)  # no more: of a long line, each of its pieces would read all that follows
            if not rest.endswith(b"\n"):
                return
            position += len(rest) - 1
        while (piece.source.packing or position < piece.end) and (line := file.readline()):
            position += len(line)
            yield line


def _of_line(line: bytes, text_field: str | None) -> str | Conversation | BadRecord | None:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRecord(f"invalid UTF-8 ({error.reason})")
    except json.JSONDecodeError as error:
        if not line.strip():
            return None
        if line.startswith(codecs.BOM_UTF8):  # in front of a file's first line
            return _of_line(line.removeprefix(codecs.BOM_UTF8), text_field)
        return BadRecord(f"no JSON ({error.msg} at character {error.pos + 1})")
    except (ValueError, RecursionError) as error:  # a number too long, a list too deep
        return BadRecord(f"no JSON ({error})")
    return _of_record(record, text_field)


def _of_record(record: Any, text_field: str | None) -> str | Conversation | BadRecord:
    if not isinstance(record, dict):
        return BadRecord(f"no JSON object, but {type(record).__name__}")
    if text_field is None:
        return conversation_of(record)
    if text_field not in record:
        return BadRecord(f"no field {text_field!r}")
    value = record[text_field]
    if not isinstance(value, str):
        return BadRecord(f"{text_field!r} is no string, but {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # which JSON can spell
        return BadRecord("invalid Unicode (half of a surrogate pair)")
    return value


def _text(piece: InputPiece, text_field: str | None) -> Iterator[Record]:
    try:
        with _opened(piece.source) as file:
            yield 1, file.read().decode("utf-8-sig")
    except OSError as error:
        yield 1, _damaged(piece, error)
    except UnicodeDecodeError as error:
        yield 1, BadRecord(f"invalid UTF-8 ({error.reason} at byte {error.start})")


def _damaged(piece: InputPiece, error: OSError) -> BadRecord:
    """Return the bad record at the place where a compressed file is truncated or damaged, for which an error has no number."""
    if error.errno is not None:
        raise error
    return BadRecord(f"the {piece.source.packing} file is damaged: {error}")


def _opened(source: InputFile) -> BinaryIO:
    if source.packing is None:
        return open(source.path, "rb", BLOCK)
    stream = needed("pyarrow", "a compressed file").input_stream(str(source.path), compression=source.packing)
    return io.BufferedReader(stream, BLOCK)


def _parquet(piece: InputPiece, text_field: str | None) -> Iterator[Record]:
    pyarrow, parquet = needed("pyarrow", "Parquet"), needed("pyarrow.parquet", "Parquet")
    path = piece.source.path
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field is not None and text_field not in names:
                raise ConfigError(
                    f"{path} has no column {text_field!r}, but {', '.join(names)}", hint="prepare.text_field names it"
                )
            columns = None if text_field is None else [text_field]
            batches = file.iter_batches(ROWS, columns=columns, use_threads=False)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield number, _of_record(row if text_field is not None else _without_nulls(row), text_field)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # one without a number is pyarrow's
            raise
        raise ConfigError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from None


def _without_nulls(value: Any) -> Any:
    """Return a row without its null fields, at any depth: a table gives each call of a tool the arguments of all others."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[InputPiece, str | None], Iterator[Record]]] = {
    "jsonl": _jsonl,
    "text": _text,
    "parquet": _parquet,
}
