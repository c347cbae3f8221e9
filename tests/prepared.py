"""A prepared data set as `prepare` writes it, from documents given as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from slurmtrain.data.manifest import Manifest, Shard, Split, TokenizerFacts, shard_file

Documents = Sequence[Sequence[int]]


def write_prepared(
    folder: Path, splits: Mapping[str, Sequence[Documents]], *, vocab_size: int = 257, bos: int | None = None
) -> Manifest:
    """Args: splits: by name, the documents of each shard. A document is taken to have four bytes of text a token."""
    tokenizer = TokenizerFacts(kind="bytes", file=None, sha256=None, vocab_size=vocab_size, bos=bos, eos=None)
    written = {name: _split(folder, name, shards, tokenizer.dtype) for name, shards in splits.items()}
    manifest = Manifest(tokenizer.dtype, tokenizer, written, ())
    manifest.write(folder)
    return manifest


def _split(folder: Path, name: str, shards: Sequence[Documents], dtype: str) -> Split:
    (folder / name).mkdir(parents=True)
    return Split(tuple(_shard(folder, name, f"{i:05d}", documents, dtype) for i, documents in enumerate(shards)))


def _shard(folder: Path, split: str, name: str, documents: Documents, dtype: str) -> Shard:
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    arrays = {
        "tokens": np.array([token for document in documents for token in document], dtype=np.dtype(dtype)),
        "ends": np.cumsum(lengths).astype("<u8"),
        "bytes": (4 * lengths).astype("<u4"),
    }
    for kind, array in arrays.items():
        shard_file(folder, split, name, kind).write_bytes(array.tobytes())
    digests = {kind: hashlib.sha256(array.tobytes()).hexdigest() for kind, array in arrays.items()}
    return Shard(name, len(documents), int(lengths.sum()), int(4 * lengths.sum()), digests)
