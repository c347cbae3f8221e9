"""A prepared data set as `prepare` writes it, from documents given as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.format.manifest import Manifest, Shard, Split, TokenizerFacts, shard_file

Documents = Sequence[Sequence[int]]


def write_prepared(
    folder: Path, splits: Mapping[str, Sequence[Documents]], *, vocab_size: int = 257, bos: int | None = None
) -> Manifest:
    """Args: splits: by name, the documents of each shard. A document is taken to have four bytes of text a token."""
    tokenizer = TokenizerFacts(kind="bytes", file=None, sha256=None, vocab_size=vocab_size, bos=bos, eos=None)
    written = {name: _split(folder, name, shards, tokenizer.dtype) for name, shards in splits.items()}
    manifest = Manifest(tokenizer, written)
    manifest.write(folder)
    return manifest


def write_shard(folder: Path, split: str, name: str, tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> Shard:
    """One shard's files. Args: tokens: of the type they are to have; lengths: of the documents."""
    arrays = {"tokens": tokens, "ends": np.cumsum(lengths).astype("<u8")}
    (folder / name).mkdir(parents=True, exist_ok=True)
    for kind, array in arrays.items():
        shard_file(folder, split, name, kind).write_bytes(array.tobytes())
    digests = {kind: hashlib.sha256(array.tobytes()).hexdigest() for kind, array in arrays.items()}
    return Shard(name, len(lengths), len(tokens), 4 * len(tokens), digests)


def _split(folder: Path, name: str, shards: Sequence[Documents], dtype: str) -> Split:
    written = []
    for number, documents in enumerate(shards):
        tokens = np.array([token for document in documents for token in document], dtype=dtype)
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        written.append(write_shard(folder, name, f"{number:05d}", tokens, lengths))
    return Split(tuple(written))
