"""Numbers that are not finite: the error that ends a training, and the check of its parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slurmtrain.checkpoint.save.finite import not_finite
from slurmtrain.errors import EXIT_CONFIG, SlurmtrainError


class DivergedError(SlurmtrainError):
    """Loss, gradients or parameters are not finite, or a loss spike does not go away.

    A retry without a change would compute the same bits, so there is none.
    """

    exit_code = EXIT_CONFIG


def all_finite(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether every element of this rank's part of the parameters is a finite number."""
    return not not_finite({str(number): parameter for number, parameter in enumerate(parameters)})
