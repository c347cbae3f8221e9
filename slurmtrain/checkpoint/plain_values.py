"""Plain values as JSON: numbers, texts, lists, tuples and dicts, in which a tensor leaves a reference by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError


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
