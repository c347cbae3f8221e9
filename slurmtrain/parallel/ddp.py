"""Data parallelism: every rank holds the whole model, gradients are averaged while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn


def apply_ddp(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    """Wrap `model` so that gradients are averaged over `group`; a single rank needs no wrapping.

    gradient_as_bucket_view: gradients live in the communication buffers, which saves a copy of all of them.
    """
    if group is None:
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(
        model, device_ids=device_ids, process_group=group, gradient_as_bucket_view=True
    )


def clip_whole_gradients(parameters: Sequence[nn.Parameter], limit: float) -> tuple[Tensor, list[Tensor | None]]:
    """Scale all gradients, which are whole and the same on all ranks, so that their norm is at most `limit`.

    As `nn.utils.clip_grad_norm_`, to the last bit; it does not return the norms that it adds up.

    Args:
        limit: the greatest norm; 0: gradients are not scaled.

    Returns:
        The norm before, a scalar; and of each parameter the norm of its gradient before, a scalar; None if it has none.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(()), [None] * len(parameters)
    norms = torch._foreach_norm(gradients)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if limit:
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
    each = iter(norms)
    return norm, [next(each) if parameter.grad is not None else None for parameter in parameters]


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which backward only accumulates: all micro batches of a step but the last need no communication."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        context: AbstractContextManager[None] = model.no_sync()
        return context
    return nullcontext()


def warm_up_ddp_buckets(model: nn.Module, backward: Callable[[], None]) -> None:
    """Let DDP reach its final buckets before the first step counts.

    DDP reduces in one bucket during its first backward and regroups by arrival order afterwards. A sum over ranks is
    rounded according to its place in a bucket, so the first step after a restart would differ in its last bits from the
    same step of a run that was never interrupted. One backward whose gradients are discarded makes all real steps
    alike; random state and buffers are left as they were.

    Args:
        backward: one forward and backward pass through `model` on any batch of the usual shape.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        without_trace(model, backward)


def without_trace(model: nn.Module, backward: Callable[[], None]) -> None:
    """Call `backward`, then clear gradients and restore buffers and random state."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        backward()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.data.copy_(before)
    model.zero_grad(set_to_none=True)
