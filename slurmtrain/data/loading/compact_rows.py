"""A compact form of rows of prepared tokens, for the way from a worker to the device.

It takes 1, 2 or 4 bytes per token instead of 16. A worker sends the rows of several micro batches as one `RowGroup`; the
rank splits it, and each micro batch is expanded on the device that computes.

Measured by processor time, this earned 1.6 to 2.3 times as many batches of rows of
one length and of mixtures as int64 rows by the same way, 1.3 to 1.6 times as many masked or packed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.data.loading.batches import IGNORED_TARGET, Batch, padded

GROUP_TOKENS = 1 << 17  # greatest number of tokens in a group of several batches
# The types in the files, with the signed type of the same width, which every device supports.
_SIGNED = {torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32}
_NONE = np.empty(0, dtype=np.int64)


class CompactRows(NamedTuple):
    """The compact form of a batch of B rows of S tokens; `batch()` expands it where it is used.

    Attributes:
        tokens: unsigned [B, S + 1]; the first S tokens of each row are its inputs, the last S its targets.
        num_targets: number of targets that are not ignored.
        lengths: int64 [B], length of each row without its padding; None: no row is padded.
        places: int64 [K], positions (row * S + column) of targets that differ from the next token; none lies in the
            padding. None: there are no such targets.
        values: int64 [K], the targets at `places`; None: they are ignored.
        documents: int32 [B, S], as in a batch; None: documents are not masked.
        row_length: tokens of a row of the batch; rows are padded to it if S is less.
    """

    tokens: Tensor
    num_targets: int
    lengths: Tensor | None = None
    places: Tensor | None = None
    values: Tensor | None = None
    documents: Tensor | None = None
    row_length: int = 0

    def batch(self) -> Batch:
        """Return the batch on the device of its tensors, without waiting for that device.

        Inputs and targets are new tensors.
        """
        inputs, targets = _int64(self.tokens[:, :-1]), _int64(self.tokens[:, 1:])
        if self.places is not None:
            if self.values is None:
                targets.view(-1).index_fill_(0, self.places, IGNORED_TARGET)
            else:
                targets.view(-1).index_copy_(0, self.places, self.values)
        if self.lengths is not None:
            padding = torch.arange(targets.shape[1], device=targets.device) >= self.lengths[:, None]
            inputs.masked_fill_(padding, 0)
            targets.masked_fill_(padding, IGNORED_TARGET)
        batch = {"inputs": inputs, "targets": targets}
        if self.documents is not None:
            batch["documents"] = self.documents
        return padded(batch, self.row_length)


def batches_per_group(samples: int, seq_len: int) -> int:
    """Return how many batches of this size to make in one go: numpy takes hardly longer for several small ones than for one."""
    return max(1, GROUP_TOKENS // max(samples * seq_len, 1))


class RowGroup(NamedTuple):
    """The rows of M batches of B rows each, in the form in which a worker sends them.

    Attributes:
        tokens: unsigned [M * B, S + 1], as in `CompactRows`.
        num_targets: number of targets that are not ignored, of each batch.
        is_padded: whether a row of the batch is padded, of each batch.
        ends: where the batch's own `places` end, of each batch.
        row_length, values: as in `CompactRows`, of all batches.
        lengths: int64 [M * B], length of each row without its padding; None: no row is padded.
        places: int64 [K], in each batch as in `CompactRows`; None: there are none.
        documents: int32 [M * B, S], as in a batch; None: documents are not masked.
    """

    tokens: Tensor
    num_targets: list[int]
    is_padded: list[bool]
    ends: list[int]
    row_length: int
    lengths: Tensor | None
    places: Tensor | None
    values: Tensor | None
    documents: Tensor | None

    @property
    def tokens_per_row(self) -> int:
        return self.tokens.shape[1] - 1

    def padded(self, length: int) -> RowGroup:
        """Return the group with rows of at least `length` tokens, which are padded when they are expanded."""
        return self._replace(row_length=length)

    def split(self) -> list[CompactRows]:
        """Return the rows of each batch, in the memory of the group."""
        size, found = len(self.tokens) // len(self.num_targets), []
        for number, (begin, end) in enumerate(pairwise([0, *self.ends])):
            rows = slice(number * size, (number + 1) * size)
            found.append(
                CompactRows(
                    self.tokens[rows],
                    self.num_targets[number],
                    lengths=self.lengths[rows] if self.lengths is not None and self.is_padded[number] else None,
                    places=self.places[begin:end] if self.places is not None and begin < end else None,
                    values=self.values[begin:end] if self.values is not None and begin < end else None,
                    documents=None if self.documents is None else self.documents[rows],
                    row_length=self.row_length,
                )
            )
        return found


def row_group(
    tokens: NDArray[Any],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    values: NDArray[np.int64] | None,
    documents: NDArray[np.int32] | None,
    *,
    batches: int,
) -> RowGroup:
    """Return rows as a group.

    Args:
        tokens, lengths, documents: as in `RowGroup`.
        places: int64 [K], positions in all rows together of targets that differ from the next token, increasing.
        values: int64 [K], the targets at `places`; None: they are ignored.
        batches: number of batches, M.
    """
    width = tokens.shape[1] - 1
    of_batch = lengths.reshape(batches, -1)
    targets = of_batch.shape[1] * width  # of a batch, with those of its padding
    bounds = places.searchsorted(targets * np.arange(batches + 1))
    ignored = bounds
    is_padded = of_batch.min(axis=1, initial=width) < width
    if values is not None:
        ignored = np.concatenate([[0], np.cumsum(values == IGNORED_TARGET)])[bounds]
    return RowGroup(
        torch.from_numpy(tokens),
        num_targets=(of_batch.sum(axis=1) - np.diff(ignored)).tolist(),
        is_padded=is_padded.tolist(),
        ends=bounds[1:].tolist(),
        row_length=width,
        lengths=torch.from_numpy(lengths) if is_padded.any() else None,
        places=torch.from_numpy(places % targets) if len(places) else None,
        values=torch.from_numpy(values) if values is not None and len(places) else None,
        documents=None if documents is None else torch.from_numpy(documents),
    )


def merge_groups(parts: Sequence[tuple[NDArray[np.int64], RowGroup]], *, batches: int, document_mask: bool) -> RowGroup:
    """Return the rows of several sources as one group.

    Args:
        parts: for each source, the rows of the result that its samples take, int64 [B of the part], and its samples as a
            group of one batch.
        batches: number of batches of the result.
        document_mask: give the result `documents`, where a row without any counts as one document; parts may have
            `documents` only if this is set.
    """
    samples, width = sum(len(rows) for rows, _ in parts), max(part.tokens_per_row for _, part in parts)
    dtype = max((part.tokens.numpy().dtype for _, part in parts), key=lambda dtype: dtype.itemsize)
    tokens = np.empty((samples, width + 1), dtype=dtype)
    documents = np.empty((samples, width), dtype=np.int32) if document_mask else None
    lengths, places, values = np.empty(samples, dtype=np.int64), [_NONE], [_NONE]
    for rows, part in parts:
        own = part.tokens_per_row
        tokens[rows, : own + 1] = part.tokens.numpy()
        tokens[rows, own + 1 :] = 0
        lengths[rows] = own if part.lengths is None else part.lengths.numpy()
        if part.places is not None:
            row, column = np.divmod(part.places.numpy(), own)
            places.append(rows[row] * width + column)
            values.append(np.full_like(row, IGNORED_TARGET) if part.values is None else part.values.numpy())
        if documents is not None:
            numbers = np.zeros((len(rows), own), np.int32) if part.documents is None else part.documents.numpy()
            documents[rows, :own] = numbers
            documents[rows, own:] = numbers[:, -1:] + 1  # the padding is a document of its own
    all_places = np.concatenate(places)
    order = np.argsort(all_places)
    all_values = np.concatenate(values)[order]
    return row_group(tokens, lengths, all_places[order], all_values, documents, batches=batches)


def _int64(tokens: Tensor) -> Tensor:
    return tokens.long() if tokens.device.type == "cpu" else by_signed(tokens)


def by_signed(tokens: Tensor) -> Tensor:
    """Convert unsigned tokens to int64 by way of signed types.

    GPUs support unsigned types of more than a byte only in part.
    """
    signed = tokens.view(_SIGNED[tokens.dtype]).long()
    return signed.bitwise_and_((1 << 8 * tokens.element_size()) - 1)
