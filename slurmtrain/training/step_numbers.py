"""Loss and gradient norm of each step, the same on all ranks, read without waiting for the device.

The numbers of a step are copied to host memory while the device works on, and this rank's part of the loss is added up
over all ranks together with the counts of a later step, which costs no collective of its own. So they are known
`LAG` steps later. That number is fixed, so that what is decided by them is decided after the same step in every run,
however often it was interrupted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slurmtrain.training.agreement import TrainingRanks

LAG = 2  # the numbers of a step are known in the second step after it
PARTS = 3  # integers that a rank adds to the counts of a step; see `NumbersReader.own_part`
_FRACTION = 2**16  # losses are added up as integers, whose sum does not depend on the order of ranks
_MOST = 2**62


class StepNumbers(NamedTuple):
    """The numbers of a step, over all ranks.

    Attributes:
        step: number of the step, from 1.
        samples: numbers of the first of its samples in the order of the run, and of the one after the last.
        loss: mean over all its tokens, in nats; NaN if that of any rank is not finite.
        grad_norm: norm of all gradients before they were clipped.
        failed_ranks: number of ranks whose loss is not finite.
        failed_rank: that rank, if it is the only one.
    """

    step: int
    samples: tuple[int, int]
    loss: float
    grad_norm: float
    failed_ranks: int = 0
    failed_rank: int | None = None

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient norm are finite numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def to_json(self) -> list[Any]:
        """Return it as it is saved; as text, since JSON has no numbers that are not finite."""
        return [self.step, *self.samples, repr(self.loss), repr(self.grad_norm), self.failed_ranks, self.failed_rank]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> StepNumbers:
        """Return what `to_json` has saved."""
        step, first, end, loss, norm, failed_ranks, failed_rank = values
        return cls(step, (first, end), float(loss), float(norm), failed_ranks, failed_rank)


@dataclass(frozen=True)
class _Noted:
    """The numbers of a step on this rank while they are copied from the device.

    Attributes:
        values: sum of this rank's losses, and the norm of all gradients, float32 [2] in host memory.
        tokens: number of tokens of the step over all ranks.
        copied: on a GPU, the event that marks the end of the copy.
    """

    step: int
    samples: tuple[int, int]
    values: Tensor
    tokens: int
    copied: torch.cuda.Event | None

    def read(self) -> tuple[float, float]:
        """Return the sum of this rank's losses, and the norm of all gradients, once they are copied."""
        if self.copied is not None:
            self.copied.synchronize()
        loss_sum, norm = self.values.tolist()
        return loss_sum, norm

    def known(self, norm: float, sums: Sequence[int]) -> StepNumbers:
        """Return the numbers over all ranks, given the sums of what `NumbersReader.own_part` returns on each."""
        loss_sum, failed, names = sums
        loss = math.nan if failed else loss_sum / _FRACTION / self.tokens
        only = names - 1 if failed == 1 else None
        return StepNumbers(self.step, self.samples, loss, norm, failed, only)


class NumbersReader:
    """Reads the numbers of each step `LAG` steps later. All ranks note, read and restore in the same steps.

    Args:
        ranks: this rank, and the group that adds up.
    """

    def __init__(self, ranks: TrainingRanks):
        self._ranks, self._most = ranks, _MOST // ranks.size
        self._waiting: deque[_Noted | StepNumbers] = deque()  # of the last `LAG` steps, oldest first
        self._due: tuple[_Noted, float] | StepNumbers | None = None

    def note(self, step: int, samples: tuple[int, int], loss_sum: Tensor, norm: Tensor, tokens: int) -> None:
        """Copy the numbers of a step (scalars) from its device, without waiting for the copy."""
        values, copied = torch.stack([loss_sum.detach().float(), norm.detach().float()]), None
        if norm.is_cuda:
            values = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._waiting.append(_Noted(step, samples, values, tokens, copied))

    def own_part(self) -> list[int]:
        """Return this rank's part of the numbers that are due: integers to be added up over all ranks, for `finish`.

        While the device works on the step before, so that it has something to do while this function waits.
        """
        self._due, part = None, [0] * PARTS
        if len(self._waiting) >= LAG:
            noted = self._waiting.popleft()
            if isinstance(noted, StepNumbers):  # known already, and due no earlier for that
                self._due = noted
            else:
                loss_sum, norm = noted.read()
                self._due, part = (noted, norm), self._part(loss_sum)
        return part

    def finish(self, sums: Sequence[int]) -> StepNumbers | None:
        """Return the numbers that are due, given the sums over all ranks; None: none are."""
        due, self._due = self._due, None
        if isinstance(due, StepNumbers) or due is None:
            return due
        noted, norm = due
        return noted.known(norm, sums)

    def read_all(self) -> list[StepNumbers]:
        """Read what is not due yet, too, and wait for the device. All ranks call it together.

        What is returned stays due when it would have been.
        """
        noted = [(each, *each.read()) for each in self._waiting if isinstance(each, _Noted)]
        if noted:
            parts = torch.tensor([self._part(loss_sum) for _, loss_sum, _ in noted])
            sums = iter(self._ranks.sum_integers(parts).tolist())
            norms = iter(norm for _, _, norm in noted)
            self._waiting = deque(
                each.known(next(norms), next(sums)) if isinstance(each, _Noted) else each for each in self._waiting
            )
        return [each for each in self._waiting if isinstance(each, StepNumbers)]

    def take_all(self) -> list[StepNumbers]:
        """As `read_all`, and nothing is due any more."""
        numbers = self.read_all()
        self._waiting.clear()
        return numbers

    def restore(self, numbers: Sequence[StepNumbers]) -> None:
        """Continue where `read_all` has returned `numbers`."""
        self._waiting, self._due = deque(numbers), None

    def _part(self, loss_sum: float) -> list[int]:
        if not math.isfinite(loss_sum):
            return [0, 1, self._ranks.rank + 1]
        return [max(-self._most, min(round(loss_sum * _FRACTION), self._most)), 0, 0]
