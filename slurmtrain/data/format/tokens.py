"""Prepared tokens as samples: rows of pieces of the token stream, read and converted a batch at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from slurmtrain.data.format.manifest import LOSS_MASK
from slurmtrain.data.format.rows import Rows, damaged
from slurmtrain.data.format.stream import TokenStream
from slurmtrain.data.loading.batches import IGNORED_TARGET
from slurmtrain.errors import ConfigError


class _Plan(NamedTuple):
    """The places in the stream and in the batch of the pieces [P] of some samples [B]. All int64.

    Attributes:
        starts: positions of the pieces in the stream, [P].
        pairs: number of pairs of an input and its target of each piece, [P].
        rows, columns: row and column of each piece's first pair in the batch, [P].
        lengths: number of pairs of each sample, [B].
    """

    starts: NDArray[np.int64]
    pairs: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    lengths: NDArray[np.int64]


class PackedTokens(Dataset[dict[str, Tensor]]):
    """A data set over a split of prepared data, with rows of one length.

    A sample has `inputs` and `targets`, int64 [S]; if documents are masked also `documents`, int32 [S]: 0, 1, ... along
    the row, and one more for the padding. Padding has inputs of 0 and targets that the loss ignores.

    Args:
        stream: the tokens of the split.
        rows: which of the tokens each sample has.
        seq_len: S; no sample is longer.
        document_mask: give samples `documents`; each of their pieces is one.
        num_bytes: bytes of text that all targets stand for; None: not known.
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
        self._stream, self._rows, self.document_mask = stream, rows, document_mask
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
        plan = self._plan(indices)
        width = self._width(plan)
        tokens = np.empty((len(plan.lengths), width + 1), dtype=self._stream.dtype)
        last_targets = self._read(plan, tokens)
        inputs, targets = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        of_all_rows = targets.reshape(-1)
        if len(plan.starts) > len(plan.lengths):  # each piece of a row was read over the last target of the one before
            of_all_rows[plan.rows * width + plan.columns + plan.pairs - 1] = last_targets
        if self._stream.has_loss_mask:
            of_all_rows[self._masked(plan, width)] = IGNORED_TARGET
        padding = np.arange(width) >= plan.lengths[:, None]
        inputs[padding], targets[padding] = 0, IGNORED_TARGET
        batch = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if self.document_mask:
            batch["documents"] = torch.from_numpy(self._number_documents(plan, width))
        return batch

    def _width(self, plan: _Plan) -> int:
        return self.seq_len

    def _pieces(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return starts and pairs [P] of the samples' pieces, and the number of pieces of each sample [B].

        All pieces are checked to be in the stream.
        """
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"sample {indices} of a data set of {len(self)}")
        pieces, counts = self._rows.pieces(indices)
        starts, pairs = pieces["start"].astype(np.int64), pieces["pairs"].astype(np.int64)
        if len(starts) and (starts.min() < 0 or (starts + pairs).max() >= self._stream.tokens):
            raise damaged("the index of the packing")
        return starts, pairs, counts

    def _plan(self, indices: NDArray[np.int64]) -> _Plan:
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
        return _Plan(starts, pairs, rows, columns, lengths)

    def _read(self, plan: _Plan, tokens: NDArray[Any]) -> list[Any]:
        """Fill `tokens` [B, S + 1] with inputs and last target of each row.

        Return the last target of each piece.
        """
        rows, width = tokens.shape
        if len(plan.starts) > rows or plan.lengths.min(initial=width) < width - 1:
            tokens[:] = 0  # the padding of a row must be a valid id, too
        begins = plan.rows * width + plan.columns
        flat, last_targets = tokens.reshape(-1), []
        places = zip(begins.tolist(), (begins + plan.pairs + 1).tolist(), plan.starts.tolist(), strict=True)
        for begin, end, position in places:
            self._stream.read_into(flat[begin:end], position)
            last_targets.append(flat[end - 1])  # which the next piece may overwrite
        if max(tokens.max(initial=0), max(last_targets, default=0)) >= self._stream.vocab_size:
            raise ConfigError(
                f"the split {self._stream.name} of prepared data has a token that is not below the tokenizer's "
                f"{self._stream.vocab_size} ids",
                hint="a file is damaged: `prepare verify FOLDER` says which; prepare the data set again",
            )
        return last_targets

    def _masked(self, plan: _Plan, width: int) -> NDArray[np.int64]:
        """Return the positions in the flat array of targets of those that the loss mask leaves out."""
        counts = np.ones(len(plan.lengths) * width, dtype=np.uint8)
        begins = (plan.rows * width + plan.columns).tolist()
        for begin, pairs, start in zip(begins, plan.pairs.tolist(), plan.starts.tolist(), strict=True):
            self._stream.read_into(counts[begin : begin + pairs], start + 1, LOSS_MASK)
        return np.flatnonzero(counts == 0)

    def _number_documents(self, plan: _Plan, width: int) -> NDArray[np.int32]:
        """Return the number of each token's document in its row, int32 [B, S]."""
        rows = len(plan.lengths)
        short = np.flatnonzero(plan.lengths < width)
        begins = [np.arange(rows) * width, plan.rows * width + plan.columns, short * width + plan.lengths[short]]
        starts = np.unique(np.concatenate(begins))
        numbers = np.arange(len(starts)) - starts.searchsorted(starts // width * width)
        return np.repeat(numbers.astype(np.int32), np.diff(starts, append=rows * width)).reshape(rows, width)


class DocumentTokens(PackedTokens):
    """A data set whose samples differ in length: a batch's rows are as long as its longest sample."""

    def _width(self, plan: _Plan) -> int:
        return int(plan.lengths.max(initial=0))
