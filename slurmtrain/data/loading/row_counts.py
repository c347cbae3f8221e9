"""What a model computes on in a batch: its tokens, padding among them, and the pairs of tokens that attend."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from slurmtrain.data.loading.batches import Batch, tokens_per_row
from slurmtrain.planner.flops import attended_pairs, dense_pairs


class RowCounts(NamedTuple):
    """The counts of some rows of tokens.

    Attributes:
        tokens: number of tokens, with padding and with those whose targets are ignored.
        dense_pairs: pairs of query and key if every token attends to all tokens of its row.
        attended_pairs: pairs that attend: each token to itself and to those of its document before it.
    """

    tokens: int = 0
    dense_pairs: int = 0
    attended_pairs: int = 0


NO_ROWS = RowCounts()


def row_counts(batch: Batch) -> RowCounts:
    """Return the counts of a batch's rows; 0 for a batch without rows of tokens."""
    length = tokens_per_row(batch)
    if not length:
        return NO_ROWS
    rows, documents = len(batch["targets"]), batch.get("documents")
    attended = _within_documents(documents) if isinstance(documents, Tensor) else rows * attended_pairs([length])
    return RowCounts(rows * length, dense_pairs(rows, length), attended)


def _within_documents(documents: Tensor) -> int:
    """Return the pairs within the documents of rows [B, S] that are numbered along each row."""
    numbers = documents.numpy() if documents.device.type == "cpu" else documents.cpu().numpy()
    starts = np.ones(numbers.shape, dtype=bool)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=starts[:, 1:])
    lengths = np.diff(np.flatnonzero(starts), append=numbers.size)
    return int((lengths * (lengths + 1) // 2).sum())
