"""Differences between a checkpoint and the run that is to continue from it: refused with a diff, unless they are allowed.

Torch itself loads what fits and leaves the rest at its initial values, or converts it, without a message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slurmtrain.checkpoint import module_state
from slurmtrain.checkpoint.errors import CheckpointMismatchError
from slurmtrain.checkpoint.format.manifest import TensorFacts
from slurmtrain.checkpoint.tensors import dtype_name
from slurmtrain.choices import DECODERS, Allow
from slurmtrain.errors import UsageError, nearest

KINDS = tuple(Allow)
FINGERPRINT = "data_fingerprint"  # in the config that a checkpoint is bound to: of the data's content
SHOWN = 5


def check_allowed(allow: Collection[str]) -> None:
    """Raise UsageError if `allow` has a kind of difference that is not known."""
    for kind in allow:
        if kind not in KINDS:
            raise UsageError(f"{kind!r} is not a kind of difference that can be allowed", hint=nearest(kind, KINDS))


def check_config(
    path: Path,
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    allow: Collection[str],
    *,
    changed: Collection[str] = (),
    asked_for: bool = False,
) -> None:
    """Compare the config values that a checkpoint is bound to with those of this run.

    Args:
        changed: keys that a person has changed on purpose since it was saved; they, and all keys below them, may
            differ.
        asked_for: the checkpoint is of another run and was named by the person.

    Raises:
        CheckpointMismatchError: they differ.
    """
    if not saved or not own:
        return
    if (own.get("model") or {}).get(
        "_target_"
    ) in DECODERS and "lora" not in own:  # adapters mean nothing beside other weights
        changed = {*changed, "model.path"}  # where its first weights came from, not what it computes
    before, now = dict(_leaves(saved)), dict(_leaves(own))
    differing = [
        key for key in sorted({*before, *now}) if before.get(key) != now.get(key) or (key in before) != (key in now)
    ]
    lines = {key: f"{key}: {before.get(key, '(not there)')} -> {now.get(key, '(not there)')}" for key in differing}
    content = lines.pop(FINGERPRINT, None)
    if "config" not in allow:
        unasked = [line for key, line in lines.items() if not _is_under(key, changed)]
        _refuse(path, "config", "was saved with another config", unasked)
    if content and FINGERPRINT in before and asked_for and "data" not in allow:
        others = [line for key, line in lines.items() if key.startswith("data.")]
        raise CheckpointMismatchError(
            f"{path} has seen other data: {'; '.join([*others, content])}: its step, its schedule and its place "
            "among the samples would be carried onto this data",
            hint="to restart with its weights: checkpoint.restore_only=model; to continue at its step on other data anyway: "
            "checkpoint.allow=[config,data]",
        )
    # Other data by config is allowed or refused as such; this check is about other content in the same place.
    if content and FINGERPRINT in before and not any(key.startswith("data.") for key in lines) and "data" not in allow:
        raise CheckpointMismatchError(
            f"{path} was saved with other data in the same place: {content}",
            hint="was the data set prepared or edited again? To continue with the current data: checkpoint.allow=[data]",
        )


def of_modules(objects: Mapping[str, Any], saved: Iterable[str]) -> set[str]:
    """Return the names of the checkpoint that belong to modules among `objects`, without extra state, which may come and go."""
    prefixes = tuple(f"{key}." for key, value in objects.items() if isinstance(value, torch.nn.Module))
    return {name for name in saved if prefixes and name.startswith(prefixes) and not module_state.is_extra(name)}


def check_names(
    path: Path,
    objects: Mapping[str, Any],
    wanted: Collection[str],
    everywhere: Collection[str],
    saved: Collection[str],
    plain: Collection[str] | None,
    allow: Collection[str],
) -> set[str]:
    """Check that checkpoint and objects have the same names, and return the names that only the checkpoint has.

    Args:
        wanted: names of the tensors of this rank's modules.
        everywhere: names of the tensors of all ranks' modules: a pipeline stage has only a part of them.
        plain: names of objects with state that is no tensor; None: not known yet.

    Raises:
        CheckpointMismatchError: one has names that the other lacks.
    """
    alone = of_modules(objects, saved) - set(everywhere)
    lines = [
        f"- {key} is not in the checkpoint"
        for key, value in objects.items()
        if plain is not None and not isinstance(value, torch.nn.Module) and key not in plain
    ]
    lines += [f"- {name} is not in the checkpoint" for name in sorted(set(wanted) - set(saved))]
    lines += [f"+ {name} is in the checkpoint alone" for name in sorted(alone)]
    if "keys" not in allow:
        _refuse(path, "keys", "does not fit", lines)
    return alone


def check_tensors(
    path: Path,
    objects: Mapping[str, Any],
    targets: Mapping[str, Tensor],
    saved: Mapping[str, TensorFacts],
    allow: Collection[str],
) -> dict[str, Tensor]:
    """Check shapes and dtypes, and return the targets that can be filled.

    Raises:
        CheckpointMismatchError: a shape or a dtype differs.
    """
    shapes, dtypes = [], []
    fit = {}
    for name, tensor in targets.items():
        if name not in saved:  # allowed by `check_names`
            continue
        fact = saved[name]
        if tuple(tensor.shape) != fact.shape:
            shapes.append((name, f"{name} is {list(fact.shape)} there and {list(tensor.shape)} here"))
            continue
        if dtype_name(tensor.dtype) != fact.dtype:
            dtypes.append(f"{name} is {fact.dtype} there and {dtype_name(tensor.dtype)} here")
        fit[name] = tensor
    if "shapes" not in allow:
        _refuse(path, "shapes", "does not fit", [line for _, line in shapes])
    if "dtypes" not in allow:
        _refuse(path, "dtypes", "does not fit", dtypes)
    # The optimiser's state of a parameter that starts with new values is of no use.
    optimizers = [key for key, value in objects.items() if isinstance(value, Optimizer)]
    stale = tuple(f"{key}.state.{name}." for key in optimizers for name, _ in shapes)
    return {name: tensor for name, tensor in fit.items() if not stale or not name.startswith(stale)}


def _refuse(path: Path, kind: str, what: str, lines: list[str]) -> None:
    if lines:
        shown = "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
        raise CheckpointMismatchError(
            f"{path} {what}: {shown}",
            hint=f"was the model or the config changed since? To continue all the same: checkpoint.allow=[{kind}]",
        )


def _is_under(key: str, others: Collection[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in others)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
