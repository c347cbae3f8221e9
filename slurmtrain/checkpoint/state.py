"""From live objects to tensors with names and plain JSON, and back.

The state of an optimiser is keyed by parameter name, not by position, so that it can be read into another layout. It is taken
from the optimiser as it is: `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` on an optimiser that has not
stepped yet runs a step to create the state, which changes AdamW's step count (pytorch#164929).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.checkpoint.format.directory import OWN, own_name
from slurmtrain.checkpoint.format.manifest import TensorFacts
from slurmtrain.checkpoint.module_state import (
    check_module,
    entries,
    extra_owners,
    is_extra,
    loads_by_itself,
    module_tensors,
    parameter_names,
    parameters,
    unwrap,
)
from slurmtrain.checkpoint.save.staging import ask_for_huge_pages, fingerprint
from slurmtrain.checkpoint.tensors import dtype_of, local

# Settings of how a step is computed, which belong to this run's layout and device, not to the checkpoint's.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@runtime_checkable
class Stateful(Protocol):
    """An object with torch's two methods: schedulers, scalers, loaders, a user's own classes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class RandomState:
    """The random number generators of this rank: Python, torch on the CPU, and the current GPU.

    numpy's global generator is included if numpy is loaded. When the world size changes, a rank without saved state
    keeps the state that its seed gave it.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
            state["numpy"] = [name, keys.tolist(), position, has_gauss, gauss]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            numpy.random.set_state(tuple(state["numpy"]))


RANDOM_STATE = RandomState()

EXTRA = "extra state of "  # begins the names of what modules give by get_extra_state, where that is no tensor


def flatten(objects: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors by dotted name, and the JSON of everything else.

    Raises:
        CheckpointError: a value is neither a tensor nor JSON; pickling it would make a checkpoint run code.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    # Modules first: FSDP gives its parameters back to their ranks when it is asked for its state.
    for key, value in objects.items():
        if isinstance(value, nn.Module):
            for name, entry in entries(value).items():
                if isinstance(entry, Tensor):
                    tensors[f"{key}.{name}"] = entry
                else:
                    plain[f"{EXTRA}{key}.{name}"] = encode(entry, f"{key}.{name}", tensors)
    names = parameter_names(objects)
    for key, value in objects.items():
        if isinstance(value, Optimizer):
            check_optimizer(key, value)
            plain[key] = flatten_optimizer(key, value, names, tensors)
        elif not isinstance(value, nn.Module):
            plain[key] = _encode_state(key, value.state_dict() if isinstance(value, Stateful) else value, tensors)
    return tensors, plain


def _encode_state(key: str, state: Any, tensors: dict[str, Tensor]) -> Any:
    """Return JSON for the state of an object as `encode` does; all of its tensors have names that begin with "key."."""
    return encode(state, f"{key}.state" if isinstance(state, Tensor) else key, tensors)


def check(objects: Mapping[str, Any], per_rank: Mapping[str, Any]) -> None:
    """Check that what is saved of `objects` and of `per_rank` can be restored.

    Raises:
        CheckpointError: a part of an object would be lost; the message names both.
    """
    everything = {**objects, **per_rank}
    refuse_loose_tensors(everything)
    optimizers = [value for value in everything.values() if isinstance(value, Optimizer)]
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    for key, value in everything.items():
        if isinstance(value, nn.Module):
            check_module(key, value, entries(value), trained)


def refuse_loose_tensors(objects: Mapping[str, Any]) -> None:
    """Check that tensors come within something that takes them back, and not as plain values, such as a state_dict.

    Raises:
        CheckpointError: some do not.
    """
    for key, value in objects.items():
        if not isinstance(value, Stateful) and _has_tensor(value):
            raise CheckpointError(
                f"{key.rpartition('/')[2]} is of type {type(value).__name__}, and nothing would take its tensors back",
                hint="hand in what holds them: model=model, not model=model.state_dict(); or an object with state_dict() "
                "and load_state_dict()",
            )


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def templates(
    objects: Mapping[str, Any], live: Mapping[str, Tensor], saved: Mapping[str, TensorFacts]
) -> dict[str, Tensor]:
    """Return tensors to load into, for every one of `saved` that belongs to `objects`.

    Modules are loaded in place. Tensors of other objects are made here, with the layout of those that they hold now,
    or, for an optimiser's, with that of the parameter that they belong to.

    Args:
        live: those of the modules, see `module_tensors`.
    """
    targets = dict(live)
    known = parameters(objects)
    held: dict[str, dict[str, Tensor]] = {}
    for name, fact in saved.items():
        key = max((key for key in objects if name.startswith(f"{key}.")), key=len, default=None)
        if key is None or name in targets:
            continue
        value = objects[key]
        template: Tensor | None = None
        if isinstance(value, nn.Module):
            if not is_extra(name):
                continue
        elif isinstance(value, Optimizer):
            owner = name.removeprefix(f"{key}.state.")
            while owner and owner not in known:  # the parameter's name, and a field's
                owner = owner.rpartition(".")[0]
            if not owner and name.startswith(f"{key}.state."):
                continue  # of a parameter that other ranks hold: a stage of a pipeline
            if owner and fact.shape:  # counts of steps are on the CPU
                template = known[owner]
        elif isinstance(value, Stateful) and not isinstance(value, RandomState):
            if key not in held:
                held[key] = _tensors_of(key, value)
            template = held[key].get(name)
        if template is not None and tuple(template.shape) == fact.shape:
            targets[name] = torch.empty_like(template, dtype=dtype_of(fact.dtype), requires_grad=False)
            if not targets[name].is_cuda:
                ask_for_huge_pages(local(targets[name]))
        else:
            targets[name] = torch.empty(fact.shape, dtype=dtype_of(fact.dtype), device="cpu")
    return targets


def _tensors_of(key: str, value: Stateful) -> dict[str, Tensor]:
    """Return the tensors that an object holds now, by the names of a checkpoint; none if it has no state yet."""
    tensors: dict[str, Tensor] = {}
    try:
        _encode_state(key, value.state_dict(), tensors)
    except Exception:  # many cannot before they have run or were loaded; what they are given then is on the CPU
        return {}
    return tensors


def load_objects(
    objects: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    *,
    lenient: bool = False,
    convert: bool = False,
) -> None:
    """Give every object its state. The tensors of modules have theirs already.

    Args:
        lenient: state that the checkpoint lacks keeps its initial values.
        convert: optimiser state takes its parameter's dtype, which is not the checkpoint's.
    """
    for key, value in objects.items():
        if isinstance(value, nn.Module):
            for name, submodule in extra_owners(value).items():
                full = f"{key}.{name}"
                if full in tensors:
                    submodule.set_extra_state(tensors[full])
                elif EXTRA + full in plain:
                    submodule.set_extra_state(decoded(full, plain[EXTRA + full], tensors))
            if loads_by_itself(value):
                _load_by_itself(key, value)
            continue
        if key not in plain and (lenient or key.startswith(OWN)):
            continue
        if isinstance(value, Optimizer):
            names = parameter_names(objects)
            load_optimizer(key, value, names, tensors, plain[key], lenient=lenient, convert=convert)
        elif isinstance(value, Stateful):
            value.load_state_dict(decoded(key, plain[key], tensors))


def _load_by_itself(key: str, module: nn.Module) -> None:
    """Let a module that has its tensors load them in its own way, too: it may derive something from them.

    Raises:
        CheckpointError: its tensors are others then.
    """
    before = {name: int(fingerprint(local(each))) for name, each in module_tensors({key: module}).items()}
    root = unwrap(module)
    if type(root).load_state_dict is nn.Module.load_state_dict and "load_state_dict" not in vars(root):
        root.load_state_dict(root.state_dict(), strict=False)  # which may leave out what is not trained
    else:
        root.load_state_dict(root.state_dict())
    for name, each in module_tensors({key: module}).items():
        if int(fingerprint(local(each))) != before.get(name):
            raise CheckpointError(
                f"{name} is not what was loaded: {type(root).__name__}.load_state_dict() changes it",
                hint="its hooks have to leave alone what its state_dict() gives",
            )


def per_rank_objects(per_rank: Mapping[str, Any] | None, rank: int) -> dict[str, Any]:
    """Return what a rank saves for itself, by its names in a checkpoint: `per_rank` and the random state.

    Raises:
        CheckpointError: `per_rank` has an object of that name.
    """
    if per_rank and "random" in per_rank:
        raise CheckpointError("per_rank has an object 'random', a name that is taken", hint="choose another")
    return {own_name(rank, key): value for key, value in {"random": RANDOM_STATE, **(per_rank or {})}.items()}


# Plain values as JSON: numbers, texts, lists, tuples and dicts, in which a tensor leaves a reference by its name.


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return JSON for `value`; tensors are moved to `tensors` and leave a reference. Tuples are restored as tuples."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        while path in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
            path += "'"
        tensors[path] = value
        return {"__tensor__": path}
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, dict):
        pairs = [[encode(key, path, {}), encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        return (
            {str(key): item for key, item in pairs}
            if all(isinstance(key, str) and not key.startswith("__") for key in value)
            else {"__dict__": pairs}
        )
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which is neither a tensor nor JSON",
        hint="give it state_dict() and load_state_dict() that use tensors, numbers, strings, lists and dicts",
    )


def decoded(key: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `encode` has made JSON of, with its tensors.

    Raises:
        CheckpointError: it is not such JSON, or a tensor is missing; the message names the object `key`.
    """
    try:
        return _decode(value, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state of {key} in the checkpoint cannot be read: {error}") from None


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__tuple__" in value:
            return tuple(_decode(item, tensors) for item in value["__tuple__"])
        if "__dict__" in value:
            return {_decode(key, tensors): _decode(item, tensors) for key, item in value["__dict__"]}
        return {key: _decode(item, tensors) for key, item in value.items()}
    return value


# Optimisers.


def check_optimizer(key: str, optimizer: Optimizer) -> None:
    """Check that what is saved of an optimiser, `state` and `param_groups`, is all of its state.

    Raises:
        CheckpointError: it has a state_dict of its own, or another optimiser within (SAM, ZeroRedundancyOptimizer).
    """
    hooks = (getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    overridden = type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer)
    inner = next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)
    if inner is not None or overridden or any(hooks):
        what = f"keeps another optimiser in .{inner}" if inner is not None else "has a state_dict() of its own"
        raise CheckpointError(
            f"{key} is a {type(optimizer).__name__}, which {what}, and only `state` and `param_groups` would be saved",
            hint="hand in the optimiser that it wraps; or shard it with the model (fully_shard); or put it into an object "
            "that is no Optimizer and whose state_dict() and load_state_dict() have all of it",
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
    try:
        saved = dict(plain["state"])
        beside = dict(decoded(key, plain["beside"], tensors))
        groups = [dict(group) for group in decoded(key, plain["param_groups"], tensors)]
        members = [set(map(str, group["params"])) for group in groups]
        fields = {name: dict(decoded(key, saved[name], tensors)) for name in names.values() if name in saved}
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"the state of {key} in the checkpoint is not that of an optimiser") from None
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointMismatchError(
            f"{key} has {len(optimizer.param_groups)} parameter groups, and {len(groups)} in the checkpoint",
            hint="were parameters frozen, or groups changed, since it was saved?",
        )
    on_this_rank = set(names.values())
    order: list[str] = []  # torch numbers the parameters of all groups
    param_groups: list[dict[str, Any]] = []
    for group, values, theirs in zip(optimizer.param_groups, groups, members, strict=True):
        keys = [_name_of(parameter, names) for parameter in group["params"]]
        # The checkpoint's group may have parameters that other ranks hold.
        different = sorted(set(keys) ^ (theirs & on_this_rank))
        if different and not lenient:
            raise CheckpointMismatchError(
                f"{key}: a parameter group holds other parameters than in the checkpoint: {', '.join(different[:5])}",
                hint="to continue all the same: checkpoint.allow=[keys]",
            )
        kept = {name: group[name] for name in _IMPLEMENTATION if name in group}
        param_groups.append({**values, **kept, "params": range(len(order), len(order) + len(keys))})
        order += keys
    state = {number: fields[name] for number, name in enumerate(order) if name in fields}
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
            if key not in other or merged[key] is other[key]:
                continue
            groups = []
            for group, other_group in zip(merged[key]["param_groups"], other[key]["param_groups"], strict=True):
                new = [name for name in other_group["params"] if name not in group["params"]]
                groups.append({**group, "params": [*group["params"], *new]})
            state = {**other[key]["state"], **merged[key]["state"]}
            merged[key] = {**other[key], **merged[key], "param_groups": groups, "state": state}
    return merged


def of_optimizers(optimizers: Mapping[str, Optimizer], names: Mapping[int, str], tensors: Collection[str]) -> set[str]:
    """Return the names of those of `tensors` that steps of these optimisers change: their parameters, and their own state.

    Args:
        names: of the parameters by their id.
    """
    found = {
        names[id(parameter)]
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }
    prefixes = tuple(f"{key}.state." for key in optimizers)
    return found.union(name for name in tensors if name.startswith(prefixes))


def expected_optimizer_state(objects: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return stand-ins, of the same size and layout, for the state that optimisers will have after their first step."""
    names = parameter_names(objects)
    expected: dict[str, Tensor] = {}
    for key, value in objects.items():
        if isinstance(value, Optimizer) and not value.state:
            moments = 2 if "betas" in value.defaults else 1  # Adam's two of a parameter's shape, or a momentum
            for group in value.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and id(parameter) in names:
                        for number in range(moments):
                            expected[f"{key}.state.{names[id(parameter)]}.{number}"] = parameter.detach()
    return expected
