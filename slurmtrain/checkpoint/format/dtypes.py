"""The names of element types, in a manifest and in safetensors files."""

from __future__ import annotations

import torch

from slurmtrain.checkpoint.errors import CheckpointError

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
