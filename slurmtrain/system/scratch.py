"""Folders for files that are needed for a moment, and that the next command removes if their process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make a folder of this user alone where TMPDIR says, and remove it after the block.

    It is locked meanwhile (flock(2)): a lock ends with its process, however that ends. So folders of this prefix that are
    this user's and that nobody has locked are left over, and are removed before. Where the file system has no such locks,
    nothing is removed.
    """
    _remove_left_over(Path(tempfile.gettempdir()), prefix)
    folder, descriptor = _make(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _make(prefix: str) -> tuple[Path, int]:
    """Make a folder, and return it with the descriptor by which it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another command has taken it for left over, since it was not locked yet
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
                return folder, descriptor
        os.close(descriptor)


def _remove_left_over(parent: Path, prefix: str) -> None:
    for path in parent.glob(f"{prefix}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # somebody else's, a link, or gone
            continue
        try:
            found = os.fstat(descriptor)
            if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # it is locked, or cannot be
            continue
        finally:
            os.close(descriptor)
