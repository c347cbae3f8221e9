"""The norm of all gradients, and clipping by it, for any distribution of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    limit: float,
    group: dist.ProcessGroup | None,
    tied_parameters: Sequence[nn.Parameter] = (),
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """Scale all gradients so that their norm is at most `limit`, and return the norm before, a scalar.

    Args:
        parameters: DTensors.
        limit: the greatest norm; 0: gradients are not scaled.
        group, tied_parameters, waiting: as for `total_norm`.
    """
    gradients = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    tied = [parameter.grad for parameter in tied_parameters if parameter.grad is not None]
    norm = total_norm(gradients, group, tied, waiting)
    if limit:
        torch._foreach_mul_([each.to_local() for each in gradients], (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def total_norm(
    tensors: Sequence[Any],
    group: dist.ProcessGroup | None,
    tied: Sequence[Tensor] = (),
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """Return the norm of all DTensors of all ranks, a scalar. All ranks call it together.

    `nn.utils.get_total_norm` adds up the parts of DTensors on one mesh; pipeline stages have no mesh in common. Here
    every rank adds up its own part, where an element that n ranks hold counts 1/n on each, and one sum over all ranks
    does for any layout.

    Args:
        group: all ranks; None for a single one.
        tied: those of `tensors` that another stage of the pipeline has as well.
        waiting: returns a context for the sum over the ranks.
    """
    twice = {id(tensor) for tensor in tied}
    norms = torch._foreach_norm([tensor.detach().to_local() for tensor in tensors])
    by_holders: dict[int, list[Tensor]] = {}
    for tensor, norm in zip(tensors, norms, strict=True):
        by_holders.setdefault(_holders(tensor) * (2 if id(tensor) in twice else 1), []).append(norm)
    # No tensor comes from the host, since its copy would wait until the GPU has finished its backward pass.
    parts = [torch.stack(norms).double().square().sum() / count for count, norms in by_holders.items()]
    total = torch.stack(parts).sum()
    if group is not None:
        with waiting():
            dist.all_reduce(total, group=group)
    return total.sqrt().float()


def _holders(tensor: Tensor) -> int:
    """Return the number of ranks of the tensor's mesh that hold the same elements."""
    assert isinstance(tensor, DTensor)
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
