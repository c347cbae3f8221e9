"""The tensors in checkpoints that other programs have written: .safetensors, and files of torch.save. Imports torch.

A file of torch.save is read with weights_only, so it runs no code; what needs more than that is named, and not compared.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmtrain.checkpoint.safetensors_files import StoredTensor, tensors_of
from slurmtrain.checkpoint.tensor_difference import TensorDifference
from slurmtrain.errors import CheckpointError

TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS = ".safetensors"


def differences(a: Path, b: Path) -> tuple[list[TensorDifference], list[str]]:
    """Compare the tensors and the plain values in two checkpoints, each a file or a folder of files.

    Returns:
        The tensors that differ, and the names of the plain values that do, by file.

    Raises:
        CheckpointError: neither has a file that can be read.
    """
    files = [_files(path) for path in (a, b)]
    tensors: list[TensorDifference] = []
    state: list[str] = []
    compared, refused = 0, ""
    for name in sorted({*files[0], *files[1]}):
        if name not in files[0] or name not in files[1]:
            state.append(f"{name} (only in the {'second' if name not in files[0] else 'first'})")
            continue
        try:
            pair = [_values(each[name]) for each in files]
        except CheckpointError as error:
            refused = refused or error.message
            continue
        compared += 1
        prefix = "" if len(files[0]) == 1 and a.is_file() else f"{name}: "
        for key in dict.fromkeys([*pair[0], *pair[1]]):
            found = _compare(prefix + key, pair[0].get(key, _MISSING), pair[1].get(key, _MISSING))
            if isinstance(found, TensorDifference):
                tensors.append(found)
            elif found is not None:
                state.append(found)
    if not compared:
        raise CheckpointError(refused or f"{a} has no file of safetensors or of torch.save")
    return tensors, state


_MISSING = object()


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {"": path}
    found = (each for each in sorted(path.rglob("*")) if each.suffix in (SAFETENSORS, *TORCH_FILES))
    return {str(each.relative_to(path)): each for each in found if each.is_file() and not each.is_symlink()}


def _values(path: Path) -> dict[str, Any]:
    """Return the tensors and plain values of a file, by dotted name."""
    if path.suffix == SAFETENSORS:
        return {name: _read(stored) for name, stored in tensors_of(path).items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an older pickle: what it cannot read is an error
            return dict(_flat(torch.load(path, map_location="cpu", weights_only=True), ""))
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        first = str(error).strip().splitlines()[:1]
        raise CheckpointError(f"{path.name} is not read with weights_only: {' '.join(first)[:200]}") from None


def _read(stored: StoredTensor) -> Tensor:
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=stored.dtype)
    data = torch.from_file(str(stored.file), size=stored.begin + stored.nbytes, dtype=torch.uint8)
    return data[stored.begin :].clone().view(stored.dtype).reshape(stored.shape)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _flat(each, f"{name}.{index}".lstrip("."))
    else:
        yield name, value


def _compare(name: str, a: Any, b: Any) -> TensorDifference | str | None:
    """Return how two values differ; None if they do not."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _compare_tensors(name, a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if a is _MISSING or b is _MISSING:
            return TensorDifference(name, why=f"only in the {'second' if a is _MISSING else 'first'}")
        return TensorDifference(name, why="a tensor in one of them only")
    same = a is b or (type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))))
    return None if same else name


def _compare_tensors(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return TensorDifference(name, why="another shape or type")
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.numel() == 0 or torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
        return None
    if not a.is_floating_point():
        return TensorDifference(name)
    one, other = a.double(), b.double()
    largest = float((one - other).abs().max())
    scale = max(float(one.abs().max()), float(other.abs().max()))
    return TensorDifference(name, largest / scale if math.isfinite(largest) and scale > 0 else math.inf)
