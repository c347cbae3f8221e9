"""Copy a file or a folder, or unpack an archive, and digest what was read on the way."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

BLOCK = 8 << 20
COMPILED = "__pycache__"  # folders in which Python keeps what it has compiled


class Digest(Protocol):
    """A digest of hashlib."""

    def update(self, data: bytes, /) -> None:
        """Add data."""

    def hexdigest(self) -> str:
        """Return the digest so far."""


class Entry(NamedTuple):
    """A file of a tree, or a link to a folder.

    Attributes:
        name: path relative to the top.
        link: where a link to a folder leads; None for a file. A link to a file counts as that file.
    """

    name: str
    path: Path
    size_bytes: int
    link: str | None = None


def entries(top: Path) -> Iterator[Entry]:
    """Yield the files of a tree in the order of their names, folder by folder. A file by itself has the name "".

    What Python has compiled is left out: ranks that import from the tree meanwhile change it.
    """
    if not top.is_dir():
        yield Entry("", top, top.stat().st_size)
        return
    for folder, folders, names in os.walk(top, onerror=_raise):
        folders[:] = sorted(name for name in folders if name != COMPILED)
        for name in sorted([*names, *(each for each in folders if os.path.islink(os.path.join(folder, each)))]):
            path = Path(folder, name)
            found = path.lstat() if path.is_symlink() and not path.exists() else path.stat()
            below = os.path.relpath(path, top)
            if stat.S_ISDIR(found.st_mode) or stat.S_ISLNK(found.st_mode):
                yield Entry(below, path, 0, _link(path, top))
            elif stat.S_ISREG(found.st_mode):
                yield Entry(below, path, found.st_size)


def size_of(top: Path) -> int:
    """Return the bytes of all files of a tree."""
    return sum(entry.size_bytes for entry in entries(top))


def copy_tree(source: Path, target: Path | None) -> str:
    """Copy a file or a folder with times and modes, and return a sha256 of its names and contents as they were read.

    Args:
        target: must not exist; None: only read.

    Raises:
        OSError: it cannot be read or written.
    """
    whole = hashlib.sha256()
    if target is not None and source.is_dir():
        target.mkdir(parents=True)
    for name, path, _, link in entries(source):
        copy = target / name if target is not None and name else target
        if copy is not None:
            copy.parent.mkdir(parents=True, exist_ok=True)
        if link is not None:
            whole.update(f"{name}\0{link}\0".encode(errors="surrogateescape"))
            if copy is not None:
                copy.symlink_to(link)
            continue
        of_file = hashlib.sha256()
        with path.open("rb") as original:
            if copy is None:
                _copy(original, None, of_file)
            else:
                with copy.open("xb") as written:
                    _copy(original, written, of_file)
                shutil.copystat(path, copy)
        whole.update(f"{name}\0{of_file.hexdigest()}\0".encode(errors="surrogateescape"))
    return whole.hexdigest()


def unpack(archive: Path, target: Path) -> str:
    """Unpack a tar archive into a new folder, and return the sha256 of the archive as it was read.

    Raises:
        OSError: it cannot be read or written.
        tarfile.TarError: it is damaged.
    """
    target.mkdir(parents=True)
    digest = hashlib.sha256()
    # Releases of Python before 3.11.4 know no filters.
    options: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
    with archive.open("rb") as file:
        reader = _Digesting(file, digest)
        with tarfile.open(fileobj=cast(BinaryIO, reader), mode="r|", bufsize=BLOCK) as packed:
            packed.extractall(target, **options)
        while reader.read(BLOCK):  # what lies behind the end of the last member
            pass
    return digest.hexdigest()


class _Digesting:
    """A file that digests what is read from it."""

    def __init__(self, file: BinaryIO, digest: Digest) -> None:
        self._file, self._digest = file, digest

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data


def _copy(original: BinaryIO, written: BinaryIO | None, digest: Digest) -> None:
    while data := original.read(BLOCK):
        digest.update(data)
        if written is not None:
            written.write(data)


def _link(path: Path, top: Path) -> str:
    """Return where a link is to lead in a copy of `top`: within it as before, else to the original's place."""
    link = os.readlink(path)
    inside = Path(os.path.normpath(path.parent / link)).is_relative_to(top)
    return link if inside and not os.path.isabs(link) else os.path.realpath(path)


def _raise(error: OSError) -> None:
    raise error
