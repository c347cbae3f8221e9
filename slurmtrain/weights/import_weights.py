"""Weights of other programs -> a checkpoint that a run begins from: checkpoint.restore_from=PATH checkpoint.restore_only=model.

The names of tensors are kept, but for what wrappers add to them, and those of Hugging Face's Llama and its relatives become
the decoder's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.boxes import Box
from slurmtrain.checkpoint.safetensors_files import StoredTensor, Wanted, tensors_of
from slurmtrain.checkpoint.safetensors_files import read as read_stored
from slurmtrain.config import known_models
from slurmtrain.errors import UsageError, nearest
from slurmtrain.weights import hf_names
from slurmtrain.weights.write_whole import write_checkpoint

MODEL = "model"
DCP_METADATA = ".metadata"  # a pickle, which is not read
# What DistributedDataParallel, torch.compile and FSDP 1 put into the names of parameters.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Keys under which programs save a model beside other things.
KEYS = ("model", "state_dict", "model_state_dict", "module")

Facts = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Imported:
    """The checkpoint that was made: its path, the number of its tensors, their bytes, and their element types."""

    path: Path
    tensors: int
    size: int
    dtypes: frozenset[torch.dtype]


@dataclass(frozen=True)
class Source:
    """Tensors of another program: shape and element type by name, and a function that reads one."""

    facts: Facts
    read: Callable[[str], Tensor]


def import_weights(
    source: Path,
    directory: Path,
    *,
    only: str | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Imported:
    """Write the tensors of `source` as the model of a checkpoint of step 0 in `directory`.

    Args:
        source: a folder of Hugging Face, or a file: .safetensors, or one of torch.save.
        only: the tensors whose names begin with this and a dot, without it; None: those of the model, if `source` has others.
        progress: called with the bytes of each tensor.

    Raises:
        UsageError: `source` is none of these, or has no such tensors.
        CheckpointError: it cannot be read, or the checkpoint cannot be written.
    """
    found = open_source(source, only)
    if only is None and _is_of_another_family(source):
        names = {name: name for name in found.facts}
    else:
        names = imported_names(list(found.facts), only)
    if not names:
        groups = {name.partition(".")[0] for name in found.facts}
        raise UsageError(f"{source} holds no tensors {only or MODEL!r}", hint=nearest(only or MODEL, groups))
    back = {f"{MODEL}.{new}": old for old, new in names.items()}
    if len(back) != len(names):
        raise CheckpointError(f"{source}: two of its tensors have one name, when wrappers are left out")
    facts = {new: found.facts[old] for new, old in back.items()}
    path = write_checkpoint(
        directory, facts, lambda name: found.read(back[name]), label=f"import of {source.name}", progress=progress
    )
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in facts.values())
    return Imported(path, len(facts), size, frozenset(dtype for _, dtype in facts.values()))


def open_source(source: Path, only: str | None) -> Source:
    """Return the tensors of a folder or file, none of which is in memory yet."""
    if not source.exists():
        raise UsageError(f"there is no file or folder {source}")
    if (source / DCP_METADATA).is_file():
        raise UsageError(
            f"{source} is a folder of torch.distributed.checkpoint",
            hint=f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {source} FILE.pt, and import FILE.pt",
        )
    if source.is_dir() or source.suffix == ".safetensors":
        return _stored(tensors_of(source))
    return _of_torch(source, only)


def _stored(tensors: Mapping[str, StoredTensor]) -> Source:
    def read(name: str) -> Tensor:
        stored = tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        read_stored([Wanted(stored, Box.whole(stored.shape), tensor)])
        return tensor

    return Source({name: (stored.shape, stored.dtype) for name, stored in tensors.items()}, read)


def _of_torch(file: Path, only: str | None) -> Source:
    """Return the tensors of a file of torch.save, mapped into memory, which is not read before a tensor is."""
    try:
        try:
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # saved before torch 1.6, which cannot be mapped
            values = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} contains more than tensors and plain values, and is not read because that could execute code: "
            f"{_first_line(error)}",
            hint="save the model's state_dict() alone: torch.save(model.state_dict(), file)",
        ) from None
    except Exception as error:  # torch's unpickler takes any other file for a pickle, and fails at any of its lines
        raise CheckpointError(f"{file} is not a torch.save file: {_first_line(error)}") from None
    tensors = dict(_leaves(values))
    dense = {name: tensor for name, tensor in tensors.items() if tensor.layout == torch.strided}
    return Source({name: (tuple(each.shape), each.dtype) for name, each in dense.items()}, dense.__getitem__)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(values, Tensor):
        yield prefix.removesuffix("."), values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _leaves(value, f"{prefix}{key}.")


def _is_of_another_family(source: Path) -> bool:
    """Return whether a folder says that the decoder does not compute its model, though it may name tensors alike (Gemma)."""
    described = source.is_dir() and (source / known_models.CONFIG).is_file()
    return described and known_models.read_config(source).get("model_type") not in known_models.FAMILIES


def imported_names(names: list[str], only: str | None) -> dict[str, str]:
    """Return the model's tensors among `names`, each with its name in the model."""
    if only is None:
        only = _group_of_model(names)
    prefix = f"{only}." if only else ""
    inside = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    plain = {
        name: ".".join(part for part in inner.split(".") if part not in WRAPPERS) for name, inner in inside.items()
    }
    wanted = {name: inner for name, inner in plain.items() if not hf_names.is_superfluous(inner)}
    renamed = {name: hf_names.decoder_name(inner) for name, inner in wanted.items()}
    if wanted and all(renamed.values()):
        return {name: new for name, new in renamed.items() if new}
    return wanted


def _group_of_model(names: list[str]) -> str:
    """Return the key that the model's tensors lie under; "": under none."""
    if all(hf_names.decoder_name(name) or hf_names.is_superfluous(name) for name in names):
        return ""  # whose names begin with "model.", too
    groups = {name.partition(".")[0] for name in names}
    if "lm_head" in groups:
        return ""  # of transformers, whose "model" is without it
    return next((key for key in KEYS if key in groups and (len(groups) > 1 or key == MODEL)), "")
