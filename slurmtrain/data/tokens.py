"""Prepared tokens as samples: rows of pieces of the token stream, read and converted a batch at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from slurmtrain.data.rows import Rows, damaged
from slurmtrain.data.stream import TokenStream
from slurmtrain.data.text import IGNORED_TARGET
from slurmtrain.data.workers import SENT_WHOLE_BYTES


@dataclass(frozen=True)
class _Batch:
    """Where the pieces [P] of some samples [B] come from, and where they go. All int64.

    Attributes:
        starts: positions in the stream, [P].
        pairs: of an input and its target, [P].
        rows, columns: place of the first pair in the batch, [P].
        lengths: pairs of each sample, [B].
    """

    starts: NDArray[np.int64]
    pairs: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    lengths: NDArray[np.int64]


class PackedTokens(Dataset[dict[str, Tensor]]):
    """A data set over a split of prepared data, with rows of one length.

    A sample has `inputs` and `targets`, int64 [S]; where documents are masked also `documents`, int32 [S]: 0, 1, ... along
    the row, and one more for the padding. Padding has inputs of 0 and targets that the loss ignores.

    Args:
        stream: the tokens.
        rows: which of them each sample has.
        seq_len: S; no sample is longer.
        document_mask: give `documents`, and ignore targets in another document than their inputs.
        num_bytes: of text that all targets stand for; None: not known.
    """

    def __init__(
        self,
        stream: TokenStream,
        rows: Rows,
        *,
        seq_len: int,
        document_mask: bool = False,
        num_bytes: int | None = None,
    ):
        self._stream, self._rows, self._document_mask = stream, rows, document_mask
        self.seq_len, self.num_bytes = seq_len, num_bytes

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample."""
        return {name: rows[0] for name, rows in self.get_batch(np.array([index])).items()}

    def will_need(self, indices: NDArray[np.int64]) -> None:
        """Have the samples `indices` [B] read ahead; returns at once. Raises as `get_batch`."""
        starts, pairs, _ = self._pieces(indices)
        for start, count in zip(starts.tolist(), pairs.tolist(), strict=True):
            self._stream.will_need(start, count + 1)

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """The samples `indices` [B] at once, each name [B, S].

        Raises:
            IndexError: an index is not in range(len(self)).
            ConfigError: the data is not what was prepared.
            DataError: it cannot be read now.
        """
        batch = self._plan(indices)
        width = self._width(batch)
        shape = len(indices), width
        tensors = {"inputs": _empty(shape, torch.int64), "targets": _empty(shape, torch.int64)}
        inputs, targets = (tensor.numpy() for tensor in tensors.values())
        self._read(batch, inputs, targets)
        if self._document_mask:
            tensors["documents"] = _empty(shape, torch.int32)
            self._mask(batch, targets, tensors["documents"].numpy())
        if batch.lengths.min(initial=width) < width:
            padding = np.arange(width) >= batch.lengths[:, None]
            inputs[padding], targets[padding] = 0, IGNORED_TARGET
        return tensors

    def _width(self, batch: _Batch) -> int:
        return self.seq_len

    def _pieces(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Starts and pairs [P] of the samples' pieces, and how many each sample has [B]; all within the stream."""
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"sample {indices} of a data set of {len(self)}")
        pieces, counts = self._rows.pieces(indices)
        starts, pairs = pieces["start"].astype(np.int64), pieces["pairs"].astype(np.int64)
        if len(starts) and (starts.min() < 0 or (starts + pairs).max() >= self._stream.tokens):
            raise damaged("the index of the packing")
        return starts, pairs, counts

    def _plan(self, indices: NDArray[np.int64]) -> _Batch:
        starts, pairs, counts = self._pieces(indices)
        rows = np.arange(len(indices))
        if len(starts) == len(rows):  # one piece each, as in most packings
            columns, lengths = np.zeros_like(rows), pairs
        else:
            firsts = np.cumsum(counts) - counts  # number of each row's first piece
            lengths = np.add.reduceat(pairs, firsts)
            skipped = np.cumsum(pairs) - pairs  # pairs of the batch before each piece
            columns = skipped - np.repeat(skipped[firsts], counts)
            rows = np.repeat(rows, counts)
        if lengths.max(initial=0) > self.seq_len:
            raise damaged("the index of the packing")
        return _Batch(starts, pairs, rows, columns, lengths)

    def _read(self, batch: _Batch, inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Fill inputs and targets [B, S]; what stands in the padding is of no use."""
        tokens = np.zeros((len(inputs), inputs.shape[1] + 1), dtype=self._stream.dtype)
        # A piece comes with its last target, over which the next one of the row is read: so that is kept apart.
        last_targets = np.empty(len(batch.starts), dtype=tokens.dtype)
        places = zip(
            batch.rows.tolist(), batch.columns.tolist(), batch.starts.tolist(), batch.pairs.tolist(), strict=True
        )
        for number, (row, column, start, pairs) in enumerate(places):
            piece = tokens[row, column : column + pairs + 1]
            self._stream.read_into(piece, start)
            last_targets[number] = piece[-1]
        if max(tokens.max(initial=0), last_targets.max(initial=0)) >= self._stream.vocab_size:
            self._stream.check_ids(batch.starts, batch.pairs + 1)
        inputs[:], targets[:] = tokens[:, :-1], tokens[:, 1:]
        targets[batch.rows, batch.columns + batch.pairs - 1] = last_targets

    def _mask(self, batch: _Batch, targets: NDArray[np.int64], documents: NDArray[np.int32]) -> None:
        """Fill in the number in its row of each token's document, [B, S]; ignore targets in another document."""
        begins = np.zeros((len(targets), targets.shape[1] + 1), dtype=np.int32)
        begins[batch.rows, batch.columns] = 1
        if self._rows.across_documents:
            for row, column, start, pairs in zip(batch.rows, batch.columns, batch.starts, batch.pairs, strict=True):
                places = column + self._stream.borders(int(start), int(start + pairs + 1)) - start
                begins[row, places] = 1
                targets[row, places - 1] = IGNORED_TARGET
        begins[np.arange(len(targets)), batch.lengths] = 1  # the padding
        begins[:, 0] = 0
        np.cumsum(begins[:, :-1], axis=1, out=documents)


class DocumentTokens(PackedTokens):
    """Samples of different length: a batch's rows are as long as its longest sample."""

    def lengths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each of the samples `indices` [B] but for its padding, int64 [B]. Raises as `get_batch`."""
        return self._plan(indices).lengths

    def _width(self, batch: _Batch) -> int:
        return int(batch.lengths.max(initial=0))


def _empty(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A large one in a worker lies in the memory that it shares with its rank, which saves a copy. As torch's own collating."""
    count = math.prod(shape)
    if count * dtype.itemsize <= SENT_WHOLE_BYTES or get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    empty = torch.empty(0, dtype=dtype)
    return empty.new(empty._typed_storage()._new_shared(count, device=empty.device)).resize_(shape)
