"""The tokens of a split of prepared data, end to end over all its shards, and where its documents end.

The data is never held in memory: a position is found by a binary search over the shards, and read in place.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.format.manifest import Manifest, shard_file
from slurmtrain.data.format.reading import DataFile
from slurmtrain.errors import ConfigError


class TokenStream:
    """The tokens of a split, read-only, and safe to use from forked workers and from threads.

    Args:
        folder: folder of the prepared data set.
        manifest: manifest of the prepared data set.
        split: name of the split.

    Attributes:
        split: the split's entry in the manifest.
        name: name of the split.
        tokens: number of tokens.
        dtype: type of a token, little-endian.
        vocab_size: all token ids are below this number.
        has_loss_mask: only some tokens count as targets.

    Raises:
        ConfigError: a file is missing, or is not what was written.
        DataError: a file cannot be read at the moment.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: str):
        self.split, self.name = manifest.splits[split], split
        self.dtype = np.dtype(manifest.tokenizer.dtype).newbyteorder("<")
        self.vocab_size = manifest.tokenizer.vocab_size
        self._firsts = list(itertools.accumulate((shard.tokens for shard in self.split.shards), initial=0))
        self._files = [
            {
                kind: DataFile(shard_file(folder, split, shard.name, kind), size)
                for kind, size in shard.file_sizes(manifest.tokenizer.dtype).items()
            }
            for shard in self.split.shards
        ]
        for files in self._files:
            for file in files.values():
                file.check_size()
        self.has_loss_mask = manifest.chat is not None
        self.tokens = self._firsts[-1]

    def read_into(self, row: NDArray[Any], position: int, kind: str = "tokens") -> None:
        """Fill `row` (contiguous) with the values of the tokens from `position` on, without checking them.

        Args:
            kind: "tokens": ids, in a row of `dtype`; "loss_mask": 1 for those that count as targets, else 0, uint8.

        Raises:
            ConfigError, DataError: as for `TokenStream` itself.
        """
        shard = bisect.bisect_right(self._firsts, position) - 1
        while len(row):
            count = min(len(row), self._firsts[shard + 1] - position)
            self._files[shard][kind].read_into(row[:count], (position - self._firsts[shard]) * row.itemsize)
            position, row, shard = position + count, row[count:], shard + 1

    def shard_ends(self) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield, for each shard, the position of its first token and where its documents end after that, uint64 [documents].

        Raises:
            ConfigError: the ends decrease, or the last one is not the end of the shard.
            DataError: the ends cannot be read at the moment.
        """
        for shard, first, files in zip(self.split.shards, self._firsts, self._files, strict=False):
            ends = np.empty(shard.documents, dtype="<u8")
            files["ends"].read_into(ends, 0)
            if (ends[1:] < ends[:-1]).any() or ends[-1:].sum() != shard.tokens:
                raise ConfigError(
                    f"{files['ends'].path}: the ends of its documents do not rise to the {shard.tokens:,} tokens of the shard",
                    hint="the file is damaged: copy or prepare the data set again",
                )
            yield first, ends
