"""Tensors of this rank: the names of their types, which part of them lies here, their bytes, and whether these are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# https://github.com/huggingface/safetensors#format. What it has no name for is stored as bytes; the manifest has the real type.
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        CheckpointError: this torch has no dtype of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):  # quantised tensors have no plain bytes
        raise CheckpointError(f"dtype {name!r} is unknown to torch {torch.__version__}")
    return dtype


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
    if box.size != tuple(local(tensor).shape) and 0 not in box.size:
        raise CheckpointError(f"{name}: {list(box.size)} of it should lie here, but {list(local(tensor).shape)} do")
    return box


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# Parameters that are not finite stay so: no later step mends them, and a checkpoint of them is worthless.

CHUNK_BYTES = 256 << 10  # stays in a core's cache, with what is worked out from it
# What numpy has no type for, or is slow in: the exponent's bits, all of which are set in infinity and NaN.
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
_NUMPY = {torch.float32: "<f4", torch.float64: "<f8"}


def bytes_are_finite(data: memoryview, dtype: torch.dtype) -> bool:
    """Return whether all elements of a tensor in host memory are finite; True for types that are not looked into.

    A tenth of the time of a digest, in one thread, while others run.
    """
    if dtype in _NUMPY:
        values = np.frombuffer(data, dtype=_NUMPY[dtype])
        step = CHUNK_BYTES // values.itemsize
        return all(bool(np.isfinite(values[begin : begin + step]).all()) for begin in range(0, len(values), step))
    if dtype in _EXPONENTS:
        words, exponent = np.frombuffer(data, dtype="<u2"), np.uint16(_EXPONENTS[dtype])
        step = CHUNK_BYTES // words.itemsize
        return all(
            int((words[begin : begin + step] & exponent).max()) != exponent for begin in range(0, len(words), step)
        )
    return True


def not_finite(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of those of which this rank's part has an element that is not finite."""
    parts = {
        name: local(tensor.detach())
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not tensor.is_meta
    }
    parts = {name: part for name, part in parts.items() if part.numel()}
    # The sum of squares is the fastest on every device; where it is too large for its type, the largest element tells.
    suspects = _of_infinite_norm(parts, 2)
    return _of_infinite_norm({name: parts[name] for name in suspects}, math.inf)


def _of_infinite_norm(parts: Mapping[str, Tensor], order: float) -> set[str]:
    if not parts:
        return set()
    norms = torch._foreach_norm(list(parts.values()), order)
    finite = torch.stack([norm.float() for norm in norms]).isfinite().tolist()
    return {name for name, each in zip(parts, finite, strict=True) if not each}
