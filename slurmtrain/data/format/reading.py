"""The tokens of a split of prepared data, end to end over all its shards, and where its documents end.

They are never held in memory: a position is found by a binary search over the shards, and read in place, by any number of
processes and threads. Every error is reported by one sentence.

Files are read by preadv and never by mmap, where a file that has been truncated or a disk that fails ends the process
by SIGBUS, without a message. preadv takes the offset as an argument, so forked workers share descriptors without harm.
Only the few files used last are kept open.

After an error that may pass (an I/O error, a file handle that the file server has forgotten), the file is opened again
and the read is repeated, as `patience.STEP` has it.
"""

from __future__ import annotations

import bisect
import errno
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.format.manifest import Manifest, shard_file
from slurmtrain.errors import ConfigError, SlurmtrainError
from slurmtrain.system import patience

log = logging.getLogger(__name__)

OPEN_FILES = 64
_FINAL = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP)


class DataError(SlurmtrainError):
    """Data cannot be read or written now: a disk is full or fails, a file has vanished. A retry may help."""


class DataFile:
    """A file whose size is known. It is opened when it is first read; the object itself costs next to nothing.

    Args:
        path: the path of the file.
        size: the size in bytes that the file must have.
    """

    def __init__(self, path: Path, size: int):
        self.path, self.size = path, size

    def read_into(self, array: NDArray[Any], offset: int) -> None:
        """Fill `array` (contiguous) with the bytes from `offset` on.

        Raises:
            ConfigError: the file does not exist, is not readable, or is not of its size.
            DataError: the file cannot be read at the moment.
        """
        rest = array.view(np.uint8)
        while len(rest):  # on some file systems a read may bring less than there is
            count = self._read(rest, offset)
            if not count:
                raise self.wrong_size(offset)
            rest, offset = rest[count:], offset + count

    def check_size(self) -> None:
        """Check the file's size without opening it; raise the errors that `read_into` raises."""
        found = self._patiently(lambda: os.stat(self.path).st_size)
        if found != self.size:
            raise self.wrong_size(found)

    def _read(self, array: NDArray[np.uint8], offset: int) -> int:
        def read() -> int:
            descriptor = _opened(self)  # held, or another thread's reading might close it now
            return os.preadv(descriptor.number, [array.data], offset)

        try:
            return read()
        except OSError:
            return self._patiently(read)

    def _patiently(self, act: Callable[[], int]) -> int:
        """Return what `act` returns; call it again after an error that may pass."""

        def told(error: OSError) -> None:
            _opened.cache_clear()  # the next attempt opens the file anew
            log.warning("%s cannot be read: %s; it is tried again", self.path, error.strerror)

        _opened.cache_clear()
        try:
            return patience.patiently(act, patience.STEP, told=told)
        except OSError as error:
            message = f"{self.path} cannot be read: {error.strerror}"
            if error.errno in _FINAL:
                raise ConfigError(message, hint="is the data set complete, and there on every node?") from None
            tries = f", also {sum(patience.STEP.pauses_s):.0f} s later" if patience.may_pass(error) else ""
            hint = "the file system is at fault; the run goes on from its last checkpoint"
            raise DataError(message + tries, hint=hint) from None

    def wrong_size(self, found: int) -> ConfigError:
        """Return the error for a file that has `found` bytes."""
        return ConfigError(
            f"{self.path} has {found:,} bytes, but {self.size:,} were written",
            hint="it was cut short or is of another data set: copy or prepare the data set again",
        )


class _Descriptor:
    """An open file.

    It is closed when nobody reads from it any more: a thread may still read when it is no longer kept open.
    """

    number = -1

    def __init__(self, file: DataFile):
        self.number = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        if (found := os.fstat(self.number).st_size) != file.size:
            raise file.wrong_size(found)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.number >= 0:
            close(self.number)


@functools.lru_cache(maxsize=OPEN_FILES)
def _opened(file: DataFile) -> _Descriptor:
    return _Descriptor(file)


class TokenStream:
    """The tokens of a split, read-only, and safe to use from forked workers and from threads.

    Args:
        folder: folder of the prepared data set.
        manifest: manifest of the prepared data set.
        split: name of the split.

    Attributes:
        split: the split's entry in the manifest.
        name: name of the split.
        tokens: number of tokens.
        dtype: type of a token, little-endian.
        vocab_size: all token ids are below this number.
        has_loss_mask: only some tokens count as targets.

    Raises:
        ConfigError: a file is missing, or is not what was written.
        DataError: a file cannot be read at the moment.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: str):
        self.split, self.name = manifest.splits[split], split
        self.dtype = np.dtype(manifest.tokenizer.dtype).newbyteorder("<")
        self.vocab_size = manifest.tokenizer.vocab_size
        self._firsts = list(itertools.accumulate((shard.tokens for shard in self.split.shards), initial=0))
        self._files = [
            {
                kind: DataFile(shard_file(folder, split, shard.name, kind), size)
                for kind, size in shard.file_sizes(manifest.tokenizer.dtype).items()
            }
            for shard in self.split.shards
        ]
        for files in self._files:
            for file in files.values():
                file.check_size()
        self.has_loss_mask = manifest.chat is not None
        self.tokens = self._firsts[-1]

    def read_into(self, row: NDArray[Any], position: int, kind: str = "tokens") -> None:
        """Fill `row` (contiguous) with the values of the tokens from `position` on, without checking them.

        Args:
            kind: "tokens": ids, in a row of `dtype`; "loss_mask": 1 for those that count as targets, else 0, uint8.

        Raises:
            ConfigError, DataError: as for `TokenStream` itself.
        """
        shard = bisect.bisect_right(self._firsts, position) - 1
        while len(row):
            count = min(len(row), self._firsts[shard + 1] - position)
            self._files[shard][kind].read_into(row[:count], (position - self._firsts[shard]) * row.itemsize)
            position, row, shard = position + count, row[count:], shard + 1

    def shard_ends(self) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield, for each shard, the position of its first token and where its documents end after that, uint64 [documents].

        Raises:
            ConfigError: the ends decrease, or the last one is not the end of the shard.
            DataError: the ends cannot be read at the moment.
        """
        for shard, first, files in zip(self.split.shards, self._firsts, self._files, strict=False):
            ends = np.empty(shard.documents, dtype="<u8")
            files["ends"].read_into(ends, 0)
            if (ends[1:] < ends[:-1]).any() or ends[-1:].sum() != shard.tokens:
                raise ConfigError(
                    f"{files['ends'].path}: the ends of its documents do not rise to the {shard.tokens:,} tokens of the shard",
                    hint="the file is damaged: copy or prepare the data set again",
                )
            yield first, ends
