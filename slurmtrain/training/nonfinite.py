"""Steps whose loss or gradients are not finite: count them without waiting for the device, and end the attempt after too many.

Parameters that were updated once by a gradient that is not finite stay so: no later step mends them, and a checkpoint
of them is useless. What to do instead of ending (skip the step, go back to a checkpoint) is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slurmtrain.checkpoint.save.finite import not_finite
from slurmtrain.errors import EXIT_CONFIG, SlurmtrainError


class DivergedError(SlurmtrainError):
    """Loss, gradients or parameters are not finite.

    A retry without a change would compute the same bits, so there is none.
    """

    exit_code = EXIT_CONFIG


@dataclass(frozen=True)
class _Noted:
    """The numbers of a step while they are copied from the device.

    Attributes:
        values: float32 [2] in host memory: sum of this rank's losses, and the norm of all gradients.
        tokens: number of tokens of the step over all ranks.
        copied: on a GPU, the event that marks the end of the copy.
    """

    step: int
    values: Tensor
    tokens: int
    copied: torch.cuda.Event | None


class NonfiniteSteps:
    """Counts the consecutive steps whose loss or gradient norm is not finite, as this rank sees them.

    Args:
        limit: this many consecutive steps are too many; 0: any number is allowed.

    Attributes:
        in_a_row: number of consecutive steps up to the last one that was looked at.
        first, last: first and last of these steps.
        loss: loss of the last step, this rank's part of the mean over all tokens, in nats.
        norm: gradient norm of the last step.
    """

    def __init__(self, limit: int):
        self.limit, self.in_a_row = limit, 0
        self.first = self.last = 0
        self.loss = self.norm = math.nan
        self._noted: _Noted | None = None

    def note(self, step: int, loss_sum: Tensor, norm: Tensor, tokens: int) -> None:
        """Copy the numbers of a step (scalars) from its device, without waiting for the copy."""
        values = torch.stack([loss_sum.detach().float(), norm.detach().float()])
        copied = None
        if values.is_cuda:
            values = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._noted = _Noted(step, values, tokens, copied)

    def update(self) -> bool:
        """Count the step noted last, and return whether there are too many consecutive steps.

        It is called while the device works on the next step, so that the device has something to do while this function
        waits.
        """
        noted, self._noted = self._noted, None
        if noted is not None:
            if noted.copied is not None:
                noted.copied.synchronize()
            loss_sum, self.norm = noted.values.tolist()
            self.loss = loss_sum / noted.tokens
            finite = math.isfinite(loss_sum) and math.isfinite(self.norm)
            self.in_a_row = 0 if finite else self.in_a_row + 1
            self.first, self.last = noted.step - self.in_a_row + 1, noted.step
        return 0 < self.limit <= self.in_a_row


def all_finite(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether every element of this rank's part of the parameters is a finite number."""
    return not not_finite({str(number): parameter for number, parameter in enumerate(parameters)})
