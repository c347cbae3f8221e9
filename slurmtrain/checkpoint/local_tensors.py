"""The part of a tensor that this rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.boxes import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a DTensor, without importing torch.distributed.tensor, which costs most of a second."""
    return hasattr(tensor, "__create_chunk_list__") and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, sharing memory with `tensor`."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def box_of(name: str, tensor: Tensor) -> Box:
    """Return the part of the global tensor that this rank holds.

    Raises:
        CheckpointError: the tensor's layout has no box: partial sums, or no data at all.
    """
    if not is_dtensor(tensor):
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            kind = (
                "a meta tensor" if tensor.is_meta else str(tensor.layout if not tensor.is_quantized else tensor.dtype)
            )
            raise CheckpointError(f"{name} is {kind}; only dense tensors with data can be saved")
        return Box.whole(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{name} is a partial sum over ranks, which has no value yet", hint="redistribute() it first"
        )
    (chunk,) = tensor.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    if box.size != tuple(local(tensor).shape) and box.numel != 0:
        raise CheckpointError(f"{name}: {list(box.size)} of it should lie here, but {list(local(tensor).shape)} do")
    return box
