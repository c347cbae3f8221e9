"""Numbers that are not finite: the check of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slurmtrain.checkpoint.tensors import not_finite


def all_finite(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether every element of this rank's part of the parameters is a finite number."""
    return not not_finite({str(number): parameter for number, parameter in enumerate(parameters)})
