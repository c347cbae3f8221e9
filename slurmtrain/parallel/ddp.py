"""Data parallelism: every rank holds the whole model, gradients are averaged while backward still runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn


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


def warm_up_ddp_buckets(model: nn.Module, backward: Callable[[], None] | None = None) -> None:
    """Let DDP reach its final buckets before the first step counts.

    DDP reduces in one bucket during its first backward and regroups by arrival order afterwards. A sum over ranks is
    rounded according to its place in a bucket, so the first step after a restart would differ in its last bits from the
    same step of a run that was never interrupted. One backward whose gradients are discarded makes all real steps
    alike; random state and buffers are left as they were.

    Args:
        backward: one forward and backward pass through `model` on any batch of the usual shape. None: a pass over all
            trained parameters in their order, without a batch; no gradient may be in the model yet.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        without_trace(model, backward or partial(_backward_without_batch, model))


def _backward_without_batch(model: nn.parallel.DistributedDataParallel) -> None:
    """Run a backward pass through DDP in which every trained parameter takes part, in reverse order, with gradients of 0."""
    module, trained = model.module, [each for each in model.module.parameters() if each.requires_grad]
    if model.find_unused_parameters or model.static_graph:
        return  # buckets stay as they are; or the first pass has to be a real one
    if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in trained):
        return  # somebody steps the optimiser within the backward pass
    replaced, synchronises = vars(module).get("forward"), model.require_backward_grad_sync
    module.forward = lambda: torch.stack([(each * 0).sum().float() for each in trained]).sum()
    model.require_backward_grad_sync = True  # also within no_sync
    try:
        model().backward()
    finally:
        model.require_backward_grad_sync = synchronises
        if replaced is None:
            del module.forward
        else:
            module.forward = replaced


def without_trace(model: nn.Module, backward: Callable[[], None]) -> None:
    """Call `backward`, then clear gradients and restore buffers and random state."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        backward()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.data.copy_(before)
    model.zero_grad(set_to_none=True)
