"""From live objects to tensors with names and plain JSON, and back.

Optimiser state is keyed by parameter name, not by position, so that it can be read into another layout. It is taken
from the optimiser as it is: `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` on an optimiser that has
not stepped yet runs a step to create the state, which changes AdamW's step count (pytorch#164929).
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slurmtrain.checkpoint import state_checks
from slurmtrain.checkpoint.format.dtypes import dtype_of
from slurmtrain.checkpoint.format.rank_files import OWN
from slurmtrain.checkpoint.format.tensor_index import TensorFacts
from slurmtrain.checkpoint.host_memory import ask_for_huge_pages
from slurmtrain.checkpoint.local_tensors import local
from slurmtrain.checkpoint.state_checks import Names, entries, extra_owners, plain_optimizer, unwrap
from slurmtrain.errors import CheckpointError, CheckpointMismatchError


@runtime_checkable
class Stateful(Protocol):
    """An object with torch's two methods: schedulers, scalers, loaders, a user's own classes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


OWN_WAY = "own"  # marks what an optimiser has given by a state_dict of its own kind
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
                    plain[f"{EXTRA}{key}.{name}"] = _encode(entry, state_checks.name_within(f"{key}.{name}"), tensors)
    names = parameter_names(objects)
    for key, value in objects.items():
        if isinstance(value, Optimizer):
            value = plain_optimizer(value)
            given = state_checks.own_state_dict(key, value)
            if given is not None:
                plain[key] = {OWN_WAY: _encode(given, key, tensors)}
                continue
            flat, plain[key] = _flatten_optimizer(value, names)
            tensors.update({f"{key}.{name}": tensor for name, tensor in flat.items()})
        elif not isinstance(value, nn.Module):
            plain[key] = _encode_state(key, value.state_dict() if isinstance(value, Stateful) else value, tensors)
    return tensors, plain


def _encode_state(key: str, state: Any, tensors: dict[str, Tensor]) -> Any:
    """Return JSON for the state of an object as `_encode` does; all of its tensors have names that begin with "key."."""
    return _encode(state, f"{key}.state" if isinstance(state, Tensor) else key, tensors)


def check(objects: Mapping[str, Any], per_rank: Mapping[str, Any]) -> None:
    """Check that what is saved of `objects` and of `per_rank` can be restored.

    Raises:
        CheckpointError: a part of an object would be lost; the message names both.
    """
    everything = {**objects, **per_rank}
    refuse_loose_tensors(everything)
    handed_in = {id(value) for value in everything.values()}
    optimizers = [value for value in everything.values() if isinstance(value, Optimizer)]
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    for key, value in everything.items():
        if isinstance(value, nn.Module):
            state_checks.check_module(key, value, entries(value), trained)
        elif isinstance(value, Optimizer):
            state_checks.check_optimizer(key, plain_optimizer(value), handed_in)


def refuse_loose_tensors(objects: Mapping[str, Any]) -> None:
    """Check that tensors come within something that takes them back, and not as plain values, such as a state_dict.

    Raises:
        CheckpointError: some do not.
    """
    for key, value in objects.items():
        if not isinstance(value, Stateful) and _has_tensor(value):
            raise CheckpointError(
                f"{key.removeprefix(OWN)} is of type {type(value).__name__}, and nothing would take its tensors back",
                hint="hand in what holds them: model=model, not model=model.state_dict(); or an object with state_dict() "
                "and load_state_dict()",
            )


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


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
    names: dict[int, str] = {}
    for key, value in objects.items():
        if isinstance(value, nn.Module):
            clean = Names(unwrap(value))
            names.update(
                {id(parameter): f"{key}.{clean(name)}" for name, parameter in unwrap(value).named_parameters()}
            )
    return names


def trained_parameters(objects: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Return the parameters of the given modules that can be trained, by name."""
    return {
        f"{key}.{clean(name)}": parameter
        for key, value in objects.items()
        if isinstance(value, nn.Module)
        for clean in (Names(unwrap(value)),)
        for name, parameter in unwrap(value).named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


def _flatten_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, and {"param_groups": ..., "state": everything that is no tensor, by parameter}."""
    tensors: dict[str, Tensor] = {}
    groups, other = [], {}
    for index, group in enumerate(optimizer.param_groups):
        keys = [_name_of(parameter, names) for parameter in group["params"]]
        groups.append(_encode({**group, "params": keys}, f"param_groups.{index}", tensors))
        for name, parameter in zip(keys, group["params"], strict=True):
            fields = {}
            for field, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and isinstance(field, str) and "." not in field:
                    tensors[f"state.{name}.{field}"] = value
                else:
                    fields[field] = value
            if fields:
                other[name] = _encode(fields, f"other.{name}", tensors)
    plain = {"param_groups": groups, "state": other}
    beside = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    if beside:
        plain["beside"] = _encode(beside, "beside", tensors)
    return tensors, plain


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


def _name_of(parameter: Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"the optimiser has a parameter of shape {list(parameter.shape)} that no given module has",
            hint="pass the module and its optimiser together: save(step, model=model, optimizer=optimizer)",
        )
    return names[id(parameter)]


def object_names(tensors: Collection[str], plain: Collection[str]) -> set[str]:
    """Return the names of the objects that a checkpoint holds, from those of its tensors and plain values."""
    return {name.partition(".")[0] for name in tensors} | {name for name in plain if not name.startswith(EXTRA)}


def waiting_optimizers(objects: Mapping[str, Any]) -> list[Optimizer]:
    """Return the given optimisers whose steps can be made to wait."""
    found = [plain_optimizer(value) for value in objects.values() if isinstance(value, Optimizer)]
    return [optimizer for optimizer in found if state_checks.waits_before_steps(optimizer)]


def changed_by_optimizers(objects: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tensors that only the step of a given optimiser changes: its parameters, and its own state."""
    names = parameter_names(objects)
    found = set()
    for key, value in objects.items():
        if isinstance(value, Optimizer) and state_checks.waits_before_steps(value := plain_optimizer(value)):
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


# Tensors of a parameter's shape that torch's optimisers keep for each, beyond which nothing large is known.
_MOMENTS = {"SGD": 1, "Adagrad": 1, "Adadelta": 2, "RMSprop": 3, "Rprop": 2, "Adafactor": 1, "Muon": 1}


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


def templates(objects: Mapping[str, Any], saved: Mapping[str, TensorFacts]) -> dict[str, Tensor]:
    """Return tensors to load into, for every one of `saved` that belongs to `objects`.

    Modules are loaded in place. Tensors of other objects are made here, with the layout of those that they hold now,
    or, for state that a new optimiser does not have yet, with that of the parameter that it belongs to.
    """
    targets = module_tensors(objects)
    parameters = {
        f"{key}.{clean(name)}": parameter
        for key, module in objects.items()
        if isinstance(module, nn.Module)
        for clean in (Names(unwrap(module)),)
        for name, parameter in unwrap(module).named_parameters()
    }
    live: dict[str, dict[str, Tensor]] = {}
    for name, fact in saved.items():
        owners = [key for key in objects if name.startswith(f"{key}.")]
        if name in targets or not owners:
            continue
        value = objects[key := max(owners, key=len)]
        if isinstance(value, nn.Module) and not state_checks.is_extra(name):
            continue
        if key not in live:
            live[key] = _live(key, value)
        template = live[key].get(name)
        if template is None and isinstance(value, Optimizer):
            template = _parameter_of(name.removeprefix(f"{key}."), plain_optimizer(value), parameters)
        if template is not None and tuple(template.shape) == fact.shape and (fact.shape or name in live[key]):
            targets[name] = torch.empty_like(template, dtype=dtype_of(fact.dtype), requires_grad=False)
            if not targets[name].is_cuda:
                ask_for_huge_pages(local(targets[name]))
        else:
            targets[name] = torch.empty(fact.shape, dtype=dtype_of(fact.dtype), device="cpu")
    return targets


def _live(key: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors that an object holds now, by the names of a checkpoint; none if it has no state yet."""
    tensors: dict[str, Tensor] = {}
    if isinstance(value, Stateful) and not isinstance(value, (nn.Module, Optimizer, RandomState)):
        try:
            _encode_state(key, value.state_dict(), tensors)
        except Exception:  # many cannot before they have run or were loaded; what they are given then is on the CPU
            return {}
    return tensors


def _parameter_of(name: str, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """Return the parameter to which an optimiser's tensor belongs: its name has the parameter's name in it, or its number."""
    _, _, rest = name.partition(".")
    found = [each for each in parameters if rest.startswith(f"{each}.")]
    if found:
        return parameters[max(found, key=len)]
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return every[numbers[0]] if numbers and numbers[0] < len(every) else None


def load_objects(
    objects: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    *,
    lenient: bool = False,
    convert: bool = False,
) -> None:
    """Give every object its state. Modules have theirs already, unless they return copies or load it in their own way.

    Args:
        lenient: state that the checkpoint lacks keeps its initial values.
        convert: optimiser state takes its parameter's dtype, which is not the checkpoint's.
    """
    groups = state_checks.Groups(value for value in objects.values() if isinstance(value, Optimizer))
    for key, value in objects.items():
        if isinstance(value, nn.Module):
            if state_checks.loads_by_itself(value) or state_checks.copies(value, entries(value)):
                state_checks.load(key, value, _of_module(key, value, tensors, plain))
                continue
            for name, submodule in extra_owners(value).items():
                full = f"{key}.{name}"
                if full in tensors:
                    submodule.set_extra_state(tensors[full])
                elif EXTRA + full in plain:
                    submodule.set_extra_state(_decoded(full, plain[EXTRA + full], tensors))
            continue
        if lenient and key not in plain:
            continue
        if isinstance(value, Optimizer):
            value = plain_optimizer(value)
            if isinstance(plain[key], dict) and OWN_WAY in plain[key]:
                value.load_state_dict(_decoded(key, plain[key][OWN_WAY], tensors))
            else:
                names = parameter_names(objects)
                _load_optimizer(key, value, names, tensors, plain[key], lenient=lenient, convert=convert)
        elif isinstance(value, Stateful):
            value.load_state_dict(_decoded(key, plain[key], tensors))
    groups.share_again()


def _of_module(key: str, module: nn.Module, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the checkpoint has for a module, by the names within it."""
    names = entries(module)
    found: dict[str, Any] = {name: tensors[f"{key}.{name}"] for name in names if f"{key}.{name}" in tensors}
    marker = f"{EXTRA}{key}."
    for name in plain:
        if name.startswith(marker):
            found[name.removeprefix(marker)] = _decoded(name, plain[name], tensors)
    return found


def parse(text: bytes) -> dict[str, Any]:
    """Return a rank's own plain state from its JSON.

    Raises:
        CheckpointError: it is no JSON object.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"a rank's own state cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError("a rank's own state cannot be read: it is not an object")
    return found


def _decoded(key: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    try:
        return _decode(value, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state of {key} in the checkpoint cannot be read: {error}") from None


# Settings of how a step is computed, which belong to this run's layout and device, not to the checkpoint's.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def _load_optimizer(
    key: str,
    optimizer: Optimizer,
    names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    *,
    lenient: bool,
    convert: bool,
) -> None:
    own = {name.removeprefix(f"{key}."): tensor for name, tensor in tensors.items() if name.startswith(f"{key}.")}
    fields: dict[str, dict[Any, Any]] = {}
    for name, tensor in own.items():
        if name.startswith("state."):
            parameter, _, field = name.removeprefix("state.").rpartition(".")
            fields.setdefault(parameter, {})[field] = tensor
    if not (isinstance(saved, dict) and isinstance(saved.get("state"), dict)):
        raise CheckpointError(f"the state of {key} in the checkpoint is not that of an optimiser")
    beside = _decoded(key, saved.get("beside", {}), own)
    others = {parameter: _decoded(key, values, own) for parameter, values in saved["state"].items()}
    if not (isinstance(beside, dict) and all(isinstance(values, dict) for values in others.values())):
        raise CheckpointError(f"the state of {key} in the checkpoint is not that of an optimiser")
    for parameter, values in others.items():
        fields.setdefault(parameter, {}).update(values)
    saved_groups = _decoded(key, saved.get("param_groups"), own)
    if not isinstance(saved_groups, list) or not all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in saved_groups
    ):
        raise CheckpointError(f"the state of {key} in the checkpoint is not that of an optimiser")
    if len(saved_groups) != len(optimizer.param_groups):
        raise CheckpointMismatchError(
            f"{key} has {len(optimizer.param_groups)} parameter groups, and {len(saved_groups)} in the checkpoint",
            hint="were parameters frozen, or groups changed, since it was saved?",
        )
    on_this_rank = set(names.values())
    state: dict[Any, Any] = {}
    param_groups: list[dict[str, Any]] = []
    number = 0
    for group, values in zip(optimizer.param_groups, saved_groups, strict=True):
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
            if name in fields:
                state[number] = fields[name]
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


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return JSON for `value`; tensors are moved to `tensors` and leave a reference. Tuples are restored as tuples."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        while path in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
            path += "'"
        tensors[path] = value
        return {"__tensor__": path}
    if isinstance(value, tuple):
        return {"__tuple__": [_encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, dict):
        pairs = [[_encode(key, path, {}), _encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        return (
            {str(key): item for key, item in pairs}
            if all(isinstance(key, str) and not key.startswith("__") for key in value)
            else {"__dict__": pairs}
        )
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which is neither a tensor nor JSON",
        hint="give it state_dict() and load_state_dict() that use tensors, numbers, strings, lists and dicts",
    )


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


class RandomState:
    """The random number generators of this rank: Python, torch on the CPU, and the current GPU.

    numpy's global generator is included if numpy is loaded. When the world size changes, a rank without saved state
    keeps the state that its seed gave it.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        numpy = _loaded_numpy()
        if numpy is not None:
            name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
            state["numpy"] = [name, keys.tolist(), position, has_gauss, gauss]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        numpy = _loaded_numpy()
        if numpy is not None and "numpy" in state:
            numpy.random.set_state(tuple(state["numpy"]))


RANDOM_STATE = RandomState()


def per_rank_objects(per_rank: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what each rank saves for itself, by names that mark it as such: `per_rank` and the random state.

    Raises:
        CheckpointError: `per_rank` has an object of that name.
    """
    if per_rank and "random" in per_rank:
        raise CheckpointError("per_rank has an object 'random', a name that is taken", hint="choose another")
    return {OWN + key: value for key, value in {"random": RANDOM_STATE, **(per_rank or {})}.items()}


def _loaded_numpy() -> Any:
    import sys

    return sys.modules.get("numpy")
