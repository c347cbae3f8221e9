"""Write files in one step, and read small JSON objects."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slurmtrain.system.modes import file_mode
from slurmtrain.system.redaction import redacted

# What link(2) fails with where the file system has no hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL)


def disk_usage(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder. Links are not followed."""
    if path.is_symlink():
        return os.lstat(path).st_size
    total = os.lstat(path).st_size if path.is_file() else 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # it goes away just now
                continue
    return total


def write_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> None:
    """Write an object as JSON by `write_text`, without secrets."""
    write_text(path, json.dumps(redacted(value), indent=1) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file by `replace_file` with one that holds this text."""
    replace_file(path, text.encode(), durable=durable)


def replace_file(
    path: Path, content: bytes | Iterable[bytes], *, mode: int | None = None, durable: bool = True
) -> None:
    """Replace a file atomically: a reader sees the old or the new one, never half of it; other links keep the old one.

    If it cannot be written, the old one stays, and nothing is left beside it.

    Args:
        mode: mode of the file before the umask; None: that of a run's files, see `file_mode`.
        durable: wait until it is on the disk; not for thousands of files that can be made again. That its name is on
            the disk, too, takes `fsync_directory`.
    """
    temporary = temporary_beside(path)
    try:
        write_new(temporary, content, mode=mode, durable=durable)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_where_named(path: Path, content: bytes) -> None:
    """Write a file to where a person says, by `replace_file`; the umask decides who reads it.

    What is no file of its own, such as /dev/stdout, /dev/null or a pipe, is written into: a rename would put a file in its
    place. A link stays one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as stream:
            stream.write(content)
    else:
        replace_file(Path(os.path.realpath(path)), content, mode=0o666)


def temporary_beside(path: Path, suffix: str = "") -> Path:
    """Return a hidden name in the same folder that no other process on any host uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}{suffix}")


def write_new(path: Path, content: bytes | Iterable[bytes], *, mode: int | None = None, durable: bool = True) -> None:
    """Create a small file, and wait until its content is on the disk.

    Creation is atomic on local disks, Lustre and NFS from version 3 on (open(2), O_EXCL); the content comes later.

    Args:
        mode, durable: as in `replace_file`.

    Raises:
        FileExistsError: there is one.
    """
    _write(path, content, os.O_EXCL, mode, durable=durable)


def link_or_copy(source: Path, target: Path) -> None:
    """Make a second name for a file, or where the file system has no links, a copy of it. Symbolic links are not followed.

    Raises:
        FileExistsError: something has that name.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from None
        shutil.copy2(source, target, follow_symlinks=False)


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file in place, and wait until its content is on the disk."""
    _write(path, content, os.O_TRUNC, None, durable=True)


def fsync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes | Iterable[bytes], flag: int, mode: int | None, *, durable: bool) -> None:
    mode = file_mode(path.parent) if mode is None else mode
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flag, mode), "wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
