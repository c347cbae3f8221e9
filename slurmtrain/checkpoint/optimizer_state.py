"""The state of optimisers: as tensors with names and plain values, and back.

It is keyed by parameter name, not by position, so that it can be read into another layout. It is taken from the optimiser
as it is: `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` on an optimiser that has not stepped yet runs a
step to create the state, which changes AdamW's step count (pytorch#164929).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.checkpoint.module_state import parameter_names
from slurmtrain.checkpoint.plain_values import decoded, encode

OWN_WAY = "own"  # marks what an optimiser has given by a state_dict of its own kind
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


def flatten_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, and {"param_groups": ..., "state": everything that is no tensor, by parameter}."""
    tensors: dict[str, Tensor] = {}
    groups, other = [], {}
    for index, group in enumerate(optimizer.param_groups):
        keys = [_name_of(parameter, names) for parameter in group["params"]]
        groups.append(encode({**group, "params": keys}, f"param_groups.{index}", tensors))
        for name, parameter in zip(keys, group["params"], strict=True):
            fields = {}
            for field, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and isinstance(field, str) and "." not in field:
                    tensors[f"state.{name}.{field}"] = value
                else:
                    fields[field] = value
            if fields:
                other[name] = encode(fields, f"other.{name}", tensors)
    plain = {"param_groups": groups, "state": other}
    beside = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    if beside:
        plain["beside"] = encode(beside, "beside", tensors)
    return tensors, plain


class _Saved(NamedTuple):
    """The state of an optimiser in a checkpoint: by the name of each parameter, what is kept beside that, and the groups."""

    fields: dict[str, dict[Any, Any]]
    beside: dict[Any, Any]
    groups: list[dict[str, Any]]


def _saved_state(key: str, tensors: Mapping[str, Tensor], plain: Any) -> _Saved:
    """Return the state of an optimiser as `flatten_optimizer` has taken it apart.

    Raises:
        CheckpointError: it is not that of an optimiser.
    """
    own = {name.removeprefix(f"{key}."): tensor for name, tensor in tensors.items() if name.startswith(f"{key}.")}
    fields: dict[str, dict[Any, Any]] = {}
    for name, tensor in own.items():
        if name.startswith("state."):
            parameter, _, field = name.removeprefix("state.").rpartition(".")
            fields.setdefault(parameter, {})[field] = tensor
    wrong = CheckpointError(f"the state of {key} in the checkpoint is not that of an optimiser")
    if not (isinstance(plain, dict) and isinstance(plain.get("state"), dict)):
        raise wrong
    beside = decoded(key, plain.get("beside", {}), own)
    others = {parameter: decoded(key, values, own) for parameter, values in plain["state"].items()}
    groups = decoded(key, plain.get("param_groups"), own)
    if not (isinstance(beside, dict) and all(isinstance(values, dict) for values in others.values())):
        raise wrong
    if not (isinstance(groups, list) and all(map(_is_group, groups))):
        raise wrong
    for parameter, values in others.items():
        fields.setdefault(parameter, {}).update(values)
    return _Saved(fields, beside, groups)


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
    lenient: bool,
    convert: bool,
) -> None:
    """Give an optimiser its state.

    Args:
        names: of the parameters by their id.
        tensors: those of the checkpoint, by name.
        plain: what `flatten_optimizer` returned beside them.
        lenient: parameters that the checkpoint's groups lack keep what they have.
        convert: state takes its parameter's dtype.

    Raises:
        CheckpointError: the checkpoint's state is not that of an optimiser.
        CheckpointMismatchError: its groups are others.
    """
    saved = _saved_state(key, tensors, plain)
    if len(saved.groups) != len(optimizer.param_groups):
        raise CheckpointMismatchError(
            f"{key} has {len(optimizer.param_groups)} parameter groups, and {len(saved.groups)} in the checkpoint",
            hint="were parameters frozen, or groups changed, since it was saved?",
        )
    on_this_rank = set(names.values())
    state: dict[Any, Any] = {}
    param_groups: list[dict[str, Any]] = []
    number = 0
    for group, values in zip(optimizer.param_groups, saved.groups, strict=True):
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
            if name in saved.fields:
                state[number] = saved.fields[name]
            numbers.append(number)
            number += 1
        kept = {name: group[name] for name in _IMPLEMENTATION if name in group}
        param_groups.append({**values, **kept, "params": numbers})
    optimizer.load_state_dict({"state": {**state, **saved.beside}, "param_groups": param_groups})
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


def waiting_optimizers(objects: Mapping[str, Any]) -> list[Optimizer]:
    """Return the given optimisers whose steps can be made to wait."""
    found = [plain_optimizer(value) for value in objects.values() if isinstance(value, Optimizer)]
    return [optimizer for optimizer in found if waits_before_steps(optimizer)]


def changed_by_optimizers(objects: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tensors that only the step of a given optimiser changes: its parameters, and its own state."""
    names = parameter_names(objects)
    found = set()
    for key, value in objects.items():
        if isinstance(value, Optimizer) and waits_before_steps(value := plain_optimizer(value)):
            for group in value.param_groups:
                for parameter in group["params"]:
                    name = names.get(id(parameter))
                    found.add(name)
                    found.update(f"{key}.state.{name}.{field}" for field in value.state.get(parameter, {}))
    return frozenset(name for name in found if name is not None)


def optimizer_tensors(objects: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tensors that the given optimisers keep for parameters."""
    names = parameter_names(objects)
    return frozenset(
        f"{key}.state.{names[id(parameter)]}.{field}"
        for key, value in objects.items()
        if isinstance(value, Optimizer)
        for parameter, fields in plain_optimizer(value).state.items()
        if isinstance(fields, Mapping) and id(parameter) in names
        for field in fields
    )


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
