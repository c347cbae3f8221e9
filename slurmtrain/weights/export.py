"""Export the tensors of one object of a checkpoint to files of safetensors, which other programs read.

The tensors are read as for a restore, digests included. A file has to be in memory, and a folder one of its files at a time.
The output's name does not exist before all of it was verified and is on the disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.headers import Contents
from slurmtrain.checkpoint.format.manifest import Box, Manifest, read_manifest
from slurmtrain.checkpoint.host_memory import available_memory
from slurmtrain.checkpoint.restore.reader import read_contents, read_whole
from slurmtrain.checkpoint.safetensors_files import INDEX, SINGLE
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.tensors import SAFETENSORS_NAMES, dtype_name, dtype_of
from slurmtrain.errors import UsageError, nearest
from slurmtrain.system.files import fsync_directory, temporary_beside, write_synced

SAFETENSORS = ".safetensors"
CONFIG = "config.json"
SHARD_BYTES = 5_000_000_000  # as transformers: "5GB"


@dataclass(frozen=True)
class Exported:
    """The file or folder that was written, its number of tensors, its size in bytes, and what a person should know of it."""

    path: Path
    tensors: int
    size: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A tensor to export.

    Attributes:
        name: name in the output.
        shape, saved: global shape, and dtype in the checkpoint.
        dtype: dtype in the output.
        source: name in the checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    saved: torch.dtype
    dtype: torch.dtype
    source: str = ""

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).numel * self.dtype.itemsize


Tensors = Callable[[Sequence[Entry]], Iterable[tuple[Entry, Tensor]]]  # reads those of some entries


def export(
    path: Path,
    out: Path,
    *,
    only: str = "model",
    dtype: str | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Exported:
    """Write the tensors of the object `only` of the checkpoint `path` to `out`, without the object's name in front.

    Args:
        out: ends in .safetensors.
        dtype: dtype to convert floating-point tensors to.
        progress: called with the number of bytes of every tensor read.

    Raises:
        UsageError: `out` or `only` are not valid.
        CheckpointError: the checkpoint is damaged, or `out` cannot be written; `out` does not exist then.
    """
    if out.suffix != SAFETENSORS:
        raise UsageError(f"{out} is not the name of a file of weights", hint=f"end it in {SAFETENSORS}")
    with appearing(out) as temporary, opened(path, only, dtype) as checkpoint:
        entries, read = checkpoint.entries, partial(checkpoint.tensors, progress=progress)
        write_safetensors(temporary, entries, {**checkpoint.about, "object": only}, read)
    return Exported(out, len(entries), out.stat().st_size)


def write_hf_folder(
    out: Path,
    entries: Sequence[Entry],
    tensors: Tensors,
    config: Mapping[str, Any],
    *,
    files: Mapping[str, bytes],
    about: Mapping[str, str],
) -> Exported:
    """Write a folder of weights as save_pretrained of transformers does, completely or not at all.

    A file of tensors has at most SHARD_BYTES of them; a larger tensor has a file of its own.

    Args:
        entries: the tensors, by the names of transformers, in the order in which they fill the files.
        config: the contents of config.json.
        files: further files by name: those of the tokenizer, generation_config.json.
        about: entries of the header of each file of tensors.

    Raises:
        UsageError: `out` exists, or the folder that it is to be in does not.
        CheckpointError: it cannot be written, or reading the tensors fails; `out` does not exist then.
    """
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    with appearing(out, folder=True) as temporary:
        others = {**files, CONFIG: json_bytes(config)}
        if len(shards) == 1:
            names = [SINGLE]
        else:
            file_of = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
            total = sum(entry.nbytes for entry in entries)
            others[INDEX] = json_bytes({"metadata": {"total_size": total}, "weight_map": file_of})
        for name, shard in zip(names, shards, strict=True):
            write_safetensors(temporary / name, shard, about, tensors)
        for name, content in others.items():
            write_synced(temporary / name, content)
    return Exported(out, len(entries), sum(path.stat().st_size for path in out.iterdir()))


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Return the contents of a JSON file, as the libraries of Hugging Face write them."""
    return (json.dumps(values, indent=2) + "\n").encode()


# From a checkpoint.


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is marked as being read, and the tensors of one of its objects."""

    path: Path
    manifest: Manifest
    contents: Contents
    entries: Sequence[Entry]

    @property
    def about(self) -> dict[str, str]:
        """What an export says of where it comes from."""
        return {"step": str(self.manifest.step), "run_id": str(self.manifest.run_id)}

    def tensors(self, entries: Iterable[Entry], progress: Callable[[int], None]) -> Iterator[tuple[Entry, Tensor]]:
        """Yield the tensors of these entries, in their element types.

        Raises:
            CheckpointError: the checkpoint is damaged, or a value is too large for its type.
        """
        wanted = {entry.source: entry for entry in entries}
        # All of a file, which is in memory before it is written.
        for source, tensor in read_whole(self.path, self.contents, self.manifest, wanted, together=math.inf):
            progress(tensor.nbytes)
            yield wanted[source], in_type(wanted[source], tensor)


@contextmanager
def opened(path: Path, only: str, dtype: str | None) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint `path` for an export of its object `only`.

    Args:
        dtype: dtype to convert floating-point tensors to; None: as saved.

    Raises:
        UsageError: there is no such object.
        CheckpointError: the checkpoint is damaged.
    """
    with retention.reading(path):
        manifest = read_manifest(path)
        contents = read_contents(path, manifest)
        entries = []
        for name, fact in manifest.tensors.items():
            if name.startswith(f"{only}."):
                saved = dtype_of(fact.dtype)
                target = dtype_of(dtype) if dtype is not None and saved.is_floating_point else saved
                entries.append(Entry(name.removeprefix(f"{only}."), fact.shape, saved, target, source=name))
        if not entries:
            objects = {name.partition(".")[0] for name in manifest.tensors if "." in name}
            raise UsageError(f"{path} holds no tensors of an object {only!r}", hint=nearest(only, objects))
        yield OpenCheckpoint(path, manifest, contents, entries)


def in_type(entry: Entry, values: Tensor) -> Tensor:
    """Return values in the element type of an entry. Raises CheckpointError if one is too large for it."""
    if values.dtype == entry.dtype:
        return values
    converted = values.to(entry.dtype)
    if bool((converted.isinf() & values.isfinite()).any()):
        raise CheckpointError(
            f"{entry.name} holds values that are too large for {dtype_name(entry.dtype)}",
            hint="bfloat16 has the range of float32",
        )
    return converted


# To a file or a folder.


@contextmanager
def appearing(out: Path, *, folder: bool = False) -> Iterator[Path]:
    """Give a path to write a file to, or a new folder to write into, which becomes `out` at the end.

    Raises:
        UsageError: `out` is not the name of something new.
        CheckpointError: it cannot be written. Nothing is left of what was.
    """
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} to make {out.name} in")
    if os.path.lexists(out):
        raise UsageError(f"{out} exists", hint="choose another name, or remove it first")
    temporary = temporary_beside(out, ".tmp")
    try:
        if folder:
            temporary.mkdir(mode=0o777)  # the umask decides who reads it
        yield temporary
        if folder:
            fsync_directory(temporary)
        temporary.rename(out)
        fsync_directory(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        if folder:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):  # a read-only file system refuses even this
                temporary.unlink()


def write_safetensors(path: Path, entries: Sequence[Entry], about: Mapping[str, str], tensors: Tensors) -> None:
    """Write a new .safetensors file, all of which has to be in memory, and wait until it is on the disk.

    Args:
        about: entries of its header.

    Raises:
        CheckpointError: the format has no place for a tensor, or memory or disk have none.
    """
    for entry in entries:
        if entry.dtype not in SAFETENSORS_NAMES:
            raise CheckpointError(
                f"{entry.name} is {dtype_name(entry.dtype)}, which the safetensors format does not support",
                hint="read it with slurmtrain.Checkpointer.restore",
            )
    size = sum(Box.whole(entry.shape).numel * max(entry.saved.itemsize, entry.dtype.itemsize) for entry in entries)
    left = available_memory()
    if left is not None and size > left:
        raise CheckpointError(
            f"the whole file has to be in memory: {size / 1e9:.2f} GB, and {left / 1e9:.2f} GB are left",
            hint="--format hf writes files of 5 GB one after the other",
        )
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; the library's own files are for their owner alone
    try:
        save_file({entry.name: tensor for entry, tensor in tensors(entries)}, path, {"format": "pt", **about})
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} cannot be written: {error}") from None
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())
