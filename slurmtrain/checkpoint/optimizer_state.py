"""The state of optimisers: as tensors with names and plain values, and back.

It is keyed by parameter name, not by position, so that it can be read into another layout. It is taken from the optimiser
as it is: `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` on an optimiser that has not stepped yet runs a
step to create the state, which changes AdamW's step count (pytorch#164929).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.checkpoint.module_state import parameter_names
from slurmtrain.checkpoint.plain_values import decoded, encode

OWN_WAY = "own"  # marks, in a checkpoint, what an optimiser has given by a state_dict of its own
# Tensors of a parameter's shape that torch's optimisers keep for each, beyond which nothing large is known.
_MOMENTS = {"SGD": 1, "Adagrad": 1, "Adadelta": 2, "RMSprop": 3, "Rprop": 2, "Adafactor": 1, "Muon": 1}
# Settings of how a step is computed, which belong to this run's layout and device, not to the checkpoint's.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimiser whose groups and state a mere wrapper (Accelerate's) shows as its own."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and inner.state is optimizer.state and inner.param_groups is optimizer.param_groups:
        return plain_optimizer(inner)
    return optimizer


def _inner_optimizer(optimizer: Optimizer) -> str | None:
    """Return the name of the attribute in which `optimizer` has another one (SAM, Lookahead)."""
    return next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether the state is what the optimiser's own state_dict() says, not `state` and `param_groups` alone."""
    hooks = (getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    overridden = type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer)
    return overridden or any(hooks)


def waits_before_steps(optimizer: Optimizer) -> bool:
    """Return whether nothing but a step that runs torch's hooks changes what `optimizer` owns, as far as can be known."""
    hooked = hasattr(optimizer, "_optimizer_step_pre_hooks") and getattr(type(optimizer).step, "hooked", False)
    return bool(hooked) and _inner_optimizer(optimizer) is None and not has_own_state_dict(optimizer)


def check_optimizer(key: str, optimizer: Optimizer) -> None:
    """Check that what is saved of an optimiser is all of its state.

    Raises:
        CheckpointError: the optimiser keeps state elsewhere.
    """
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise CheckpointError(
            f"{key} is a ZeroRedundancyOptimizer, which keeps another part of its state on every rank, in no state_dict",
            hint="shard the optimiser with the model: torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    inner = _inner_optimizer(optimizer)
    if inner is not None and not has_own_state_dict(optimizer):
        raise CheckpointError(
            f"{key} ({type(optimizer).__name__}) keeps another optimiser in .{inner}, whose state its state_dict() leaves out",
            hint="give it a state_dict() and a load_state_dict() that have all of the state, that of the inner one included",
        )


def flatten_optimizer(key: str, optimizer: Optimizer, names: Mapping[int, str], tensors: dict[str, Tensor]) -> Any:
    """Return JSON of the state and the groups, by the names of parameters; tensors are moved to `tensors`, as `encode` does.

    Raises:
        CheckpointError: what it keeps for a parameter has no names.
    """
    groups: list[dict[str, Any]] = []
    fields: dict[str, Any] = {}
    for group in optimizer.param_groups:
        keys = [_name_of(parameter, names) for parameter in group["params"]]
        groups.append({**group, "params": keys})
        for name, parameter in zip(keys, group["params"], strict=True):
            if parameter not in optimizer.state:
                continue
            held = optimizer.state[parameter]
            if not isinstance(held, Mapping):
                raise CheckpointError(
                    f"{key} ({type(optimizer).__name__}) keeps a {type(held).__name__} for {name}, and not a dict",
                    hint="keep a dict of named values for each parameter, as torch's optimisers do",
                )
            fields[name] = dict(held)
    beside = {field: value for field, value in optimizer.state.items() if not isinstance(field, Tensor)}
    return encode({"state": fields, "param_groups": groups, "beside": beside}, key, tensors)


def _is_group(value: Any) -> bool:
    names = value.get("params") if isinstance(value, dict) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def load_optimizer(
    key: str,
    optimizer: Optimizer,
    names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
    plain: Any,
    *,
    dropped: Collection[str],
    lenient: bool,
    convert: bool,
) -> None:
    """Give an optimiser its state.

    Args:
        names: of the parameters by their id.
        tensors: those of the checkpoint, by name.
        plain: what `flatten_optimizer` returned beside them.
        dropped: names of its tensors that are not in `tensors`: of parameters that begin anew.
        lenient: parameters that the checkpoint's groups lack keep what they have.
        convert: state takes its parameter's dtype.

    Raises:
        CheckpointError: the checkpoint's state is not that of an optimiser.
        CheckpointMismatchError: its groups are others.
    """
    wrong = CheckpointError(f"the state of {key} in the checkpoint is not that of an optimiser")
    saved = plain.get("state") if isinstance(plain, dict) else None
    if not isinstance(saved, dict):
        raise wrong
    beside, groups = (decoded(key, plain.get(part), tensors) for part in ("beside", "param_groups"))
    if not (isinstance(beside, dict) and isinstance(groups, list) and all(map(_is_group, groups))):
        raise wrong
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointMismatchError(
            f"{key} has {len(optimizer.param_groups)} parameter groups, and {len(groups)} in the checkpoint",
            hint="were parameters frozen, or groups changed, since it was saved?",
        )
    on_this_rank = set(names.values())
    state: dict[Any, Any] = {}
    param_groups: list[dict[str, Any]] = []
    number = 0
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        keys = [_name_of(parameter, names) for parameter in group["params"]]
        # The checkpoint's group may have parameters that other ranks hold.
        different = sorted(set(keys) ^ (set(values["params"]) & on_this_rank))
        if different and not lenient:
            raise CheckpointMismatchError(
                f"{key}: a parameter group holds other parameters than in the checkpoint: {', '.join(different[:5])}",
                hint="to continue all the same: checkpoint.allow=[keys]",
            )
        numbers = []
        for name in keys:
            if name in saved and not any(each.startswith(f"{key}.state.{name}.") for each in dropped):
                state[number] = decoded(key, saved[name], tensors)
                if not isinstance(state[number], dict):
                    raise wrong
            numbers.append(number)
            number += 1
        kept = {name: group[name] for name in _IMPLEMENTATION if name in group}
        param_groups.append({**values, **kept, "params": numbers})
    optimizer.load_state_dict({"state": {**state, **beside}, "param_groups": param_groups})
    if not convert:
        _undo_casts(optimizer, state)


def _undo_casts(optimizer: Optimizer, state: Mapping[int, Mapping[Any, Any]]) -> None:
    """Restore the types of an optimiser's state.

    torch's load_state_dict gives floating-point state its parameter's dtype, so that a master copy in fp32 would be
    lost, and turns a text into the repr of a generator object.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, fields in state.items():
        held = optimizer.state[parameters[number]]
        for field, value in fields.items():
            if field in held:
                held[field] = _as_saved(value, held[field])


def _as_saved(value: Any, held: Any) -> Any:
    """Return `value`, moved to the devices of `held`."""
    if isinstance(value, Tensor):
        if not isinstance(held, Tensor) or held.dtype == value.dtype:
            return held
        return value.to(held.device)
    if isinstance(value, dict):
        return {key: _as_saved(item, held[key]) if key in held else item for key, item in value.items()}
    if isinstance(value, (list, tuple)) and isinstance(held, (list, tuple)) and len(value) == len(held):
        return type(value)(_as_saved(item, other) for item, other in zip(value, held, strict=True))
    return value


def _name_of(parameter: Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"the optimiser has a parameter of shape {list(parameter.shape)} that no given module has",
            hint="pass the module and its optimiser together: save(step, model=model, optimizer=optimizer)",
        )
    return names[id(parameter)]


def merge_plain(everyones: Sequence[Mapping[str, Any]], optimizers: Collection[str]) -> dict[str, Any]:
    """Merge the plain state of ranks that hold different parts of a model: what their optimisers know of all parameters.

    Everything else is the first rank's, which the others have, too.
    """
    merged = dict(everyones[0])
    for other in everyones[1:]:
        merged = {**other, **merged}
        for key in optimizers:
            if key not in other or merged[key] is other[key] or OWN_WAY in merged[key] or OWN_WAY in other[key]:
                continue
            groups = []
            for group, other_group in zip(merged[key]["param_groups"], other[key]["param_groups"], strict=True):
                new = [name for name in other_group["params"] if name not in group["params"]]
                groups.append({**group, "params": [*group["params"], *new]})
            state = {**other[key]["state"], **merged[key]["state"]}
            merged[key] = {**other[key], **merged[key], "param_groups": groups, "state": state}
    return merged


def waiting_optimizers(objects: Mapping[str, Any]) -> dict[str, Optimizer]:
    """Return the given optimisers whose steps can be made to wait."""
    found = {key: plain_optimizer(value) for key, value in objects.items() if isinstance(value, Optimizer)}
    return {key: optimizer for key, optimizer in found.items() if waits_before_steps(optimizer)}


def changed_by_optimizers(objects: Mapping[str, Any], tensors: Collection[str]) -> set[str]:
    """Return the names of the tensors that only steps of the given optimisers change: their parameters, and their own state."""
    names = parameter_names(objects)
    waiting = waiting_optimizers(objects)
    found = {
        names[id(parameter)]
        for optimizer in waiting.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }
    return found | of_optimizers(waiting, tensors)


def of_optimizers(keys: Collection[str], tensors: Collection[str]) -> set[str]:
    """Return the names of those of `tensors` that the optimisers of these names keep for parameters."""
    prefixes = tuple(f"{key}.state." for key in keys)
    return {name for name in tensors if prefixes and name.startswith(prefixes)}


def expected_optimizer_state(objects: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return stand-ins, of the same size and layout, for the state that optimisers will have after their first step."""
    names = parameter_names(objects)
    expected: dict[str, Tensor] = {}
    for key, value in objects.items():
        if isinstance(value, Optimizer) and not value.state:
            moments = _MOMENTS.get(type(value).__name__, 2)
            for group in value.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and id(parameter) in names:
                        for number in range(moments):
                            expected[f"{key}.state.{names[id(parameter)]}.{number}"] = parameter.detach()
    return expected
