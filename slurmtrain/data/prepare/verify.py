"""Check a prepared data set against its manifest: every byte of it against its digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.data.format.manifest import Manifest, shard_file


@dataclass(frozen=True)
class _Expected:
    """A file of the data set."""

    path: Path
    size: int | None
    sha256: str


def verify(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence for each file that is missing or differs from the manifest."""
    files = list(_files(folder, manifest))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashing leaves other threads alone
        yield from (problem for problem in pool.map(_problem, files) if problem is not None)


def _files(folder: Path, manifest: Manifest) -> Iterator[_Expected]:
    if manifest.tokenizer.file is not None:
        yield _Expected(folder / manifest.tokenizer.file, None, manifest.tokenizer.sha256 or "")
    for split, content in manifest.splits.items():
        for shard in content.shards:
            for kind, size in shard.file_sizes(manifest.dtype).items():
                yield _Expected(shard_file(folder, split, shard.name, kind), size, shard.sha256[kind])


def _problem(expected: _Expected) -> str | None:
    try:
        size = expected.path.stat().st_size
        if expected.size is not None and size != expected.size:
            return f"{expected.path} has {size} bytes, expected {expected.size}"
        with open(expected.path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{expected.path} cannot be read: {error.strerror}"
    return None if digest == expected.sha256 else f"{expected.path} differs from its digest: it is damaged"
