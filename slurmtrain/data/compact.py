"""Rows of prepared tokens on their way from a worker to the device: two or four bytes for a token there instead of sixteen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slurmtrain.data.batches import IGNORED_TARGET, Batch

# What the files hold, and the signed type of the same width, which every device can compute with.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


class CompactRows(NamedTuple):
    """What becomes a batch of B rows of S tokens where it is used.

    Attributes:
        tokens: unsigned [B, S + 1]: of each row, the inputs but for its last one, the targets but for its first one.
        num_targets: that are not ignored.
        lengths: int64 [B], of each row without its padding; None: there is none.
        places: int64 [K], of targets that are others, counted through the rows, S in each; None: there are none.
        values: int64 [K], those targets; None: they are ignored.
        documents: int32 [B, S], as in a batch; None: not masked.
    """

    tokens: Tensor
    num_targets: int
    lengths: Tensor | None = None
    places: Tensor | None = None
    values: Tensor | None = None
    documents: Tensor | None = None

    def batch(self) -> Batch:
        """On the device of its tensors, and nothing waits for that device; inputs and targets are tensors of its own."""
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


def _int64(tokens: Tensor) -> Tensor:
    return tokens.long() if tokens.device.type == "cpu" else by_signed(tokens)


def by_signed(tokens: Tensor) -> Tensor:
    """The same by signed types: unsigned ones of more than a byte are only half known on GPUs."""
    signed = tokens.view(_SIGNED[tokens.dtype]).long()
    return signed.bitwise_and_((1 << 8 * tokens.element_size()) - 1)
