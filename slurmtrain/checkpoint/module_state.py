"""What modules hold: the names of it in a checkpoint, and whether and how their state can be restored.

It is restored into a module's live memory. A module whose state_dict gives copies (hooks that convert, pack or clone) is
refused: filling these would restore nothing, without a message. That is said when it is saved, because at the restore it is
too late.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.tensors import local

_EXTRA_KEY = "_extra_state"

T = TypeVar("T")
Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module under DistributedDataParallel and torch.compile.

    Checkpoints do not depend on how a run was parallel.
    """
    while True:
        inner = _wrapped(module)
        if inner is None:
            return module
        module = module._modules[inner]  # type: ignore[assignment]


def _wrapped(module: nn.Module) -> str | None:
    """Return the name of the child that `module` merely wraps, if it is such a wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "module"
    # Compared by name, since importing torch._dynamo takes a second.
    if type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo"):
        return "_orig_mod"
    return None


def clean_names(module: nn.Module, found: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return what a module has by its names in a checkpoint: as in its state_dict, less the components that wrappers add."""
    wrappers = {
        f"{prefix}.{inner}" if prefix else inner
        for prefix, submodule in module.named_modules(remove_duplicate=False)
        if (inner := _wrapped(submodule)) is not None
    }
    if not wrappers:
        return dict(found)
    cleaned: dict[str, T] = {}
    for name, entry in found:
        parts = name.split(".")
        kept = [part for end, part in enumerate(parts, 1) if ".".join(parts[:end]) not in wrappers]
        cleaned[".".join(kept)] = entry
    return cleaned


def entries(module: nn.Module) -> dict[str, Any]:
    """Return the state_dict of the unwrapped `module`, by the names of a checkpoint."""
    module = unwrap(module)
    return clean_names(module, module.state_dict().items())


def extra_owners(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules that have extra state, by its name in a checkpoint."""
    module = unwrap(module)
    owners = [
        (f"{prefix}.{_EXTRA_KEY}" if prefix else _EXTRA_KEY, submodule)
        for prefix, submodule in module.named_modules()
        if type(submodule).get_extra_state is not nn.Module.get_extra_state
    ]
    return clean_names(module, owners)


def is_extra(name: str) -> bool:
    """Return whether a tensor's name says that it belongs to a module's extra state."""
    return _EXTRA_KEY in name.split(".")


def held(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers of a module by all of their names in a checkpoint."""
    module = unwrap(module)
    pairs = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return clean_names(module, pairs)


def parameters(objects: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Return the parameters of the given modules by name; a tied one by all of its names."""
    return {
        f"{key}.{name}": tensor
        for key, value in objects.items()
        if isinstance(value, nn.Module)
        for name, tensor in held(value).items()
        if isinstance(tensor, nn.Parameter)
    }


def buffers(objects: Mapping[str, Any]) -> set[str]:
    """Return the names of the modules' buffers.

    Unlike parameters, they may differ between data parallel ranks by design, and the lowest rank's count.
    """
    modules = {key: value for key, value in objects.items() if isinstance(value, nn.Module)}
    return {f"{key}.{name}" for key, value in modules.items() for name in held(value)} - parameters(modules).keys()


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of every parameter of the given modules, by the parameter's id; of a tied one the first."""
    return {id(parameter): name for name, parameter in reversed(parameters(objects).items())}


def module_tensors(objects: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return parameters and buffers of the given modules by name, without extra state, which is made when asked for.

    Raises:
        CheckpointError: see `check_entries`.
    """
    found: dict[str, Tensor] = {}
    for key, value in objects.items():
        if isinstance(value, nn.Module):
            its = entries(value)
            check_entries(key, value, its)
            extra = extra_owners(value)
            found.update({f"{key}.{name}": entry for name, entry in its.items() if name not in extra})
    return found


def check_module(key: str, module: nn.Module, found: Mapping[str, Any], trained: Collection[int]) -> None:
    """Check that the entries `found` of a module's state_dict restore it.

    Args:
        trained: ids of the parameters that optimisers change.

    Raises:
        CheckpointError: something would not be restored; the message names it.
    """
    check_entries(key, module, found)
    places = {place_of(entry) for entry in found.values() if isinstance(entry, Tensor)}
    for name, tensor in held(module).items():
        if id(tensor) in trained and name not in found and place_of(tensor) not in places:
            raise CheckpointError(
                f"{key}.{name} is trained, and {type(unwrap(module)).__name__}.state_dict() leaves it out",
                hint="hand in a module that gives it, or freeze it and leave it out of the optimiser",
            )


def check_entries(key: str, module: nn.Module, found: Mapping[str, Any]) -> None:
    """Check that the entries `found` of a module's state_dict are the memory of its parameters and buffers, or extra state.

    Raises:
        CheckpointError: filling one would restore nothing; the message names it.
    """
    root = unwrap(module)
    own, extra = held(root), extra_owners(root)
    places = {place_of(tensor) for tensor in own.values()}
    for name, entry in found.items():
        strided = name in own and own[name].layout == torch.strided
        if strided and any(n > 1 and not stride for stride, n in zip(own[name].stride(), own[name].shape, strict=True)):
            raise CheckpointError(
                f"{key}.{name} is expanded, so that several of its elements are one, and cannot be filled",
                hint="make it with .contiguous() or .clone() after .expand()",
            )
        is_live = isinstance(entry, Tensor) and (place_of(entry) in places or (entry.numel() == 0 and name in own))
        if name not in extra and not is_live:
            raise CheckpointError(
                f"{type(root).__name__}.state_dict() gives {key}.{name}, a {type(entry).__name__} that is not the memory of "
                "a parameter or buffer of it, so that nothing would be restored by filling it",
                hint="leave out hooks that convert, copy or add entries, and give more by get_extra_state() and "
                "set_extra_state(); fully_shard (FSDP2) in place of FullyShardedDataParallel (FSDP1)",
            )


def loads_by_itself(module: nn.Module) -> bool:
    """Return whether code outside torch, a hook or a method of its own, takes part in how `module` loads its state."""
    for submodule in unwrap(module).modules():
        hooks = (*submodule._load_state_dict_pre_hooks.values(), *submodule._load_state_dict_post_hooks.values())
        if any(not _of_torch(hook) for hook in hooks):
            return True
        methods = (type(submodule).load_state_dict, type(submodule)._load_from_state_dict)
        if "load_state_dict" in vars(submodule) or any(not _of_torch(method) for method in methods):
            return True
    return False


def _of_torch(function: Any) -> bool:
    while True:
        inner = getattr(function, "hook", None) or (function.func if isinstance(function, functools.partial) else None)
        if inner is None:
            break
        function = inner
    return str(getattr(function, "__module__", "") or type(function).__module__).partition(".")[0] == "torch"


def place_of(tensor: Tensor) -> Place:
    """Return an identifier of the memory and shape of a tensor, equal for tensors that are the same view of the same memory."""
    part = local(tensor.detach())
    if part.layout != torch.strided:
        return id(tensor), part.shape, (), part.dtype
    return part.data_ptr(), part.shape, part.stride(), part.dtype
