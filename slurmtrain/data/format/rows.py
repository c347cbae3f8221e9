"""Samples as rows of pieces: where each lies in the token stream, computed or looked up in an index that is made once and kept.

The index of a packing is a file beside the data, `packed/SPLIT-PACKING-SEQ_LEN-FINGERPRINT.idx`: the pieces of all samples
one after another, where each sample's pieces begin and where the last one's end, and the number of samples. It is read in
place, so its size does not matter. It depends on nothing but data and packing, so every process makes the same index. A
file that is not complete is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.format.packing import PIECE, Pieces
from slurmtrain.data.format.reading import DataFile
from slurmtrain.data.format.stream import TokenStream
from slurmtrain.errors import ConfigError

log = logging.getLogger(__name__)

# Packs the documents of a shard: ends uint64 [documents] after a first token -> pieces, and their number in each sample.
Pack = Callable[[NDArray[np.uint64], int], tuple[Pieces, NDArray[np.int64]]]


class Rows(Protocol):
    """The pieces that make up each sample of a data set."""

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
        self._pairs, self._seq_len = max(tokens - 1, 0), seq_len

    def __len__(self) -> int:
        return -(-self._pairs // self._seq_len)

    def pieces(self, indices: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        pieces = np.empty(len(indices), dtype=PIECE)
        pieces["start"] = indices * self._seq_len
        pieces["pairs"] = np.minimum(self._pairs - indices * self._seq_len, self._seq_len)
        return pieces, np.ones(len(indices), dtype=np.int64)


class RowIndex:
    """The rows of a packing, read from its index.

    Raises:
        OSError: there is none.
        ValueError: it is not complete.
    """

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - 16, 0))
            self._pieces, self._rows = np.frombuffer(file.read(), "<u8").tolist()
        self._bounds = self._pieces * PIECE.itemsize
        if size != self._bounds + (self._rows + 2) * 8:
            raise ValueError
        self._file = DataFile(path, size)

    def __len__(self) -> int:
        return self._rows

    def pieces(self, indices: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        """Return the pieces of samples `indices`, as `Rows.pieces`.

        Raises:
            ConfigError: the index is damaged; also the errors that `DataFile.read_into` raises.
        """
        bounds = np.empty((len(indices), 2), dtype="<u8")
        for row, index in zip(bounds, indices.tolist(), strict=True):
            self._file.read_into(row, self._bounds + index * 8)
        begins, ends = bounds.astype(np.int64).T
        counts = ends - begins
        if counts.min(initial=1) < 1 or ends.max(initial=0) > self._pieces:
            raise damaged(str(self._file.path))
        pieces = np.empty(counts.sum(), dtype=PIECE)
        for of_row, begin in zip(np.split(pieces, np.cumsum(counts)), begins.tolist(), strict=False):
            self._file.read_into(of_row, begin * PIECE.itemsize)
        return pieces, counts


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
    paths = [folder / f"{stream.name}-{name}-{made_from[:32]}.idx" for folder in folders]
    for path in paths:
        if kept := _kept(path):
            return kept
    for path in paths:
        try:
            with _exclusive_lock(path.parent):
                return _kept(path) or _create_index(path, stream, pack)
        except OSError as error:
            log.warning("%s cannot keep the packing of %s: %s", path.parent, stream.name, error.strerror)
    raise ConfigError(
        f"no folder can keep the packing of {stream.name}: {', '.join(str(path.parent) for path in paths)}",
        hint="let one of them be written, or set XDG_CACHE_HOME to a folder that can be",
    )


def _kept(path: Path) -> RowIndex | None:
    try:
        return RowIndex(path)
    except OSError:
        return None
    except ValueError:
        log.warning("%s is damaged and is made anew", path)
        return None


def _create_index(path: Path, stream: TokenStream, pack: Pack) -> RowIndex:
    log.info("packing the %s documents of %s", f"{stream.split.documents:,}", stream.name)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            counts = [np.zeros(1, dtype=np.int64)]
            for first_token, ends in stream.shard_ends():
                packed, count = pack(ends, first_token)
                counts.append(count)
                file.write(packed.data)
            bounds = np.cumsum(np.concatenate(counts))
            file.write(np.append(bounds, len(bounds) - 1).astype("<u8").data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return RowIndex(path)


@contextlib.contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder`, which is created if missing; the lock of a process that dies is released."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        # A file system without locks: several make the same file, the last one stays.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
