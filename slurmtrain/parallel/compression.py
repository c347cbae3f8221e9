"""Gradient compression: replicas (DDP) exchange gradients in fewer bytes. FSDP2 has its own `reduce_dtype`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurmtrain.choices import GradientCompression

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compress(model: nn.parallel.DistributedDataParallel, how: GradientCompression, group: dist.ProcessGroup) -> None:
    """Make `model` exchange its gradients in the data type that `parallel.gradient_compression` names."""
    model.register_comm_hook(group, _in_dtype(_DTYPES[how]))


def _in_dtype(dtype: torch.dtype) -> Any:
    """Return a communication hook of DDP that adds up a bucket's gradients in `dtype`.

    torch's own `bf16_compress_hook` does the same, but DDP refuses it without CUDA.
    """

    # DDP compares annotations with types, and the postponed ones of this module are strings.
    def hook(group, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        small = buffer.to(dtype).div_(group.size())
        sent = dist.all_reduce(small, group=group, async_op=True).get_future()
        return sent.then(lambda done: buffer.copy_(done.value()[0]))

    return hook
