"""What differs between two checkpoints: ours, whatever layouts wrote them, or files of other programs.

Those are .safetensors, and files of torch.save: these are read with weights_only, so that they run no code, and what needs
more than that is named, and not compared.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.directory import MANIFEST, OWN, file_name, own_name
from slurmtrain.checkpoint.format.manifest import TensorFacts
from slurmtrain.checkpoint.restore.reader import parse_own_state, read_contents, read_whole
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.tensors import bytes_of, dtype_name

SAFETENSORS, TORCH_FILES = ".safetensors", (".pt", ".pth", ".bin", ".ckpt")


class TensorDifference(NamedTuple):
    """A tensor that differs between two checkpoints.

    Attributes:
        why: "values", or what makes them incomparable: "only in the first", "another shape or type".
    """

    name: str
    why: str = "values"


class _Part(NamedTuple):
    """A part of a checkpoint that is compared by itself: a file of another program, or all of ours.

    Attributes:
        read: yields some of its tensors, with their names.
    """

    tensors: Mapping[str, TensorFacts]
    read: Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]
    plain: Mapping[str, Any] = {}


def differences(a: Path, b: Path) -> tuple[list[TensorDifference], list[str]]:
    """Compare everything in two checkpoints, each of ours, or a file or a folder of files of another program.

    Returns:
        The tensors that differ, and the names of the plain values that do, by file; of ours, what ranks have for themselves
            is compared for the ranks that both have.

    Raises:
        CheckpointError: a checkpoint is damaged, or has no file that can be read.
    """
    tensors: list[TensorDifference] = []
    state: list[str] = []
    compared, refused = 0, ""
    with ExitStack() as stack:
        if ours := all((path / MANIFEST).is_file() for path in (a, b)):
            stack.enter_context(retention.reading(a))
            stack.enter_context(retention.reading(b))
            manifests = [read_manifest(path) for path in (a, b)]
            if all(
                getattr(manifests[0], each) == getattr(manifests[1], each) for each in ("files", "tensors", "state")
            ):
                return [], []  # by their digests
            ranks = min(manifest.world_size for manifest in manifests)
            files: list[set[str]] = [{""}, {""}]
        else:
            files = [_files_of_others(path) for path in (a, b)]
        for name in sorted(files[0] | files[1]):
            if name not in files[0] & files[1]:
                state.append(f"{name} (only in the {'second' if name not in files[0] else 'first'})")
                continue
            try:
                left, right = (_of_ours(path, ranks) if ours else _of_file(path / name) for path in (a, b))
            except CheckpointError as error:
                if ours:
                    raise
                refused = refused or error.message
                continue
            compared += 1
            shown = f"{name}: " if name else ""
            tensors += [each._replace(name=shown + each.name) for each in _compare_tensors(left, right)]
            missing = object()
            state += [
                shown + key
                for key in dict.fromkeys([*left.plain, *right.plain])
                if key not in left.tensors.keys() | right.tensors.keys()
                and not _same(left.plain.get(key, missing), right.plain.get(key, missing))
            ]
    if not compared:
        raise CheckpointError(refused or f"{a} has no file of safetensors or of torch.save")
    return tensors, state


# What there is to compare.


def _of_ours(path: Path, ranks: int) -> _Part:
    """Return all tensors and plain values of a checkpoint, but of so many ranks only those that each has for itself."""
    manifest = read_manifest(path)
    contents = read_contents(path, manifest)
    own = [own_name(rank, "") for rank in range(ranks)]  # of their JSON, which begins all of their names
    tensors = {
        name: fact
        for name, fact in sorted(manifest.tensors.items())
        if not name.startswith(OWN) or name.startswith(tuple(own))
    }
    plain = dict(_flat(manifest.state))
    for rank, (_, text) in enumerate(read_whole(path, contents, manifest, own)):
        plain.update(_flat(parse_own_state(path, bytes(bytes_of(text))), file_name(rank)))
    return _Part(tensors, partial(read_whole, path, contents, manifest), plain)


def _files_of_others(path: Path) -> set[str]:
    """Return the files of another program's checkpoint, by their names in its folder."""
    if path.is_file():
        return {""}
    found = [each for each in path.rglob("*") if each.suffix in (SAFETENSORS, *TORCH_FILES)]
    return {str(each.relative_to(path)) for each in found if each.is_file() and not each.is_symlink()}


def _of_file(path: Path) -> _Part:
    plain: dict[str, Any]
    try:
        if path.suffix == SAFETENSORS:
            plain = load_file(path)  # which maps the file, and reads what is looked at
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an older pickle: what it cannot read is an error
                plain = dict(_flat(torch.load(path, map_location="cpu", weights_only=True)))
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        first = str(error).strip().splitlines()[:1]
        raise CheckpointError(f"{path.name} cannot be read safely: {' '.join(first)[:200]}") from None
    tensors = {name: value.detach() for name, value in plain.items() if isinstance(value, Tensor)}
    return _Part(
        {name: TensorFacts(tuple(each.shape), dtype_name(each.dtype)) for name, each in tensors.items()},
        lambda names: ((name, tensors[name]) for name in names),
        {name: value for name, value in plain.items() if name not in tensors},
    )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in dicts and lists by dotted name; a list of numbers is one value."""
    if isinstance(value, Mapping):
        for key, each in value.items() if "__tensor__" not in value else ():  # which is compared as a tensor
            yield from _flat(each, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple) and not all(isinstance(each, int | float) for each in value):
        for index, each in enumerate(value):
            yield from _flat(each, f"{name}.{index}".lstrip("."))
    else:
        yield name, value


# How it differs.


def _same(a: Any, b: Any) -> bool:
    nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return a is b or nan or (type(a) is type(b) and bool(a == b))


def _compare_tensors(a: _Part, b: _Part) -> list[TensorDifference]:
    names = list(dict.fromkeys([*a.tensors, *b.tensors]))
    alike: list[str] = []
    why: dict[str, str] = {}
    for name in names:
        one, other = a.tensors.get(name), b.tensors.get(name)
        if one is None or other is None:
            kind = "a tensor in one of them only" if name in {**a.plain, **b.plain} else None
            why[name] = kind or f"only in the {'second' if one is None else 'first'}"
        elif one != other:
            why[name] = "another shape or type"
        else:
            alike.append(name)
    for (name, left), (_, right) in zip(a.read(alike), b.read(alike), strict=True):
        if not torch.equal(_bits(left), _bits(right)):
            why[name] = "values"
    return [TensorDifference(name, why[name]) for name in names if name in why]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
