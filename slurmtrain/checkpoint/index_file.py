"""index.bin of a checkpoint, read and held against the manifest: the one way to it, for restoring and exporting."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.checkpoint import blocks, commit
from slurmtrain.checkpoint.commit import Manifest
from slurmtrain.checkpoint.layout import Index
from slurmtrain.errors import CheckpointError


def read_index(path: Path, manifest: Manifest) -> Index:
    """The index of the checkpoint `path`.

    Raises:
        CheckpointError: it is damaged, or does not belong to this manifest.
    """
    record = manifest.files.get(commit.INDEX)
    if record is None:
        raise CheckpointError(f"{path} is damaged: its manifest.json knows of no {commit.INDEX}")
    try:
        data = (path / commit.INDEX).read_bytes() if (path / commit.INDEX).stat().st_size == record.size else b""
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {blocks.cannot_be_read(commit.INDEX, error)}") from None
    if len(data) != record.size or blocks.root(blocks.digests_of(data)) != record.sha256:
        raise CheckpointError(f"{path} is damaged: {commit.INDEX} is not what was written: its digest differs")
    index = Index.parse(data, manifest.sizes)
    for name, digests in index.digests.items():
        if blocks.root(digests) != manifest.files[name].sha256:
            raise CheckpointError(f"{path} is damaged: {commit.INDEX} and manifest.json disagree about {name!r}")
    return index
