"""From live objects to tensors with names and plain JSON, and back."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slurmtrain.checkpoint import module_state
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.boxes import TensorFacts
from slurmtrain.checkpoint.format.directory import OWN
from slurmtrain.checkpoint.host_memory import ask_for_huge_pages
from slurmtrain.checkpoint.module_state import (
    check_module,
    copies,
    entries,
    extra_owners,
    is_extra,
    loads_by_itself,
    module_tensors,
    name_within,
    parameter_names,
    parameters,
)
from slurmtrain.checkpoint.optimizer_state import (
    OWN_WAY,
    check_optimizer,
    flatten_optimizer,
    has_own_state_dict,
    load_optimizer,
    plain_optimizer,
)
from slurmtrain.checkpoint.plain_values import decoded, encode
from slurmtrain.checkpoint.tensors import dtype_of, local


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
                    plain[f"{EXTRA}{key}.{name}"] = encode(entry, name_within(f"{key}.{name}"), tensors)
    names = parameter_names(objects)
    for key, value in objects.items():
        if isinstance(value, Optimizer):
            value = plain_optimizer(value)
            check_optimizer(key, value)
            if has_own_state_dict(value):
                plain[key] = encode({OWN_WAY: value.state_dict()}, key, tensors)
            else:
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
                f"{key.removeprefix(OWN)} is of type {type(value).__name__}, and nothing would take its tensors back",
                hint="hand in what holds them: model=model, not model=model.state_dict(); or an object with state_dict() "
                "and load_state_dict()",
            )


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def object_names(tensors: Collection[str], plain: Collection[str]) -> set[str]:
    """Return the names of the objects that a checkpoint holds, from those of its tensors and plain values."""
    shared = [name for name in tensors if not name.startswith(OWN)]
    return {name.partition(".")[0] for name in shared} | {name for name in plain if not name.startswith(EXTRA)}


def templates(objects: Mapping[str, Any], saved: Mapping[str, TensorFacts]) -> dict[str, Tensor]:
    """Return tensors to load into, for every one of `saved` that belongs to `objects`.

    Modules are loaded in place. Tensors of other objects are made here, with the layout of those that they hold now,
    or, for state that a new optimiser does not have yet, with that of the parameter that it belongs to.
    """
    targets = module_tensors(objects)
    known = parameters(objects)
    numbered = {key: _by_number(value) for key, value in objects.items() if isinstance(value, Optimizer)}
    live: dict[str, dict[str, Tensor]] = {}
    for name, fact in saved.items():
        owners = [key for key in objects if name.startswith(f"{key}.")]
        if name in targets or not owners:
            continue
        value = objects[key := max(owners, key=len)]
        if isinstance(value, nn.Module) and not is_extra(name):
            continue
        if key not in live:
            live[key] = _live(key, value)
        template = live[key].get(name)
        if template is None and isinstance(value, Optimizer):
            template = _parameter_of(name.removeprefix(f"{key}."), known, numbered[key])
            if template is None and name.startswith(f"{key}.state."):
                continue  # of a parameter that other ranks hold: a stage of a pipeline
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


def _by_number(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters by the numbers that torch's state_dict has for them."""
    groups = plain_optimizer(optimizer).param_groups
    return {str(number): each for number, each in enumerate(each for group in groups for each in group["params"])}


def _parameter_of(name: str, known: Mapping[str, Tensor], numbered: Mapping[str, Tensor]) -> Tensor | None:
    """Return the parameter to which an optimiser's tensor belongs: its name has the parameter's name in it, or its number."""
    rest = name.removeprefix(f"{OWN_WAY}.")
    number = next((part for part in rest.split(".") if part.isdecimal()), "") if rest != name else ""
    _, _, rest = rest.partition(".")
    while rest and rest not in known:
        rest = rest.rpartition(".")[0]
    return known.get(rest, numbered.get(number))


def load_objects(
    objects: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    *,
    dropped: Collection[str],
    lenient: bool = False,
    convert: bool = False,
) -> None:
    """Give every object its state. Modules have theirs already, unless they return copies or load it in their own way.

    Args:
        dropped: names of the checkpoint's tensors that are not in `tensors`, since they do not fit.
        lenient: state that the checkpoint lacks keeps its initial values.
        convert: optimiser state takes its parameter's dtype, which is not the checkpoint's.
    """
    for key, value in objects.items():
        if isinstance(value, nn.Module):
            if loads_by_itself(value) or copies(value, entries(value)):
                module_state.load(key, value, _of_module(key, value, tensors, plain))
                continue
            for name, submodule in extra_owners(value).items():
                full = f"{key}.{name}"
                if full in tensors:
                    submodule.set_extra_state(tensors[full])
                elif EXTRA + full in plain:
                    submodule.set_extra_state(decoded(full, plain[EXTRA + full], tensors))
            continue
        if lenient and key not in plain:
            continue
        if isinstance(value, Optimizer):
            value, saved = plain_optimizer(value), plain[key]
            if isinstance(saved, dict) and OWN_WAY in saved:
                value.load_state_dict(decoded(key, saved[OWN_WAY], tensors))
                continue
            names = parameter_names(objects)
            load_optimizer(key, value, names, tensors, saved, dropped=dropped, lenient=lenient, convert=convert)
        elif isinstance(value, Stateful):
            value.load_state_dict(decoded(key, plain[key], tensors))


def _of_module(key: str, module: nn.Module, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the checkpoint has for a module, by the names within it."""
    names = entries(module)
    found: dict[str, Any] = {name: tensors[f"{key}.{name}"] for name in names if f"{key}.{name}" in tensors}
    marker = f"{EXTRA}{key}."
    for name in plain:
        if name.startswith(marker):
            found[name.removeprefix(marker)] = decoded(name, plain[name], tensors)
    return found


def per_rank_objects(per_rank: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what each rank saves for itself, by names that mark it as such: `per_rank` and the random state.

    Raises:
        CheckpointError: `per_rank` has an object of that name.
    """
    if per_rank and "random" in per_rank:
        raise CheckpointError("per_rank has an object 'random', a name that is taken", hint="choose another")
    return {OWN + key: value for key, value in {"random": RANDOM_STATE, **(per_rank or {})}.items()}
