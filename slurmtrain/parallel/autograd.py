"""A typed call of functions whose gradient is our own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def differentiable(function: type[Function], *arguments: Any) -> Tensor:
    """Return what `function`'s forward makes of `arguments`; its backward gives the gradient.

    `Function.apply` has no types, and a subclass of ours does not count as torch's.
    """
    result: Tensor = function.apply(*arguments)
    return result
