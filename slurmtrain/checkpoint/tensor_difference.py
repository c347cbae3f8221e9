"""How much two tensors of the same name differ: whether by their shape, their type or their values. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two checkpoints.

    Attributes:
        relative: the largest absolute difference, divided by the largest absolute value of both; infinite where the two
            cannot be compared by numbers.
        why: "values", or what makes them incomparable: "only in the first", "another shape", "not finite".
    """

    name: str
    relative: float = math.inf
    why: str = "values"

    def described(self) -> str:
        """Return how it differs, in words."""
        return f"by {self.relative:.1e} relative" if self.why == "values" and math.isfinite(self.relative) else self.why
