"""What modules hold: the names of it in a checkpoint, and whether and how their state can be restored.

It is restored into a module's live memory, or by its own load_state_dict. Most modules return their parameters
themselves, which are filled in place. Some return copies (hooks that convert, pack or clone): filling these would restore
nothing, without a message. State that cannot be restored is refused when it is saved, because at the restore it is too
late.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.tensors import is_dtensor, local

_EXTRA_KEY = "_extra_state"

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


class Names:
    """The names of a module's entries in a checkpoint: as in its state_dict, less the components that wrappers add."""

    def __init__(self, module: nn.Module):
        self._wrappers = {
            f"{prefix}.{inner}" if prefix else inner
            for prefix, submodule in module.named_modules(remove_duplicate=False)
            if (inner := _wrapped(submodule)) is not None
        }

    def __call__(self, name: str) -> str:
        """Return `name` without the components that wrappers within the module have added to it."""
        if not self._wrappers:
            return name
        parts = name.split(".")
        return ".".join(part for end, part in enumerate(parts, 1) if ".".join(parts[:end]) not in self._wrappers)


def entries(module: nn.Module) -> dict[str, Any]:
    """Return the state_dict of the unwrapped `module`, by the names of a checkpoint."""
    module = unwrap(module)
    clean = Names(module)
    return {clean(name): entry for name, entry in module.state_dict().items()}


def extra_owners(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules that have extra state, by its name in a checkpoint."""
    module = unwrap(module)
    clean = Names(module)
    return {
        clean(f"{prefix}.{_EXTRA_KEY}" if prefix else _EXTRA_KEY): submodule
        for prefix, submodule in module.named_modules()
        if type(submodule).get_extra_state is not nn.Module.get_extra_state
    }


def is_extra(name: str) -> bool:
    """Return whether a tensor's name says that it belongs to a module's extra state, or to an entry that is no tensor."""
    return _EXTRA_KEY in name.split(".")


def name_within(name: str) -> str:
    """Return the name that begins those of the tensors within the entry `name` of a module."""
    return name if is_extra(name) else f"{name}.{_EXTRA_KEY}"


def parameters(objects: Mapping[str, Any], *, all_names: bool = False) -> dict[str, nn.Parameter]:
    """Return the parameters of the given modules by name; a tied one by its first name, or by all of its names."""
    return {
        f"{key}.{clean(name)}": parameter
        for key, value in objects.items()
        if isinstance(value, nn.Module)
        for clean in (Names(unwrap(value)),)
        for name, parameter in unwrap(value).named_parameters(remove_duplicate=not all_names)
    }


def buffers(objects: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the modules' buffers.

    Unlike parameters, they may differ between data parallel ranks, and rank 0's count.
    """
    return frozenset(
        f"{key}.{clean(name)}"
        for key, value in objects.items()
        if isinstance(value, nn.Module)
        for clean in (Names(unwrap(value)),)
        for name, _ in unwrap(value).named_buffers(remove_duplicate=False)
    )


def broadcast_buffers(objects: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the buffers that DDP replaces by rank 0's before each forward pass.

    Between two forward passes they differ by design.
    """
    return buffers(
        {
            key: value
            for key, value in objects.items()
            if isinstance(value, nn.parallel.DistributedDataParallel) and value.broadcast_buffers
        }
    )


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of every parameter of the given modules, by the parameter's id."""
    return {id(parameter): name for name, parameter in parameters(objects).items()}


def trained_parameters(objects: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Return the parameters of the given modules that can be trained, by all of their names."""
    return {name: each for name, each in parameters(objects, all_names=True).items() if each.requires_grad}


def module_tensors(objects: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return parameters and buffers of the given modules by name, without extra state, which is made when asked for."""
    return {
        f"{key}.{name}": entry
        for key, value in objects.items()
        if isinstance(value, nn.Module)
        for extra in (extra_owners(value),)
        for name, entry in entries(value).items()
        if name not in extra and isinstance(entry, Tensor)
    }


def check_module(key: str, module: nn.Module, found: Mapping[str, Any], trained: Collection[int]) -> None:
    """Check that the entries `found` of a module's state_dict restore it.

    Args:
        trained: ids of the parameters that optimisers change.

    Raises:
        CheckpointError: something would not be restored; the message names it.
    """
    root = unwrap(module)
    for submodule in root.modules():
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(submodule).__mro__):
            raise CheckpointError(
                f"{key} is wrapped by FullyShardedDataParallel (FSDP1), whose state_dict() gives copies of its parameters",
                hint="use torch.distributed.fsdp.fully_shard (FSDP2)",
            )
    held, extra = _held(root), extra_owners(root)
    apart = copies(root, found)
    own_way = loads_by_itself(root)
    kind = type(root).__name__
    for name, entry in found.items():
        full = f"{key}.{name}"
        if name in extra:
            continue
        if not isinstance(entry, Tensor):
            if not own_way:
                raise CheckpointError(
                    f"{kind}.state_dict() gives {full}, a {type(entry).__name__}, which nothing would take back",
                    hint="give it by get_extra_state() and set_extra_state(), or add a load_state_dict hook that takes it",
                )
        elif name in apart:
            _check_copy(full, kind, entry, held.get(name), own_way=own_way)
    places = {place_of(entry) for entry in found.values() if isinstance(entry, Tensor)}
    for name, tensor in held.items():
        if id(tensor) in trained and name not in found and not own_way and place_of(tensor) not in places:
            raise CheckpointError(
                f"{key}.{name} is trained, and {kind}.state_dict() leaves it out",
                hint="hand in a module that gives it, or freeze it and leave it out of the optimiser",
            )


def _check_copy(name: str, kind: str, entry: Tensor, held: Tensor | None, *, own_way: bool) -> None:
    """Check an entry that is not the live tensor."""
    if held is not None and torch.promote_types(entry.dtype, held.dtype) != entry.dtype:
        raise CheckpointError(
            f"{kind}.state_dict() gives {name} as {entry.dtype}, and it is {held.dtype}: the checkpoint would lose bits",
            hint="convert a copy for other programs (`checkpoints RUN export --dtype`), not what is saved",
        )
    if own_way:
        return
    if held is None or entry.shape != held.shape or is_dtensor(entry) != is_dtensor(held):
        raise CheckpointError(
            f"{kind}.state_dict() gives {name}, which is no parameter or buffer of it, and nothing would take it back",
            hint="add the load_state_dict hook that is the inverse of the state_dict hook",
        )
    if not _same(entry.to(held.dtype), held):
        raise CheckpointError(
            f"{kind}.state_dict() gives other values for {name} than it holds, and nothing turns them back",
            hint="add the load_state_dict hook that is the inverse of the state_dict hook",
        )


def copies(module: nn.Module, found: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors among its entries `found` that are not the memory of a parameter or a buffer."""
    held = _held(unwrap(module))
    places = {place_of(tensor) for tensor in held.values()}
    return {
        name
        for name, entry in found.items()
        if isinstance(entry, Tensor) and not (entry.numel() == 0 and name in held) and place_of(entry) not in places
    }


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


def load(key: str, module: nn.Module, values: Mapping[str, Any]) -> None:
    """Pass `values`, by their names in a checkpoint, to the module's own load_state_dict, and check that they have arrived.

    Raises:
        CheckpointError: it does not take them, or gives back others.
    """
    module = unwrap(module)
    clean = Names(module)
    state = module.state_dict()
    raw = {clean(name): name for name in state}
    for name, value in values.items():
        state[raw.get(name, name)] = value
    if type(module).load_state_dict is nn.Module.load_state_dict and "load_state_dict" not in vars(module):
        unexpected = module.load_state_dict(state, strict=False).unexpected_keys
        if unexpected:
            raise CheckpointError(f"{key} does not take back what its state_dict() gave: {', '.join(unexpected[:5])}")
    else:
        module.load_state_dict(state)
    again = entries(module)
    for name, value in values.items():
        if isinstance(value, Tensor) and not (name in again and _same(again[name], value)):
            raise CheckpointError(
                f"{key}.{name} is not what was loaded: {type(module).__name__}.load_state_dict() does not give back what "
                "state_dict() gave",
                hint="its hooks have to be each other's inverse, bit by bit",
            )


def _same(one: Any, other: Tensor) -> bool:
    if not isinstance(one, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = local(one.detach()), local(other.detach())
    return torch.equal(left, right) or torch.equal(left.isnan() & right.isnan(), left.ne(right))


def place_of(tensor: Tensor) -> Place:
    """Return an identifier of the memory and shape of a tensor, equal for tensors that are the same view of the same memory."""
    part = local(tensor.detach())
    if part.layout != torch.strided:
        return id(tensor), part.shape, (), part.dtype
    return part.data_ptr(), part.shape, part.stride(), part.dtype


def _held(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers of an unwrapped module by all of their names in a checkpoint."""
    clean = Names(module)
    pairs = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {clean(name): tensor for name, tensor in pairs}
