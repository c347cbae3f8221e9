"""Checks whether the result of an object's state_dict() can be restored, and by which way.

It is restored into the object's live memory, or by its own load_state_dict.

Most modules return their parameters themselves, which are filled in place. Some return copies (hooks that convert, pack
or clone), and some optimisers keep a part of their state elsewhere: filling what they return would restore nothing,
without a message. State that cannot be restored is refused when it is saved, because at the restore it is too late.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slurmtrain.checkpoint.local_tensors import is_dtensor, local
from slurmtrain.errors import CheckpointError

# Modules.


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


_EXTRA_KEY = "_extra_state"


def is_extra(name: str) -> bool:
    """Return whether a tensor's name says that it belongs to a module's extra state, or to an entry that is no tensor."""
    return _EXTRA_KEY in name.split(".")


def name_within(name: str) -> str:
    """Return the name that begins those of the tensors within the entry `name` of a module."""
    return name if is_extra(name) else f"{name}.{_EXTRA_KEY}"


Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def _place(tensor: Tensor) -> Place:
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


def copies(module: nn.Module, found: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors among its entries `found` that are not the memory of a parameter or a buffer."""
    held = _held(unwrap(module))
    places = {_place(tensor) for tensor in held.values()}
    return {
        name
        for name, entry in found.items()
        if isinstance(entry, Tensor) and not (entry.numel() == 0 and name in held) and _place(entry) not in places
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
    places = {_place(entry) for entry in found.values() if isinstance(entry, Tensor)}
    for name, tensor in held.items():
        if id(tensor) in trained and name not in found and not own_way and _place(tensor) not in places:
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


# Optimisers.


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimiser whose groups and state a mere wrapper (Accelerate's) shows as its own."""
    for inner in inner_optimizers(optimizer):
        if inner.state is optimizer.state and inner.param_groups is optimizer.param_groups:
            return plain_optimizer(inner)
    return optimizer


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimisers that `optimizer` has as attributes (SAM, Lookahead)."""
    return [value for value in _reachable(vars(optimizer).values()) if isinstance(value, Optimizer)]


def _reachable(values: Iterable[Any], depth: int = 3) -> Iterator[Any]:
    """Yield the values and, for lists, tuples, sets and dicts, their items."""
    for value in values:
        if isinstance(value, (list, tuple, set, frozenset)) and depth:
            yield from _reachable(value, depth - 1)
        elif isinstance(value, Mapping) and depth:
            yield from _reachable(value.values(), depth - 1)
        else:
            yield value


_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether the state is what the optimiser's own state_dict() says, not `state` and `param_groups` alone."""
    return (
        type(optimizer).state_dict is not Optimizer.state_dict
        or "state_dict" in vars(optimizer)
        or any(getattr(optimizer, hooks, None) for hooks in _HOOKS)
    )


def waits_before_steps(optimizer: Optimizer) -> bool:
    """Return whether nothing but a step that runs torch's hooks changes what `optimizer` owns, as far as can be known."""
    hooked = hasattr(optimizer, "_optimizer_step_pre_hooks") and getattr(type(optimizer).step, "hooked", False)
    return bool(hooked) and not inner_optimizers(optimizer) and not has_own_state_dict(optimizer)


def own_state_dict(key: str, optimizer: Optimizer) -> dict[str, Any] | None:
    """Return the state of an optimiser that has a state_dict of its own; None: `state` and `param_groups` are all of it.

    Raises:
        CheckpointError: each rank has another part of the state.
    """
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise CheckpointError(
            f"{key} is a ZeroRedundancyOptimizer, which keeps another part of its state on every rank, in no state_dict",
            hint="shard the optimiser with the model: torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    if not has_own_state_dict(optimizer):
        return None
    found = optimizer.state_dict()
    if not isinstance(found, dict):
        raise CheckpointError(f"{key}.state_dict() gives a {type(found).__name__} and no dict")
    return None if _is_standard(optimizer, found) else found


def _is_standard(optimizer: Optimizer, found: Mapping[str, Any]) -> bool:
    """Return whether a state_dict has the same content as `state` and `param_groups`.

    These are saved by the names of the parameters.
    """
    if found.keys() != {"state", "param_groups"} or not isinstance(found["state"], Mapping):
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ours = {number: optimizer.state[each] for number, each in enumerate(parameters) if optimizer.state.get(each)}
    theirs = {number: fields for number, fields in found["state"].items() if fields}
    groups = found["param_groups"]
    return (
        ours.keys() == theirs.keys()
        and all(theirs[number].keys() == fields.keys() for number, fields in ours.items())
        and all(theirs[number][name] is value for number, fields in ours.items() for name, value in fields.items())
        and len(groups) == len(optimizer.param_groups)
        and all(group.keys() == own.keys() for group, own in zip(groups, optimizer.param_groups, strict=True))
    )


def check_optimizer(key: str, optimizer: Optimizer, handed_in: Collection[int]) -> None:
    """Check that what is saved of an optimiser is all of its state.

    Args:
        handed_in: ids of all objects that are saved.

    Raises:
        CheckpointError: the optimiser keeps state elsewhere.
    """
    kind = type(optimizer).__name__
    given = own_state_dict(key, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = {id(parameter) for parameter in parameters}
    if given is not None:
        for mapping in _mappings(given):
            if not ids.isdisjoint(name for name in mapping if isinstance(name, int)):
                raise CheckpointError(
                    f"{kind}.state_dict() names the parameters of {key} by their place in memory (id()), which is another "
                    "one when the run resumes",
                    hint="name them by their position, as torch.optim.Optimizer.state_dict() does",
                )
    if given is not None and _leaves_out(optimizer.state, given):
        raise CheckpointError(
            f"{kind}.state_dict() leaves out a part of the state of {key}", hint="it has to give all that is in .state"
        )
    for inner in inner_optimizers(optimizer):
        if id(inner) in handed_in or inner.state is optimizer.state:
            continue
        if given is None or _leaves_out(inner.state, given):
            name = next((name for name, value in vars(optimizer).items() if value is inner), "its optimiser")
            raise CheckpointError(
                f"{key} ({kind}) keeps the state of a {type(inner).__name__} in .{name}, which its state_dict() leaves out",
                hint=f"hand it in, too: save(step, ..., {key}={key}, {name}={key}.{name}), and likewise to restore()",
            )
    if given is None and type(optimizer).__module__.partition(".")[0] != "torch":
        skipped = ("state", "param_groups", "defaults")
        others = [value for name, value in vars(optimizer).items() if name not in skipped]
        known = {_place(tensor)[0] for tensor in (*parameters, *_tensors(optimizer.state))}
        known |= {_place(parameter.grad)[0] for parameter in parameters if parameter.grad is not None}
        beside = [
            tensor
            for tensor in _reachable(others)
            if isinstance(tensor, Tensor) and not tensor.is_meta and _place(tensor)[0] not in known
        ]
        if parameters and _numel(beside) >= sum(parameter.numel() for parameter in parameters):
            where = [
                name
                for name, value in vars(optimizer).items()
                if name not in skipped and any(isinstance(one, Tensor) for one in _reachable([value]))
            ]
            raise CheckpointError(
                f"{key} ({kind}) keeps tensors of its parameters' size in .{', .'.join(where)}, which state_dict() leaves out",
                hint="keep them in .state, or give them by state_dict() and take them by load_state_dict()",
            )


def _mappings(value: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(value, Mapping):
        yield value
        for item in value.values():
            yield from _mappings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _mappings(item)


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in _reachable([value], depth=8) if isinstance(one, Tensor)]


def _numel(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _leaves_out(state: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a state_dict has less than the tensors of `state`: neither these nor copies of as many elements."""
    places = {_place(tensor) for tensor in _tensors(given)}
    missing = [tensor for tensor in _tensors(state) if _place(tensor) not in places]
    return bool(missing) and _numel(_tensors(given)) < _numel(_tensors(state))


class Groups:
    """The groups of optimisers that share them (SAM and its base), as they were before a restore.

    A restore gives each optimiser a list of its own.
    """

    def __init__(self, optimizers: Iterable[Optimizer]):
        every = [one for each in map(plain_optimizer, optimizers) for one in (each, *inner_optimizers(each))]
        self._before = [(one, one.param_groups, list(one.param_groups)) for one in every]

    def share_again(self) -> None:
        """Put what was loaded into the lists and dicts that were there before, so that every object that holds them sees it."""
        for optimizer, groups, each in self._before:
            loaded = optimizer.param_groups
            if loaded is groups or len(loaded) != len(each):
                continue
            for before, after in zip(each, loaded, strict=True):
                if before is not after:
                    values = dict(after)
                    before.clear()
                    before.update(values)
            groups[:] = each
            optimizer.param_groups = groups
