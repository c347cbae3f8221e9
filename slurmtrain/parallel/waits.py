"""Where a sharded model waits for the parameters and gradients of other ranks, for those who measure it.

FSDP2 has no public place for that: here the methods of its groups of parameters are wrapped, one object at a time. Where a
version of torch has no such methods, the waiting is not known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

# On a GPU, gathering goes on beside the computation, which waits for it and copies what has come in the second; gradients
# are laid together in the third, which also waits. On a CPU, all three hold up the rank.
ON_GPU = ("wait_for_unshard", "post_backward")
ON_CPU = ("unshard", *ON_GPU)


def mark_waits(
    stages: Sequence[nn.Module], waiting: Callable[[], AbstractContextManager[None]], *, on_gpu: bool
) -> bool:
    """Call what gathers parameters and scatters gradients within `waiting()`, from now on.

    Returns:
        False if this version of torch has no such calls; nothing is changed then.
    """
    found = [group for stage in stages for module in stage.modules() for group in _groups(module)]
    groups = list({id(group): group for group in found}.values())  # several modules may share one
    names = ON_GPU if on_gpu else ON_CPU
    if not groups or not all(callable(getattr(group, name, None)) for group in groups for name in names):
        return False
    for group in groups:
        for name in names:
            setattr(group, name, _within(getattr(group, name), waiting))
    return True


def _groups(module: nn.Module) -> Sequence[Any]:
    """Return the groups of parameters that FSDP2 gathers together for this module."""
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]


def _within(method: Callable[..., Any], waiting: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with waiting():
            return method(*arguments, **named)

    return wrapped
