"""Checkpoints of torch.distributed.checkpoint (DCP): written from ours, and read, one tensor in memory at a time.

Their metadata is a pickle. It is read by an unpickler that knows the classes of that metadata and no others, so that
reading a folder executes nothing, whoever wrote it.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.weights.export import Exported, appearing, opened

METADATA = ".metadata"
# The modules whose classes the metadata consists of, and what it needs of others.
MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
NAMES = (
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("builtins", "set")),
    *(("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath")),
)


def export_dcp(
    path: Path,
    out: Path,
    *,
    only: str = "model",
    dtype: str | None = None,
    force: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Exported:
    """Write the tensors of the object `only` of the checkpoint `path` to the folder `out`, for torch.distributed.checkpoint.

    Their names are those within the object. The arguments are those of `export.export`.

    Raises:
        UsageError: `out` or `only` are not valid.
        CheckpointError: the checkpoint is damaged, or `out` cannot be written; `out` does not exist then.
    """
    with appearing(out, folder=True, force=force) as temporary, opened(path, only, dtype) as checkpoint:
        entries = checkpoint.entries
        in_checkpoint = {entry.name: name for name, entry in entries.items()}

        def read(name: str) -> Tensor:
            entry = entries[in_checkpoint[name]]
            ((_, tensor),) = checkpoint.tensors(progress, {in_checkpoint[name]: entry})
            return tensor

        state = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries.values()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process
                dcp.save(state, storage_writer=FileSystemWriter(temporary), planner=_Lazily(read), no_dist=True)
        except dcp.CheckpointException as error:
            raise _cause(error) from None
    return Exported(out, len(entries), sum(file.stat().st_size for file in out.iterdir()))


def _cause(error: dcp.CheckpointException) -> Exception:
    """Return the error of ours that torch has wrapped, if there is one."""
    for wrapped in error.failures.values():
        found = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        if isinstance(found, CheckpointError):
            return found
    return CheckpointError(f"torch.distributed.checkpoint failed: {str(error).strip().splitlines()[-1]}")


class _Lazily(DefaultSavePlanner):
    """A planner whose tensors are read when they are written."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._read(write_item.index.fqn)


class DcpFolder:
    """The tensors of a folder that torch.distributed.checkpoint has written.

    Attributes:
        facts: shape and element type of each tensor, by the name that it has there.

    Raises:
        CheckpointError: the folder has no metadata, or it cannot be read.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        try:
            with (folder / METADATA).open("rb") as file:
                metadata = _Unpickler(file).load()
        except OSError as error:
            raise CheckpointError(f"{folder / METADATA} cannot be read: {error.strerror}") from None
        except Exception as error:  # a pickle that is damaged raises anything
            raise CheckpointError(
                f"{folder / METADATA} is no metadata of torch.distributed.checkpoint: {error}"
            ) from None
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{folder / METADATA} is no metadata of torch.distributed.checkpoint")
        self._reader = _Reader(folder, metadata)
        self.facts: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor, from all ranks' files that have a part of it.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        shape, dtype = self.facts[name]
        tensor = torch.empty(shape, dtype=dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load({name: tensor}, storage_reader=self._reader, no_dist=True)
        except dcp.CheckpointException as error:
            raise CheckpointError(
                f"{name} in {self._folder} cannot be read: {str(error).strip().splitlines()[-1][:300]}"
            ) from None
        return tensor


class _Reader(FileSystemReader):
    """A reader that has the metadata already."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self._known = metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known


class _Unpickler(pickle.Unpickler):
    """An unpickler of the metadata's own classes."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module in MODULES and "." not in name) or (module, name) in NAMES or is_dtype:
            found = super().find_class(module, name)
            if module not in MODULES or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs")
