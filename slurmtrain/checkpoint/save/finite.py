"""Check that parameters are finite. One that is not stays so: no later step mends it, and a checkpoint of it is worthless."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from slurmtrain.checkpoint.local_tensors import local

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
