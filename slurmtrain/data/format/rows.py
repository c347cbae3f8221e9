"""Samples as rows of pieces: where each lies in the token stream, computed or looked up in an index that is made once and kept.

The index of a packing is a file beside the data, `packed/SPLIT-PACKING-SEQ_LEN-FINGERPRINT.idx`: the pieces of all samples
one after another, where each sample's pieces begin and where the last one's end, and the number of samples. It is read in
place, so its size does not matter. It depends on nothing but data and packing, so every process makes the same index. A
file that is not complete is made again.

Packings are pure functions without a seed.

A document of L tokens has L - 1 pairs of an input and its target. A piece is a stretch of such pairs: with `start` p
and `pairs` n, its inputs are the tokens p ... p + n - 1 of the split and its targets p + 1 ... p + n. A sample is one
piece or several. Every pair of every document is in exactly one piece, unless long documents are cut on request.

Best-fit decreasing: documents are taken from long to short, and each goes into the sample with the least room that
still holds it (D. Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974).
Only documents that are longer than a sample are cut, so far fewer tokens are separated from the context that they refer
to than if the stream were cut at regular places (H. Ding et al., "Fewer Truncations Improve Language Modeling", 2024,
arXiv:2404.10830).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.format.reading import DataFile, TokenStream
from slurmtrain.errors import ConfigError

log = logging.getLogger(__name__)

PIECE = np.dtype([("start", "<u8"), ("pairs", "<u4")])  # 12 bytes, the form in which they are stored

Pieces = NDArray[np.void]  # an array of PIECE

# Packs the documents of a shard: ends uint64 [documents] after a first token -> pieces, and their number in each sample.
Pack = Callable[[NDArray[np.uint64], int], tuple[Pieces, NDArray[np.int64]]]


class Windows:
    """Rows that cut the whole stream at regular places: sample i has the pairs i * S ...

    (i + 1) * S - 1, the last one perhaps fewer.
    """

    def __init__(self, tokens: int, seq_len: int):
        self._pairs, self._seq_len = max(tokens - 1, 0), seq_len

    def __len__(self) -> int:
        return -(-self._pairs // self._seq_len)

    def pieces(self, indices: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        """Return the pieces of samples `indices` [B], in their order, and the number of pieces of each sample, int64 [B]."""
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
            self._pieces, self._rows = map(int, np.frombuffer(file.read(), "<u8"))
        self._bounds = self._pieces * PIECE.itemsize
        if size != self._bounds + (self._rows + 2) * 8:
            raise ValueError
        self._file = DataFile(path, size)

    def __len__(self) -> int:
        return self._rows

    def pieces(self, indices: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        """Return the pieces of samples `indices`, as `Windows.pieces`.

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


Rows = Windows | RowIndex


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


def best_fit_rows(ends: NDArray[np.uint64], first_token: int, seq_len: int) -> tuple[Pieces, NDArray[np.int64]]:
    """Pack consecutive documents into samples of up to `seq_len` pairs.

    Args:
        ends: where each document ends, in tokens after `first_token`; uint64 [documents], not decreasing.
        first_token: position in the split at which the first document begins.
        seq_len: S.

    Returns:
        Pieces [P], sample after sample and in each sample by position; and the number of pieces of each sample, int64
            [samples]. Samples are in the order of their first tokens.
    """
    starts, pairs = _split_at(seq_len, *_whole_documents(ends, first_token))
    bins = best_fit(pairs, seq_len)
    # The first piece of a bin has its smallest position, since pieces come by position.
    _, firsts = np.unique(bins, return_index=True)
    place = np.empty(len(firsts), dtype=np.int64)
    place[np.argsort(firsts)] = np.arange(len(firsts))
    sample = place[bins]
    order = np.argsort(sample, kind="stable")
    return _pieces(starts[order], pairs[order]), np.bincount(sample, minlength=len(firsts))


def document_rows(ends: NDArray[np.uint64], first_token: int, seq_len: int) -> tuple[Pieces, NDArray[np.int64]]:
    """Make one sample of each document, of its first `seq_len` pairs; documents without a pair are left out.

    Arguments and result are as for `best_fit_rows`.
    """
    starts, pairs = _whole_documents(ends, first_token)
    return _pieces(starts, np.minimum(pairs, seq_len)), np.ones(len(starts), dtype=np.int64)


def best_fit(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the bin of each item by best-fit decreasing, int64 [items]; bins are numbered from 0.

    Items of one size are placed together: the bins with the least room that holds one of them take as many as fit. The
    result is the same as placing one item after another, since a bin that still holds a second item is then the
    tightest of all.

    Args:
        sizes: size of each item, from 1 to `capacity`; int64 [items].
        capacity: size of a bin.
    """
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    bin_of = np.empty(len(sizes), dtype=np.int64)
    open_bins: dict[int, list[NDArray[np.int64]]] = {}  # bins by the room that they have left, more than 0
    rooms = 0  # the same rooms as a set of bits: the least of at least s is the lowest bit of rooms >> s
    bins = begin = 0
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = begin + count
        while begin < end:
            if fitting := rooms >> size:
                room = size + (fitting & -fitting).bit_length() - 1
                each = min(room // size, end - begin)
                held = open_bins[room]
                chosen, left = np.split(held.pop(), [(end - begin) // each])
                if len(left):
                    held.append(left)
                elif not held:
                    rooms ^= 1 << room
            else:
                room, each = capacity, min(capacity // size, end - begin)
                chosen = np.arange(bins, bins + (end - begin) // each)
                bins += len(chosen)
            placed = each * len(chosen)
            bin_of[order[begin : begin + placed]] = np.repeat(chosen, each)
            begin += placed
            if room := room - each * size:
                open_bins.setdefault(room, []).append(chosen)
                rooms |= 1 << room
    return bin_of


def _whole_documents(ends: NDArray[np.uint64], first_token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return start and number of pairs of each document that has a pair, however long."""
    begins = np.zeros(len(ends), dtype=np.int64)
    begins[1:] = ends[:-1]
    pairs = ends.astype(np.int64) - begins - 1
    kept = pairs > 0
    return begins[kept] + first_token, pairs[kept]


def _split_at(
    seq_len: int, starts: NDArray[np.int64], pairs: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return start and number of pairs of pieces of at most `seq_len` pairs that together hold the same pairs."""
    parts = -(-pairs // seq_len)
    skipped = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * seq_len  # within the document
    return np.repeat(starts, parts) + skipped, np.minimum(np.repeat(pairs, parts) - skipped, seq_len)


def _pieces(starts: NDArray[np.int64], pairs: NDArray[np.int64]) -> Pieces:
    pieces = np.empty(len(starts), dtype=PIECE)
    pieces["start"], pieces["pairs"] = starts, pairs
    return pieces
