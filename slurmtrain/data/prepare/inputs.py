"""The inputs of `prepare`: which files there are, and their records: a text, a conversation, or why it is bad.

A bad record is no error: it is counted, and the end of `prepare` decides what to do about it. What keeps a whole file
from being read is an error, except in a compressed file: where it is truncated or damaged, one bad record is counted
and the file ends; so does what is read together with the damage, a block at most.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slurmtrain.choices import RawFormat
from slurmtrain.data.format.tokenizers import needed
from slurmtrain.data.prepare.conversation import BadRecord, Conversation, conversation_of, kind_of
from slurmtrain.errors import ConfigError

FORMATS = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt", ".md"),
}
PACKINGS = {".gz": "gzip", ".zst": "zstd"}  # as pyarrow calls them


@dataclass(frozen=True)
class InputFile:
    """An input file.

    Attributes:
        name: path relative to the folder that all inputs have in common, with slashes.
        format: one of FORMATS.
        packing: compression of the file: one of PACKINGS, or None.
        size: size of the file in bytes.
        modified: time of the last change in nanoseconds.
    """

    name: str
    path: Path
    format: str
    packing: str | None
    size: int
    modified: int

    @property
    def divisible(self) -> bool:
        """Whether reading may begin in the middle of the file."""
        return self.packing is None and self.format == RawFormat.JSONL


@dataclass(frozen=True)
class InputPiece:
    """A part of an input: the records that begin in its bytes from `start` up to but not including `end`."""

    source: InputFile
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def find_sources(inputs: Sequence[str], format: str, output: Path) -> list[InputFile]:
    """Return the files that `inputs` name, each once, sorted by path; the order of the inputs does not matter.

    Raises:
        ConfigError: an input does not exist or matches nothing, the format of a file is not known, or the output is in
            a folder that is an input.
    """
    paths = sorted({path for given in inputs for path in _files_of(given, output)})
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return [_source(path, root, format) for path in paths]


def _files_of(given: str, output: Path) -> Iterator[Path]:
    matches = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else [given]
    # A file may have a name that reads like a pattern.
    matches = matches or [given] * os.path.exists(given)
    if not matches:
        raise ConfigError(
            f"prepare.inputs: nothing matches {given!r}", hint="is the pattern quoted, and the path correct?"
        )
    found = False
    for match in matches:
        named = Path(os.path.abspath(match))
        if output.is_relative_to(named):
            raise ConfigError(
                f"prepare.output={output} lies in the input {named}",
                hint="files written there would also be read as input",
            )
        for path in _files_in(named):
            found = True
            yield path
    if not found:
        raise ConfigError(f"prepare.inputs: there is no file in {given}")


def _files_in(path: Path) -> Iterator[Path]:
    """Yield a file itself, or all files in and below a folder but hidden ones."""
    if not path.exists():
        raise ConfigError(f"prepare.inputs: there is no {path}")
    if path.is_file():
        yield path
        return

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"prepare.inputs: {error.filename} cannot be read: {error.strerror}") from None

    for folder, folders, files in os.walk(path, followlinks=True, onerror=unreadable):
        folders[:] = [each for each in folders if not each.startswith(".")]
        paths = (Path(folder, each) for each in files if not each.startswith("."))
        yield from filter(Path.is_file, paths)  # a pipe cannot be read again


def _source(path: Path, root: Path, format: str) -> InputFile:
    try:
        facts = path.stat()
    except OSError as error:
        raise ConfigError(f"prepare.inputs: {path} cannot be read: {error.strerror}") from None
    packing = PACKINGS.get(path.suffix)
    if format == RawFormat.AUTO:
        suffix = Path(path.stem).suffix if packing else path.suffix
        known = {suffix: name for name, suffixes in FORMATS.items() for suffix in suffixes}
        if suffix not in known:
            raise ConfigError(
                f"prepare.inputs: it is not known what is in {path}: its suffix is {suffix!r}",
                hint=f"known are {', '.join(known)}; or prepare.format=text (each file is a document), jsonl, parquet",
            )
        format = known[suffix]
    return InputFile(path.relative_to(root).as_posix(), path, format, packing, facts.st_size, facts.st_mtime_ns)


# Their records.

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
    _check_unchanged(piece.source)
    yield from _READERS[piece.source.format](piece, text_field)
    _check_unchanged(piece.source)


def _check_unchanged(source: InputFile) -> None:
    found = os.stat(source.path)
    if (found.st_size, found.st_mtime_ns) != (source.size, source.modified):
        raise ConfigError(
            f"{source.path} was changed while it was being prepared",
            hint="prepare the data set again, with another output",
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
