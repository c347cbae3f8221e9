"""Samples as rows of pieces: where each lies in the token stream, computed or looked up in an index that is made once and kept.

The index of a packing is a file beside the data, `packed/SPLIT-PACKING-SEQ_LEN-FINGERPRINT.idx`: a line of JSON, the
pieces of all samples one after another, and where each sample's pieces begin. It is read in place, so its size does not
matter. It depends on nothing but data and packing, so every process makes the same index. A file that is not complete
is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.format.packing import PIECE, Pieces
from slurmtrain.data.format.reading import DataFile
from slurmtrain.data.format.stream import TokenStream
from slurmtrain.errors import ConfigError

log = logging.getLogger(__name__)

FORMAT = 1
_HEADER_BYTES = 512
# Packs the documents of a shard: ends uint64 [documents] after a first token -> pieces, and their number in each sample.
Pack = Callable[[NDArray[np.uint64], int], tuple[Pieces, NDArray[np.int64]]]


class Rows(Protocol):
    """The pieces that make up each sample of a data set.

    Attributes:
        pairs: number of pairs of an input and its target in all samples together.
    """

    pairs: int

    def __len__(self) -> int: ...

    def pieces(self, indices: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        """Return the pieces of samples `indices` [B], and the number of pieces of each sample, int64 [B].

        The pieces are in the order of the samples.
        """
        ...


class Windows:
    """Rows that cut the whole stream at regular places: sample i has the pairs i * S ...

    (i + 1) * S - 1, the last one perhaps fewer.
    """

    def __init__(self, tokens: int, seq_len: int):
        self.pairs, self._seq_len = max(tokens - 1, 0), seq_len

    def __len__(self) -> int:
        return -(-self.pairs // self._seq_len)

    def pieces(self, indices: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        pieces = np.empty(len(indices), dtype=PIECE)
        pieces["start"] = indices * self._seq_len
        pieces["pairs"] = np.minimum(self.pairs - indices * self._seq_len, self._seq_len)
        return pieces, np.ones(len(indices), dtype=np.int64)


@dataclass(frozen=True)
class _Header:
    """The first line of an index; `made_from` is the digest of data and packing."""

    format: int
    made_from: str
    rows: int
    pieces: int
    pairs: int

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(_HEADER_BYTES - 1) + b"\n"

    @property
    def file_size(self) -> int:
        return _HEADER_BYTES + self.pieces * PIECE.itemsize + (self.rows + 1) * 8


class RowIndex:
    """The rows of a packing, read from its index."""

    def __init__(self, file: DataFile, header: _Header):
        self._file, self._header, self.pairs = file, header, header.pairs

    def __len__(self) -> int:
        return self._header.rows

    def pieces(self, indices: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        """Return the pieces of samples `indices`, as `Rows.pieces`.

        Raises:
            ConfigError: the index is damaged; also the errors that `DataFile.read_into` raises.
        """
        bounds = self._bounds(indices)
        counts = bounds[:, 1].astype(np.int64) - bounds[:, 0].astype(np.int64)
        if counts.min(initial=1) < 1 or bounds.max(initial=0) > self._header.pieces:
            raise damaged(str(self._file.path))
        pieces = np.empty(counts.sum(), dtype=PIECE)
        ends = np.cumsum(counts)
        for first, begin, end in zip(bounds[:, 0].tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
            self._file.read_into(pieces[begin:end].view(np.uint8), _HEADER_BYTES + first * PIECE.itemsize)
        return pieces, counts

    def _bounds(self, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return where the pieces of each sample begin and end in the index, uint64 [B, 2]."""
        if self._header.pieces == self._header.rows:  # one each, which need not be looked up
            return np.stack([indices, indices + 1], axis=1).astype("<u8")
        bounds = np.empty((len(indices), 2), dtype="<u8")
        first_bound = _HEADER_BYTES + self._header.pieces * PIECE.itemsize
        for row, index in zip(bounds, indices.tolist(), strict=True):
            self._file.read_into(row, first_bound + index * 8)
        return bounds


def damaged(index: str) -> ConfigError:
    """Return the error for an index that is damaged."""
    return ConfigError(f"{index} is damaged", hint="remove it: it is made anew")


def row_index(stream: TokenStream, name: str, made_from: str, folders: Sequence[Path], pack: Pack) -> RowIndex:
    """Return the index of a packing: the one that is kept, or one made now and kept in the first folder that can be written.

    Of several processes that need it at the same time, one makes it and the others wait.

    Args:
        stream: the tokens of the split.
        name: name of the packing, a part of the file name.
        made_from: digest of everything that the index depends on.
        folders: where the index may be kept, the best one first.
        pack: packs the documents of one shard.

    Raises:
        ConfigError, DataError: the data cannot be read, no folder can be written, or `pack` refuses it.
    """
    paths = [folder / f"{stream.name}-{name}-{made_from[:16]}.idx" for folder in folders]
    for path in paths:
        if kept := _open_index(path, made_from):
            return kept
    for path in paths:
        try:
            with _exclusive_lock(path.parent):
                return _open_index(path, made_from) or _create_index(path, stream, made_from, pack)
        except OSError as error:
            log.warning("%s cannot keep the packing of %s: %s", path.parent, stream.name, error.strerror)
    raise ConfigError(
        f"no folder can keep the packing of {stream.name}: {', '.join(str(path.parent) for path in paths)}",
        hint="let one of them be written, or set XDG_CACHE_HOME to a folder that can be",
    )


def _open_index(path: Path, made_from: str) -> RowIndex | None:
    try:
        with open(path, "rb") as file:
            first_line = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    try:
        header = _Header(**json.loads(first_line))
        if (header.format, header.made_from, header.file_size) != (FORMAT, made_from, size):
            raise ValueError
    except (ValueError, TypeError):
        log.warning("%s is damaged and is made anew", path)
        return None
    return RowIndex(DataFile(path, size), header)


def _create_index(path: Path, stream: TokenStream, made_from: str, pack: Pack) -> RowIndex:
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            header = _write(file, stream, made_from, pack)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return RowIndex(DataFile(path, header.file_size), header)


def _write(file: BinaryIO, stream: TokenStream, made_from: str, pack: Pack) -> _Header:
    log.info("packing the %s documents of %s", f"{stream.split.documents:,}", stream.name)
    file.write(bytes(_HEADER_BYTES))
    pieces = pairs = 0
    counts = [np.zeros(1, dtype=np.int64)]
    for first_token, ends in stream.shard_ends():
        packed, count = pack(ends, first_token)
        pieces, pairs = pieces + len(packed), pairs + int(packed["pairs"].sum(dtype=np.int64))
        counts.append(count)
        file.write(packed.data)
    bounds = np.cumsum(np.concatenate(counts)).astype("<u8")
    file.write(bounds.data)
    header = _Header(FORMAT, made_from, len(bounds) - 1, pieces, pairs)
    file.seek(0)
    file.write(header.to_bytes())
    return header


@contextlib.contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder`, which is created if missing; the lock of a process that dies is released."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # A file system without locks: several make the same file, the last one stays.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
