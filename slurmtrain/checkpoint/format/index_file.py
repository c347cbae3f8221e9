"""Read index.bin of a checkpoint and check it against the manifest, for restoring, verifying and exporting alike."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from slurmtrain.checkpoint.errors import CheckpointError, UnreadableError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.coverage import check_coverage
from slurmtrain.checkpoint.format.directory import INDEX
from slurmtrain.checkpoint.format.manifest import Manifest
from slurmtrain.checkpoint.format.tensor_index import DTYPE_BYTES, Index

HEADER_BYTES = 1 << 30  # more than that of a million tensors


def read_index(path: Path, manifest: Manifest) -> Index:
    """Return the index of the checkpoint `path`.

    Raises:
        CheckpointError: the index is damaged, or does not belong to this manifest. UnreadableError: see
            `blocks.patiently`.
    """
    record = manifest.files.get(INDEX)
    if record is None:
        raise CheckpointError(f"{path} is damaged: its manifest.json knows of no {INDEX}")
    file = path / INDEX

    def read() -> bytes:
        return file.read_bytes() if file.stat().st_size == record.size else b""

    try:
        data = blocks.patiently(read, file)
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {blocks.cannot_be_read(INDEX, error)}") from None
    if len(data) != record.size or blocks.root(blocks.digests_of(data)) != record.sha256:
        raise CheckpointError(f"{path} is damaged: {INDEX} is not what was written: its digest differs")
    index = Index.parse(data, manifest.sizes)
    for name, digests in index.digests.items():
        if blocks.root(digests) != manifest.files[name].sha256:
            raise CheckpointError(f"{path} is damaged: {INDEX} and manifest.json disagree about {name!r}")
    return index


def read_whole_index(path: Path, manifest: Manifest, *, sizes: bool = True) -> Index:
    """Return the index of a checkpoint, after a look at everything but the contents of its files.

    Args:
        sizes: look at the sizes of the files, too; else the caller has.

    Raises:
        CheckpointError: as `read_index`; or a file is missing or has another size, or by the index the files do not hold
            every element of every tensor of the manifest exactly once.
    """
    damage = blocks.find_damage(path, manifest.files.items(), contents=False) if sizes else []
    if damage:
        raise CheckpointError(f"{path} is damaged: {'; '.join(damage)}")
    index = read_index(path, manifest)
    try:
        facts = check_coverage(index.schemas, index.tables.values())
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: by its {INDEX} {error.message}") from None
    if manifest.tensors != {name: {"shape": list(fact.shape), "dtype": fact.dtype} for name, fact in facts.items()}:
        raise CheckpointError(f"{path} is damaged: {INDEX} and manifest.json have other tensors")
    return index


def damage_of(path: Path, error: CheckpointError) -> str:
    """Return what is wrong with the checkpoint `path` by an error of these functions, without its path."""
    return error.message.removeprefix(f"{path} is damaged: ").removeprefix(f"{path}: ")


def find_disagreement(path: Path, manifest: Manifest) -> list[str]:
    """Describe what would not be restored, or be restored wrongly, from files whose digests are right: one sentence each.

    Raises:
        UnreadableError: the storage fails, and after all retries still does.
    """
    try:
        index = read_whole_index(path, manifest, sizes=False)
    except UnreadableError:
        raise
    except CheckpointError as error:
        return [damage_of(path, error)]
    for schema in index.schemas:
        for name, fact in schema.items():
            if DTYPE_BYTES.get(fact.dtype) != fact.itemsize:
                return [
                    f"{name} is {fact.dtype[:50]!r} with {fact.itemsize} bytes an element, which torch does not know"
                ]
    disagreement = []
    for name in sorted(index.tables):
        try:
            file = path / name
            blocks.patiently(partial(_check_header, file, index, name), file)
            json.loads(blocks.patiently(partial(_own_state, file, *index.own_state(name)), file))
        except OSError as error:
            disagreement.append(blocks.cannot_be_read(name, error))
        except (ValueError, RecursionError) as error:
            disagreement.append(f"{name} and {INDEX} disagree: {error}")
    return disagreement


def _check_header(file: Path, index: Index, name: str) -> None:
    """Raise ValueError if a rank's file, read as a safetensors file, declares other contents than the index."""
    expected = index.pieces(name)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length < HEADER_BYTES:
            raise ValueError("its header has no length")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    start = 8 + length
    for piece, (begin, end) in expected.items():
        entry = header.get(piece)
        if not isinstance(entry, dict) or entry.get("data_offsets") != [begin - start, end - start]:
            raise ValueError(f"{piece} lies elsewhere")


def _own_state(file: Path, begin: int, length: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(begin)
        return opened.read(length)
