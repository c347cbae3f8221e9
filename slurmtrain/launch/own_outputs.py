"""Files that slurmtrain writes for a person, often into the work tree, and that are no code: bundles and reports."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path, PurePosixPath

from slurmtrain.launch.bundle_format import MANIFEST
from slurmtrain.system import records
from slurmtrain.system.records import RECORD_BYTES

GENERATOR = b'<meta name="generator" content="slurmtrain">'
HEAD_BYTES = 2048  # of a page; the mark is among its first lines


def is_own_output(path: Path) -> bool:
    """Return whether a file is a bundle of `runs bundle` or a page of `report`: by its content, whatever its name is."""
    if path.suffix == ".html":
        return path.is_file() and GENERATOR in _head(path)
    return path.suffix in (".gz", ".tgz", ".tar") and path.is_file() and _is_bundle(path)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def _is_bundle(path: Path) -> bool:
    """Return whether the first file of an archive is the list of a bundle's files."""
    try:
        with (
            path.open("rb") as opened,
            tarfile.open(mode="r|" if path.suffix == ".tar" else "r|gz", fileobj=opened) as tar,
        ):
            first = tar.next()
            file = tar.extractfile(first) if first is not None and first.size <= RECORD_BYTES else None
            if first is None or file is None or PurePosixPath(first.name).name != MANIFEST:
                return False
            values = records.parse(file.read())
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError):
        return False
    return isinstance(values, dict) and {"format", "run", "files", "untracked"} <= values.keys()
