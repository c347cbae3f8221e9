"""Prepared tokens as samples: rows of pieces of the token stream, read and converted a batch at a time."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from slurmtrain.data.format.manifest import LOSS_MASK
from slurmtrain.data.format.reading import TokenStream
from slurmtrain.data.format.rows import Rows, damaged
from slurmtrain.data.loading.batches import IGNORED_TARGET
from slurmtrain.errors import ConfigError


class PackedTokens(Dataset[dict[str, Tensor]]):
    """A data set over a split of prepared data.

    A sample has `inputs` and `targets`, int64 [S]; if documents are masked also `documents`, int32 [S]: 0, 1, ... along
    the row, and one more for the padding. Padding has inputs of 0 and targets that the loss ignores.

    Args:
        stream: the tokens of the split.
        rows: which of the tokens each sample has.
        seq_len: S; no sample is longer.
        ragged: a batch's rows are as long as its longest sample; False: all rows have S tokens.
        document_mask: give samples `documents`; each of their pieces is one.
        num_bytes: bytes of text that all targets stand for; None: not known.
    """

    def __init__(
        self,
        stream: TokenStream,
        rows: Rows,
        *,
        seq_len: int,
        ragged: bool = False,
        document_mask: bool = False,
        num_bytes: int | None = None,
    ):
        self._stream, self._rows, self._ragged, self.document_mask = stream, rows, ragged, document_mask
        self.seq_len, self.num_bytes = seq_len, num_bytes

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample, each name [S]."""
        return {name: rows[0] for name, rows in self.get_batch(np.array([index])).items()}

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the samples `indices` [B] as one batch, each name [B, S].

        Raises:
            IndexError: an index is not in range(len(self)).
            ConfigError: the data is not what was prepared.
            DataError: the data cannot be read at the moment.
        """
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"sample {indices} of a data set of {len(self)}")
        stream = self._stream
        pieces, counts = self._rows.pieces(indices)  # counts: of the pieces of each row
        starts, pairs = pieces["start"].astype(np.int64), pieces["pairs"].astype(np.int64)
        firsts = np.cumsum(counts) - counts  # number of each row's first piece
        lengths = np.add.reduceat(pairs, firsts)
        ends = starts + pairs
        if starts.min(initial=0) < 0 or ends.max(initial=0) >= stream.tokens or lengths.max(initial=0) > self.seq_len:
            raise damaged("the index of the packing")
        width = int(lengths.max(initial=0)) if self._ragged else self.seq_len
        before = np.cumsum(pairs) - pairs  # pairs of the batch before each piece
        places = before + np.repeat(
            np.arange(len(counts)) * width - before[firsts], counts
        )  # in the batch, row after row
        numbers = np.arange(len(pairs)) - np.repeat(firsts, counts)  # of the pieces in their rows

        shape = len(counts), width
        inputs, targets = np.zeros(shape, stream.dtype), np.zeros(shape, stream.dtype)
        counted = np.ones(shape, np.uint8)
        documents = np.repeat(counts.astype(np.int32), width).reshape(shape)  # the padding is one of its own
        for place, count, start, number in zip(
            places.tolist(), pairs.tolist(), starts.tolist(), numbers.tolist(), strict=True
        ):
            piece = slice(place, place + count)
            stream.read_into(inputs.reshape(-1)[piece], start)
            stream.read_into(targets.reshape(-1)[piece], start + 1)
            if stream.has_loss_mask:
                stream.read_into(counted.reshape(-1)[piece], start + 1, LOSS_MASK)
            documents.reshape(-1)[piece] = number
        if max(inputs.max(initial=0), targets.max(initial=0)) >= stream.vocab_size:
            raise ConfigError(
                f"the split {stream.name} of prepared data has a token that is not below the tokenizer's "
                f"{stream.vocab_size} ids",
                hint="a file is damaged: `prepare verify FOLDER` says which; prepare the data set again",
            )
        counted[np.arange(width) >= lengths[:, None]] = 0
        wanted = targets.astype(np.int64)
        wanted[counted == 0] = IGNORED_TARGET
        batch = {"inputs": torch.from_numpy(inputs.astype(np.int64)), "targets": torch.from_numpy(wanted)}
        if self.document_mask:
            batch["documents"] = torch.from_numpy(documents)
        return batch
