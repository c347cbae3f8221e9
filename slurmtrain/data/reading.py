"""Files of prepared data: read from any number of processes and threads, with a sentence for whatever goes wrong.

By preadv and never by mmap, where a file that has been cut short or a disk that fails ends the process by SIGBUS, without
a word. preadv takes the offset with it, so forked workers share descriptors without harm. Few are kept open, the last used.

What time may mend (an I/O error, a handle that the file server has forgotten) is tried again with the file opened anew.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurmtrain.errors import ConfigError, DataError, SlurmtrainError

OPEN_FILES = 64
PAUSES_S = (0.1, 0.5, 2.5)  # between attempts: long enough for a file server to change over, short for a step
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_FINAL = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP)
_DIGEST_BYTES = 4 << 20  # read at a time


class DataFile:
    """A file whose size is known. It is opened when it is first read; as an object it costs next to nothing.

    Args:
        path: where it lies.
        size: bytes that it must have.
    """

    def __init__(self, path: Path, size: int):
        self.path, self.size = path, size
        self._complained = False

    def read_into(self, array: NDArray[Any], offset: int) -> None:
        """Fill `array` (contiguous) with the bytes from `offset` on.

        Raises:
            ConfigError: the file is not there, not readable, or not of its size.
            DataError: it cannot be read now.
        """
        count = self._read(array, offset)
        while count < array.nbytes:  # on some file systems a read may bring less than there is
            more = self._read(array.view(np.uint8)[count:], offset + count)
            if not more:
                raise self._wrong_size(offset + count)
            count += more

    def will_need(self, offset: int, count: int) -> None:
        """Have the kernel read these bytes ahead; returns at once. What goes wrong is left for the read to tell."""
        try:  # contextlib.suppress would take longer than the call
            descriptor = _opened(self)
            os.posix_fadvise(descriptor.number, offset, count, os.POSIX_FADV_WILLNEED)
        except (OSError, SlurmtrainError):
            return

    def check_size(self) -> None:
        """Raises as `read_into`, without opening the file."""
        found = self._attempts(lambda: os.stat(self.path).st_size)
        if found != self.size:
            raise self._wrong_size(found)

    def check_digest(self, sha256: str, first: int = 0) -> None:
        """Read all from byte `first` on. Raises as `read_into`, and ConfigError for another content."""
        digest = hashlib.sha256()
        for begin in range(first, self.size, _DIGEST_BYTES):
            block = np.empty(min(_DIGEST_BYTES, self.size - begin), dtype=np.uint8)
            self.read_into(block, begin)
            digest.update(block.data)
        if digest.hexdigest() != sha256:
            raise ConfigError(
                f"{self.path} has the sha256 {digest.hexdigest()}, but {sha256} was written",
                hint="the file is damaged: copy or prepare the data set again",
            )

    def open(self) -> int:
        """A new descriptor. Raises OSError, and ConfigError for another size."""
        number = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(number).st_size
        if found != self.size:
            os.close(number)
            raise self._wrong_size(found)
        return number

    def _read(self, array: NDArray[Any], offset: int) -> int:
        try:
            descriptor = _opened(self)  # held, or another thread's reading might close it now
            return os.preadv(descriptor.number, [array.data], offset)
        except OSError as error:
            return self._attempts(functools.partial(self._read_anew, array, offset), failed=error)

    def _read_anew(self, array: NDArray[Any], offset: int) -> int:
        descriptor = _opened(self)
        descriptor.open_anew()
        return os.preadv(descriptor.number, [array.data], offset)

    def _attempts(self, act: Callable[[], int], failed: OSError | None = None) -> int:
        """What `act` returns, which is called again after a transient error.

        Args:
            failed: of an attempt before.
        """
        attempt = 0
        while True:
            if failed is None:
                try:
                    return act()
                except OSError as error:
                    failed = error
            if failed.errno not in _TRANSIENT or attempt == len(PAUSES_S):
                raise self._unreadable(failed) from None
            self._complain(failed)
            time.sleep(PAUSES_S[attempt])
            attempt, failed = attempt + 1, None

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            print(
                f"slurmtrain: {self.path} cannot be read: {error.strerror}; it is tried again",
                file=sys.stderr,
                flush=True,
            )

    def _unreadable(self, error: OSError) -> SlurmtrainError:
        message = f"{self.path} cannot be read: {error.strerror}"
        if error.errno in _FINAL:
            return ConfigError(message, hint="is the data set complete, and there on every node?")
        again = f", {len(PAUSES_S) + 1} times in {sum(PAUSES_S):.0f} s" if error.errno in _TRANSIENT else ""
        return DataError(message + again, hint="the file system is at fault; the run goes on from its last checkpoint")

    def _wrong_size(self, found: int) -> ConfigError:
        return ConfigError(
            f"{self.path} has {found:,} bytes, but {self.size:,} were written",
            hint="it was cut short or is of another data set: copy or prepare the data set again",
        )


class _Descriptor:
    """An open file, closed when nobody reads from it any more: a thread may still do so when it is no longer kept."""

    def __init__(self, file: DataFile):
        self._file, self.number = file, -1
        self.number = file.open()

    def open_anew(self) -> None:
        """Under the same number, so that nobody is left with one that means another file."""
        number = self._file.open()
        os.dup2(number, self.number, inheritable=False)
        os.close(number)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.number >= 0:
            close(self.number)


@functools.lru_cache(maxsize=OPEN_FILES)
def _opened(file: DataFile) -> _Descriptor:
    return _Descriptor(file)
