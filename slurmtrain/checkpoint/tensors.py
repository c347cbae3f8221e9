"""Tensors of this rank: what modules hold by the names of a checkpoint, which part of a tensor lies here, and its bytes.

What a module holds is restored into its live memory. One whose state_dict gives copies (hooks that convert, pack or clone)
is refused by `check_module`: filling these would restore nothing, without a message.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.manifest import Box

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


# Modules.

EXTRA_KEY = "_extra_state"  # the last part of the names of what modules give by get_extra_state

Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class ModuleState:
    """What a module holds, by names as in its state_dict, less the components that wrappers add.

    Attributes:
        root: the user's own module, see `unwrap`.
        entries: its state_dict.
        held: its parameters and buffers, by all of their names.
        extra: the submodules that have extra state, by the name of that.
    """

    root: nn.Module
    entries: dict[str, Any]
    held: dict[str, Tensor]
    extra: dict[str, nn.Module]


def module_state(module: nn.Module, key: str = "") -> ModuleState:
    """Return what `module` holds; all names begin with "key." where it has a key."""
    root = unwrap(module)
    wrapped: set[str] = set()  # names of the children that wrappers within have
    owners: dict[str, nn.Module] = {}
    for prefix, submodule in root.named_modules(remove_duplicate=False):
        begin = f"{prefix}." if prefix else ""
        if unwrap(submodule) is not submodule:
            wrapped.add(begin + next(iter(submodule._modules)))
        if type(submodule).get_extra_state is not nn.Module.get_extra_state:
            owners[begin + EXTRA_KEY] = submodule
    entries = root.state_dict()  # before the parameters, which FSDP gives back to their ranks when it is asked for this
    held = dict(root.named_parameters(remove_duplicate=False)) | dict(root.named_buffers(remove_duplicate=False))
    begin = f"{key}." if key else ""
    called: dict[str, str] = {}
    for name in (*entries, *held, *owners):
        parts = name.split(".") if wrapped else [name]
        kept = [part for end, part in enumerate(parts, 1) if ".".join(parts[:end]) not in wrapped]
        called[name] = begin + ".".join(kept)
    return ModuleState(
        root,
        {called[name]: entry for name, entry in entries.items()},
        {called[name]: tensor for name, tensor in held.items()},
        {called[name]: owner for name, owner in owners.items()},
    )


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module under DistributedDataParallel and torch.compile.

    Checkpoints do not depend on how a run was parallel.
    """
    while True:
        kind = type(module)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        # Compared by name, since importing torch._dynamo takes a second.
        elif kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo"):
            module = module._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return module


def check_module(module: ModuleState, trained: Collection[int]) -> None:
    """Check that the entries of a module's state_dict are the memory of its parameters and buffers, or extra state.

    Args:
        trained: ids of the parameters that optimisers change, none of which may be left out.

    Raises:
        CheckpointError: something would not be restored; the message names it.
    """
    kind, held, found = type(module.root).__name__, module.held, module.entries
    places = {place_of(tensor) for tensor in held.values()}
    for name, entry in found.items():
        strided = name in held and held[name].layout == torch.strided
        if strided and any(
            n > 1 and not stride for stride, n in zip(held[name].stride(), held[name].shape, strict=True)
        ):
            raise CheckpointError(
                f"{name} is expanded, so that several of its elements are one, and cannot be filled",
                hint="make it with .contiguous() or .clone() after .expand()",
            )
        is_live = isinstance(entry, Tensor) and (place_of(entry) in places or (entry.numel() == 0 and name in held))
        if name not in module.extra and not is_live:
            raise CheckpointError(
                f"{kind}.state_dict() gives {name}, a {type(entry).__name__} that is not the memory of "
                "a parameter or buffer of it, so that nothing would be restored by filling it",
                hint="leave out hooks that convert, copy or add entries, and give more by get_extra_state() and "
                "set_extra_state(); fully_shard (FSDP2) in place of FullyShardedDataParallel (FSDP1)",
            )
    given = {place_of(entry) for entry in found.values() if isinstance(entry, Tensor)}
    for name, tensor in held.items():
        if id(tensor) in trained and name not in found and place_of(tensor) not in given:
            raise CheckpointError(
                f"{name} is trained, and {kind}.state_dict() leaves it out",
                hint="hand in a module that gives it, or freeze it and leave it out of the optimiser",
            )


def place_of(tensor: Tensor) -> Place:
    """Return an identifier of the memory and shape of a tensor, equal for tensors that are the same view of the same memory."""
    part = local(tensor.detach())
    if part.layout != torch.strided:
        return id(tensor), part.shape, (), part.dtype
    return part.data_ptr(), part.shape, part.stride(), part.dtype


def loads_by_itself(module: nn.Module) -> bool:
    """Return whether code outside torch, a hook or a method of its own, takes part in how `module` loads its state."""
    for submodule in module.modules():
        if "load_state_dict" in vars(submodule):
            return True
        for function in (
            *submodule._load_state_dict_pre_hooks.values(),
            *submodule._load_state_dict_post_hooks.values(),
            type(submodule).load_state_dict,
            type(submodule)._load_from_state_dict,
        ):
            inner: Any = function
            while inner is not None:
                function = inner
                inner = getattr(inner, "hook", None) or (inner.func if isinstance(inner, functools.partial) else None)
            home = getattr(function, "__module__", "") or type(function).__module__
            if str(home).partition(".")[0] != "torch":
                return True
    return False
