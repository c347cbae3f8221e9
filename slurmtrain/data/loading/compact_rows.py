"""A compact form of rows of prepared tokens, for the way from a worker to the device.

It takes 1, 2 or 4 bytes per token instead of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.data.loading.batches import IGNORED_TARGET, Batch

TOKENS_AT_ONCE = 1 << 17  # greatest number of tokens in batches that are made in one go
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
    """

    tokens: Tensor
    num_targets: int
    lengths: Tensor | None = None
    places: Tensor | None = None
    values: Tensor | None = None
    documents: Tensor | None = None

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
        return batch if self.documents is None else {**batch, "documents": self.documents}


def as_batch(rows: Batch | CompactRows) -> Batch:
    """Return a batch in the usual form."""
    return rows.batch() if isinstance(rows, CompactRows) else rows


def batches_at_once(samples: int, seq_len: int) -> int:
    """Return how many batches of this size to make in one go: numpy takes hardly longer for several small ones than for one."""
    return max(1, TOKENS_AT_ONCE // max(samples * seq_len, 1))


class RowsTogether(NamedTuple):
    """The rows of several batches of equal size, made in one go.

    Attributes:
        tokens, documents: as in `CompactRows`; made by the `empty` that `apart` gets.
        lengths: int64 [rows], length of each row without its padding.
        places: int64 [K], increasing; as in `CompactRows`.
        values: int64 [K], the targets at `places`; None: they are ignored.
    """

    tokens: Tensor
    lengths: NDArray[np.int64]
    places: NDArray[np.int64]
    values: NDArray[np.int64] | None
    documents: Tensor | None

    def apart(self, batches: int, empty: Callable[..., Tensor]) -> Iterator[CompactRows]:
        """Yield the rows batch by batch.

        Args:
            batches: number of batches to split the rows into.
            empty: makes an uninitialised tensor of a shape and a dtype.
        """
        width = self.tokens.shape[1] - 1
        tokens = self.tokens.view(batches, -1, width + 1).unbind()
        documents = None if self.documents is None else self.documents.view(batches, -1, width).unbind()
        lengths = self.lengths.reshape(batches, -1)
        numbers = lengths.shape[1] * width  # number of targets in a batch
        bounds = self.places.searchsorted(numbers * np.arange(batches + 1)).tolist()
        targets, shortest = lengths.sum(axis=1).tolist(), lengths.min(axis=1, initial=width).tolist()
        for batch, (begin, end) in enumerate(pairwise(bounds)):
            own = CompactRows(tokens[batch], targets[batch], documents=None if documents is None else documents[batch])
            if shortest[batch] < width:
                own = own._replace(lengths=_sent(lengths[batch], empty))
            if begin < end:
                own = own._replace(places=_sent(self.places[begin:end] - batch * numbers, empty))
                if self.values is None:
                    own = own._replace(num_targets=own.num_targets - (end - begin))
                else:
                    values = self.values[begin:end]
                    ignored = int(np.count_nonzero(values == IGNORED_TARGET))
                    own = own._replace(num_targets=own.num_targets - ignored, values=_sent(values, empty))
            yield own


def joined_rows(
    parts: Sequence[tuple[NDArray[np.int64], CompactRows]], empty: Callable[..., Tensor], *, document_mask: bool
) -> RowsTogether:
    """Join the rows of several sources.

    Args:
        parts: for each source, the rows of the result that its samples take, int64 [B of the part], and its samples.
        empty: makes an uninitialised tensor of a shape and a dtype.
        document_mask: give the result `documents`, where a row without any counts as one document; parts may have
            `documents` only if this is set.
    """
    samples, width = sum(len(rows) for rows, _ in parts), max(part.tokens.shape[1] for _, part in parts) - 1
    tokens = empty(
        (samples, width + 1), dtype=max((part.tokens.dtype for _, part in parts), key=lambda dtype: dtype.itemsize)
    )
    documents = empty((samples, width), dtype=torch.int32) if document_mask else None
    lengths, places, values = np.empty(samples, dtype=np.int64), [_NONE], [_NONE]
    for rows, part in parts:
        own = part.tokens.shape[1] - 1
        tokens.numpy()[rows, : own + 1] = part.tokens.numpy()
        tokens.numpy()[rows, own + 1 :] = 0
        lengths[rows] = own if part.lengths is None else part.lengths.numpy()
        if part.places is not None:
            row, column = np.divmod(part.places.numpy(), own)
            places.append(rows[row] * width + column)
            values.append(np.full_like(row, IGNORED_TARGET) if part.values is None else part.values.numpy())
        if documents is not None:
            numbers = np.zeros((len(rows), own), np.int32) if part.documents is None else part.documents.numpy()
            documents.numpy()[rows, :own] = numbers
            documents.numpy()[rows, own:] = numbers[:, -1:] + 1  # the padding is a document of its own
    all_places = np.concatenate(places)
    order = np.argsort(all_places)
    return RowsTogether(tokens, lengths, all_places[order], np.concatenate(values)[order], documents)


def _sent(numbers: NDArray[np.int64], empty: Callable[..., Tensor]) -> Tensor:
    """Return a copy of `numbers` in a tensor made by `empty`."""
    tensor = empty(numbers.shape, dtype=torch.int64)
    tensor.numpy()[:] = numbers
    return tensor


def _int64(tokens: Tensor) -> Tensor:
    return tokens.long() if tokens.device.type == "cpu" else by_signed(tokens)


def by_signed(tokens: Tensor) -> Tensor:
    """Convert unsigned tokens to int64 by way of signed types.

    GPUs support unsigned types of more than a byte only in part.
    """
    signed = tokens.view(_SIGNED[tokens.dtype]).long()
    return signed.bitwise_and_((1 << 8 * tokens.element_size()) - 1)
