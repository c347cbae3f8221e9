"""The tensors of .safetensors files that other programs have written, read by the format's own library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.manifest import Box
from slurmtrain.checkpoint.tensors import SAFETENSORS_NAMES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the names that transformers gives
DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that is open."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Any

    def read(self, box: Box | None = None) -> Tensor:
        """Return a part of it, or all of it."""
        part: Tensor = self.file.get_slice(self.name)[(box or Box.whole(self.shape)).within(Box.whole(self.shape))]
        return part


def tensors_of(source: Path) -> dict[str, StoredTensor]:
    """Return the tensors by name of a .safetensors file, or of a folder with one or several of them.

    Raises:
        CheckpointError: there is none, or one is damaged.
    """
    found: dict[str, StoredTensor] = {}
    for path in _files(source):
        try:
            file: Any = safe_open(path, "pt")
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                held = file.get_slice(name)
                found[name] = StoredTensor(name, DTYPES[held.get_dtype()], tuple(held.get_shape()), file)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except KeyError as error:
            raise CheckpointError(f"{path} has a tensor of type {error}, which is not supported") from None
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}", hint="was it copied completely?") from None
    return found


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    if (source / INDEX).is_file():
        try:
            names = {str(name) for name in json.loads((source / INDEX).read_bytes())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{source / INDEX} cannot be read: {error}") from None
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{source / INDEX} names {name!r}, which is not a file in that folder")
        return [source / name for name in sorted(names)]
    if (source / SINGLE).is_file():
        return [source / SINGLE]
    pickled = next(source.glob("*.bin"), None)
    raise CheckpointError(
        f"{source} has neither {SINGLE} nor {INDEX}",
        hint=f"{pickled.name} is a pickle; write the folder again with save_pretrained of a newer transformers"
        if pickled is not None
        else "name a folder written by save_pretrained",
    )
