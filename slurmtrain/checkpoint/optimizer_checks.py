"""Optimisers of other kinds than torch's own: what they wrap, and whether their state can be restored.

Some keep a part of their state elsewhere than in `state` and `param_groups`. What cannot be restored is refused when it is
saved, because at the restore it is too late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from slurmtrain.checkpoint.module_state import place_of
from slurmtrain.errors import CheckpointError

_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)


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
        known = {place_of(tensor)[0] for tensor in (*parameters, *_tensors(optimizer.state))}
        known |= {place_of(parameter.grad)[0] for parameter in parameters if parameter.grad is not None}
        beside = [
            tensor
            for tensor in _reachable(others)
            if isinstance(tensor, Tensor) and not tensor.is_meta and place_of(tensor)[0] not in known
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
    places = {place_of(tensor) for tensor in _tensors(given)}
    missing = [tensor for tensor in _tensors(state) if place_of(tensor) not in places]
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
