"""Files of prepared data, read by any number of processes and threads; every error is reported by one sentence.

Files are read by preadv and never by mmap, where a file that has been truncated or a disk that fails ends the process
by SIGBUS, without a message. preadv takes the offset as an argument, so forked workers share descriptors without harm.
Only the few files used last are kept open.

After an error that may pass (an I/O error, a file handle that the file server has forgotten), the file is opened again
and the read is repeated, as `patience.STEP` has it.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        self._complained = False

    def read_into(self, array: NDArray[Any], offset: int) -> None:
        """Fill `array` (contiguous) with the bytes from `offset` on.

        Raises:
            ConfigError: the file does not exist, is not readable, or is not of its size.
            DataError: the file cannot be read at the moment.
        """
        count = self._read(array, offset)
        while count < array.nbytes:  # on some file systems a read may bring less than there is
            more = self._read(array.view(np.uint8)[count:], offset + count)
            if not more:
                raise self._wrong_size(offset + count)
            count += more

    def check_size(self) -> None:
        """Check the file's size without opening it; raise the errors that `read_into` raises."""
        found = self._attempts(lambda: os.stat(self.path).st_size)
        if found != self.size:
            raise self._wrong_size(found)

    def open(self) -> int:
        """Return a new descriptor of the file.

        Raises:
            ConfigError: the file is not of its size.
            OSError: the file cannot be opened.
        """
        number = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(number).st_size
        if found != self.size:
            os.close(number)
            raise self._wrong_size(found)
        return number

    def _read(self, array: NDArray[Any], offset: int) -> int:
        def read() -> int:
            descriptor = _opened(self)  # held, or another thread's reading might close it now
            return os.preadv(descriptor.number, [array.data], offset)

        try:
            return read()
        except OSError as error:
            return self._attempts(read, failed=error)

    def _attempts(self, act: Callable[[], int], failed: OSError | None = None) -> int:
        """Return what `act` returns; call it again after an error that may pass.

        Args:
            failed: the error of an attempt before; None if there was none.
        """
        before = [failed] if failed is not None else []

        def attempt() -> int:
            if before:
                raise before.pop()
            return act()

        try:
            return patience.patiently(attempt, patience.STEP, told=self._complain)
        except OSError as error:
            raise self._unreadable(error) from None

    def _complain(self, error: OSError) -> None:
        _opened.cache_clear()  # the next attempt opens the file anew
        if not self._complained:
            self._complained = True
            log.warning("%s cannot be read: %s; it is tried again", self.path, error.strerror)

    def _unreadable(self, error: OSError) -> SlurmtrainError:
        message = f"{self.path} cannot be read: {error.strerror}"
        if error.errno in _FINAL:
            return ConfigError(message, hint="is the data set complete, and there on every node?")
        pauses_s = patience.STEP.pauses_s
        again = f", {len(pauses_s) + 1} times in {sum(pauses_s):.0f} s" if patience.may_pass(error) else ""
        return DataError(message + again, hint="the file system is at fault; the run goes on from its last checkpoint")

    def _wrong_size(self, found: int) -> ConfigError:
        return ConfigError(
            f"{self.path} has {found:,} bytes, but {self.size:,} were written",
            hint="it was cut short or is of another data set: copy or prepare the data set again",
        )


class _Descriptor:
    """An open file.

    It is closed when nobody reads from it any more: a thread may still read when it is no longer kept open.
    """

    def __init__(self, file: DataFile):
        self._file, self.number = file, -1
        self.number = file.open()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.number >= 0:
            close(self.number)


@functools.lru_cache(maxsize=OPEN_FILES)
def _opened(file: DataFile) -> _Descriptor:
    return _Descriptor(file)
