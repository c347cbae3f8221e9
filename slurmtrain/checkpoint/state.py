"""From live objects to tensors with names and plain JSON, and back.

The state of an optimiser is keyed by parameter name, not by position, so that it can be read into another layout. It is taken
from the optimiser as it is: `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` on an optimiser that has not
stepped yet runs a step to create the state, which changes AdamW's step count (pytorch#164929).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.checkpoint.format.directory import OWN, own_name
from slurmtrain.checkpoint.format.manifest import TensorFacts
from slurmtrain.checkpoint.save.staging import ask_for_huge_pages, fingerprint
from slurmtrain.checkpoint.tensors import (
    EXTRA_KEY,
    ModuleState,
    check_module,
    dtype_of,
    loads_by_itself,
    local,
    module_state,
)

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


@dataclass(frozen=True)
class LiveState:
    """Objects, and what of theirs has names before it is asked for.

    Attributes:
        objects: those that all ranks share, and this rank's own, by their names in a checkpoint.
        modules: what each module among them holds.
        tensors: parameters and buffers of modules, which are filled in place. Extra state is made when it is asked for.
        parameters: those of the modules; a tied one by all of its names.
        names: of the parameters by their id; of a tied one the first.
        values: JSON of those that are plain values.
    """

    objects: dict[str, Any]
    modules: dict[str, ModuleState]
    tensors: dict[str, Tensor]
    parameters: dict[str, nn.Parameter]
    names: dict[int, str]
    values: dict[str, Any]


def live_state(objects: Mapping[str, Any], per_rank: Mapping[str, Any] | None, rank: int) -> LiveState:
    """Return what these objects hold.

    Args:
        per_rank: what this rank has for itself, to which the random state belongs; None: that of all ranks is left alone.

    Raises:
        CheckpointError: `per_rank` has an object of that name; a plain value has tensors, such as a state_dict, which nothing
            would take back; or an optimiser has parameters of no module.
    """
    found = dict(objects)
    if per_rank is not None:
        if "random" in per_rank:
            raise CheckpointError("per_rank has an object 'random', a name that is taken", hint="choose another")
        found |= {own_name(rank, key): value for key, value in {"random": RANDOM_STATE, **per_rank}.items()}
    modules = {key: module_state(value, key) for key, value in found.items() if isinstance(value, nn.Module)}
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, nn.Parameter] = {}
    for module in modules.values():
        tensors.update({name: entry for name, entry in module.entries.items() if name not in module.extra})
        parameters.update({name: each for name, each in module.held.items() if isinstance(each, nn.Parameter)})
    names = {id(parameter): name for name, parameter in reversed(parameters.items())}
    values: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, Optimizer):
            for parameter in (each for group in value.param_groups for each in group["params"]):
                name = names.get(id(parameter))
                if name is None or (name.startswith(OWN) and not key.startswith(OWN)):
                    raise CheckpointError(
                        f"the optimiser has a parameter of shape {list(parameter.shape)} that no given module has",
                        hint="pass the module and its optimiser together: save(step, model=model, optimizer=optimizer)",
                    )
        elif not isinstance(value, Stateful):
            loose: dict[str, Tensor] = {}
            values[key] = encode(value, key, loose)
            if loose:
                raise CheckpointError(
                    f"{key.rpartition('/')[2]} is of type {type(value).__name__}, and nothing would take its tensors back",
                    hint="hand in what holds them: model=model, not model=model.state_dict(); or an object with "
                    "state_dict() and load_state_dict()",
                )
    return LiveState(found, modules, tensors, parameters, names, values)


def check(live: LiveState) -> None:
    """Check that what is saved of these objects can be restored: all state of optimisers, and the live memory of modules.

    Raises:
        CheckpointError: a part of an object would be lost; the message names both. An optimiser that has a state_dict of its
            own, or another optimiser within (SAM, ZeroRedundancyOptimizer), is refused.
    """
    trained: set[int] = set()
    for key, value in live.objects.items():
        if not isinstance(value, Optimizer):
            continue
        trained.update(id(parameter) for group in value.param_groups for parameter in group["params"])
        hooks = (getattr(value, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
        overridden = type(value).state_dict is not Optimizer.state_dict or "state_dict" in vars(value)
        inner = next((name for name, each in vars(value).items() if isinstance(each, Optimizer)), None)
        if inner is not None or overridden or any(hooks):
            what = f"keeps another optimiser in .{inner}" if inner is not None else "has a state_dict() of its own"
            raise CheckpointError(
                f"{key} is a {type(value).__name__}, which {what}, and only `state` and `param_groups` would be saved",
                hint="hand in the optimiser that it wraps; or shard it with the model (fully_shard); or put it into an object "
                "that is no Optimizer and whose state_dict() and load_state_dict() have all of it",
            )
    for module in live.modules.values():
        check_module(module, trained)


@dataclass
class FlatState:
    """What is saved of objects.

    Attributes:
        tensors: all of them, by name.
        plain: JSON of everything else of the objects that all ranks share.
        own_plain: that of this rank's own objects.
        buffers: names of tensors that may differ between data parallel ranks by design; the lowest rank's count.
        guarded: names of tensors that only the steps of optimisers change: their parameters, and their own state.
        finite: names of tensors that have to be finite: parameters that are trained, and optimisers' state.
        error: why it cannot be saved.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    own_plain: dict[str, Any] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    guarded: set[str] = field(default_factory=set)
    finite: set[str] = field(default_factory=set)
    error: CheckpointError | None = None


def flatten(live: LiveState, *, expect: bool = False) -> FlatState:
    """Return the tensors of objects by dotted name, and the JSON of everything else.

    Args:
        expect: optimisers that have no state yet have stand-ins, of the size and layout of what they will have after their
            first step.

    Raises:
        CheckpointError: a value is neither a tensor nor JSON; pickling it would make a checkpoint run code.
    """
    flat = FlatState()
    tensors = flat.tensors
    for key, module in live.modules.items():
        plain = flat.own_plain if key.startswith(OWN) else flat.plain
        for name, entry in module.entries.items():
            if isinstance(entry, Tensor):
                tensors[name] = entry
            else:
                plain[EXTRA + name] = encode(entry, name, tensors)
        flat.buffers.update(module.held.keys() - live.parameters.keys())
    trained = {name for name, parameter in live.parameters.items() if parameter.requires_grad}
    flat.finite.update(name for name in trained if not name.startswith(OWN))
    for key, value in live.objects.items():
        is_own = key.startswith(OWN)
        plain = flat.own_plain if is_own else flat.plain
        if isinstance(value, Optimizer):
            plain[key] = flatten_optimizer(key, value, live.names, tensors, expect=expect)
            if not is_own:
                its = {name for name in tensors if name.startswith(f"{key}.state.")}
                flat.finite.update(its)
                flat.guarded.update(
                    its, (live.names[id(each)] for group in value.param_groups for each in group["params"])
                )
        elif key in live.values:
            plain[key] = live.values[key]
        elif not isinstance(value, nn.Module):
            state = value.state_dict()
            # All of its tensors have names that begin with "key.".
            plain[key] = encode(state, f"{key}.state" if isinstance(state, Tensor) else key, tensors)
    return flat


def flatten_optimizer(
    key: str, optimizer: Optimizer, names: Mapping[int, str], tensors: dict[str, Tensor], *, expect: bool = False
) -> Any:
    """Return JSON of the state and the groups, by the names of parameters; tensors are moved to `tensors`, as `encode` does.

    Raises:
        CheckpointError: what it keeps for a parameter has no names.
    """
    groups: list[dict[str, Any]] = []
    fields: dict[str, Any] = {}
    moments = 2 if "betas" in optimizer.defaults else 1  # Adam's two of a parameter's shape, or a momentum
    for group in optimizer.param_groups:
        keys = [names[id(parameter)] for parameter in group["params"]]
        groups.append({**group, "params": keys})
        for name, parameter in zip(keys, group["params"], strict=True):
            if parameter in optimizer.state:
                held = optimizer.state[parameter]
                if not isinstance(held, Mapping):
                    raise CheckpointError(
                        f"{key} ({type(optimizer).__name__}) keeps a {type(held).__name__} for {name}, and not a dict",
                        hint="keep a dict of named values for each parameter, as torch's optimisers do",
                    )
                fields[name] = dict(held)
            elif expect and not optimizer.state and parameter.requires_grad:
                fields[name] = dict.fromkeys(range(moments), parameter.detach())
    beside = {field: value for field, value in optimizer.state.items() if not isinstance(field, Tensor)}
    return encode({"state": fields, "param_groups": groups, "beside": beside}, key, tensors)


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


def decode(key: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `encode` has made JSON of, with its tensors.

    Raises:
        CheckpointError: it is not such JSON, or a tensor is missing; the message names the object `key`.
    """
    try:
        if isinstance(value, list):
            return [decode(key, item, tensors) for item in value]
        if not isinstance(value, dict):
            return value
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__tuple__" in value:
            return tuple(decode(key, item, tensors) for item in value["__tuple__"])
        if "__dict__" in value:
            return {decode(key, name, tensors): decode(key, item, tensors) for name, item in value["__dict__"]}
        return {name: decode(key, item, tensors) for name, item in value.items()}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state of {key} in the checkpoint cannot be read: {error}") from None


# Restoring.


def templates(live: LiveState, saved: Mapping[str, TensorFacts]) -> dict[str, Tensor]:
    """Return tensors to load into, for every one of `saved` that belongs to the objects.

    Modules are loaded in place. Tensors of other objects are made here, with the layout of those that they hold now,
    or, for an optimiser's, with that of the parameter that they belong to.
    """
    targets, known = dict(live.tensors), live.parameters
    held: dict[str, dict[str, Tensor]] = {}
    for name, fact in saved.items():
        key = max((key for key in live.objects if name.startswith(f"{key}.")), key=len, default=None)
        if key is None or name in targets:
            continue
        value = live.objects[key]
        template: Tensor | None = None
        if isinstance(value, nn.Module):
            if EXTRA_KEY not in name.split("."):
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
                held[key] = {}
                # Many cannot before they have run or were loaded; what they are given then is on the CPU.
                with suppress(Exception):
                    state = value.state_dict()
                    encode(state, f"{key}.state" if isinstance(state, Tensor) else key, held[key])
            template = held[key].get(name)
        dtype = dtype_of(fact.dtype)
        if template is not None and tuple(template.shape) == fact.shape:
            targets[name] = torch.empty_like(template, dtype=dtype, requires_grad=False)
            if not targets[name].is_cuda:
                ask_for_huge_pages(local(targets[name]))
        else:
            targets[name] = torch.empty(fact.shape, dtype=dtype, device="cpu")
    return targets


def load_objects(
    live: LiveState,
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
    for key, value in live.objects.items():
        if isinstance(value, nn.Module):
            for name, submodule in live.modules[key].extra.items():
                if name in tensors:
                    submodule.set_extra_state(tensors[name])
                elif EXTRA + name in plain:
                    submodule.set_extra_state(decode(name, plain[EXTRA + name], tensors))
            if loads_by_itself(live.modules[key].root):
                _load_by_itself(key, live.modules[key])
            continue
        if key not in plain and (lenient or key.startswith(OWN)):
            continue
        if isinstance(value, Optimizer):
            load_optimizer(key, value, live.names, tensors, plain[key], lenient=lenient, convert=convert)
        elif isinstance(value, Stateful):
            value.load_state_dict(decode(key, plain[key], tensors))


def _load_by_itself(key: str, module: ModuleState) -> None:
    """Let a module that has its tensors load them in its own way, too: it may derive something from them.

    Raises:
        CheckpointError: its tensors are others then.
    """
    root, extra = module.root, module.extra
    before = {name: int(fingerprint(local(each))) for name, each in module.entries.items() if name not in extra}
    if type(root).load_state_dict is nn.Module.load_state_dict and "load_state_dict" not in vars(root):
        root.load_state_dict(root.state_dict(), strict=False)  # which may leave out what is not trained
    else:
        root.load_state_dict(root.state_dict())
    for name, each in module_state(root, key).entries.items():
        if name not in extra and int(fingerprint(local(each))) != before.get(name):
            raise CheckpointError(
                f"{name} is not what was loaded: {type(root).__name__}.load_state_dict() changes it",
                hint="its hooks have to leave alone what its state_dict() gives",
            )


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
        plain: what `flatten` returned beside them.
        lenient: parameters that the checkpoint's groups lack keep what they have.
        convert: state takes its parameter's dtype.

    Raises:
        CheckpointError: the checkpoint's state is not that of an optimiser.
        CheckpointMismatchError: its groups are others.
    """
    try:
        saved = dict(plain["state"])
        beside = dict(decode(key, plain["beside"], tensors))
        groups = [dict(group) for group in decode(key, plain["param_groups"], tensors)]
        members = [set(map(str, group["params"])) for group in groups]
        fields = {name: dict(decode(key, saved[name], tensors)) for name in names.values() if name in saved}
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
        keys = [names[id(parameter)] for parameter in group["params"]]
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
    if convert:
        return
    # torch's load_state_dict gives floating-point state its parameter's dtype, so that a master copy in fp32 would be lost,
    # and turns a text into the repr of a generator object.
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state.items():
        held = optimizer.state[own[number]]
        for field_name, value in values.items():
            if field_name in held:
                held[field_name] = _as_saved(value, held[field_name])


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
