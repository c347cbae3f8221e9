"""What a model computes on in a batch: its tokens, padding among them, and the pairs of tokens that attend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from slurmtrain.data.loading.batches import WholeBatch, tokens_per_row
from slurmtrain.data.loading.compact_rows import CompactRows
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


def row_counts(batches: Iterable[CompactRows | WholeBatch]) -> RowCounts:
    """Return the counts of all rows of these batches, which are still on the host; 0 for batches without rows of tokens."""
    tokens = dense = attended = 0
    for batch in batches:
        rows, length, documents = _shape(batch)
        tokens += rows * length
        dense += dense_pairs(rows, length)
        if documents is None:
            attended += rows * attended_pairs([length])
        else:
            attended += _within_documents(documents) + rows * attended_pairs([length - documents.shape[1]])
    return RowCounts(tokens, dense, attended)


def _shape(batch: CompactRows | WholeBatch) -> tuple[int, int, Tensor | None]:
    """Return the number of rows, the tokens of a row, and `documents` [B, S], without the padding that is still to come."""
    if isinstance(batch, CompactRows):
        length = batch.tokens.shape[1] - 1
        return len(batch.tokens), max(length, batch.row_length), batch.documents
    length = tokens_per_row(batch.values)
    if not length:
        return 0, 0, None
    documents = batch.values.get("documents")
    return len(batch.values["targets"]), length, documents if isinstance(documents, Tensor) else None


def _within_documents(documents: Tensor) -> int:
    """Return the pairs within the documents of rows [B, S] that are numbered along each row."""
    numbers = documents.numpy() if documents.device.type == "cpu" else documents.cpu().numpy()
    starts = np.ones(numbers.shape, dtype=bool)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=starts[:, 1:])
    lengths = np.diff(np.flatnonzero(starts), append=numbers.size)
    return int((lengths * (lengths + 1) // 2).sum())
