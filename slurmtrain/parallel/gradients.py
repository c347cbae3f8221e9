"""The norm of all gradients, and clipping by it, for any distribution of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

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
    """Scale all gradients so that their norm is at most `limit`.

    `nn.utils.clip_grad_norm_` adds up the parts of DTensors on one mesh; pipeline stages have no mesh in common. Here
    every rank adds up its own part, where an element that n ranks hold counts 1/n on each, and one sum over all ranks
    does for any layout.

    Args:
        parameters: DTensors.
        limit: the greatest norm; 0: gradients are not scaled.
        group: all ranks; None for a single one.
        tied_parameters: those of `parameters` that another stage of the pipeline also has, with the same gradient.
        waiting: returns a context for the sum over the ranks.

    Returns:
        The norm before, a scalar.
    """
    gradients = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    twice = {id(parameter.grad) for parameter in tied_parameters}
    local = [gradient.to_local() for gradient in gradients]
    norms = torch._foreach_norm(local)
    by_holders: dict[int, list[Tensor]] = {}
    for gradient, norm in zip(gradients, norms, strict=True):
        by_holders.setdefault(holders(gradient) * (2 if id(gradient) in twice else 1), []).append(norm)
    # No tensor comes from the host, since its copy would wait until the GPU has finished its backward pass.
    parts = [torch.stack(norms).double().square().sum() / count for count, norms in by_holders.items()]
    total = torch.stack(parts).sum()
    if group is not None:
        with waiting():
            dist.all_reduce(total, group=group)
    norm = total.sqrt().float()
    if limit:
        torch._foreach_mul_(local, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def holders(tensor: Tensor) -> int:
    """Return the number of ranks of the tensor's mesh that hold the same elements."""
    assert isinstance(tensor, DTensor)
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
