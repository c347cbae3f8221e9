"""Export the tensors of one object of a checkpoint to files of safetensors, which other programs read.

The tensors are read as for a restore, digests included. A file has to be in memory, and a folder one of its files at a time.
The output's name does not exist before all of it was verified and is on the disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.blocks import read_manifest
from slurmtrain.checkpoint.format.manifest import Manifest
from slurmtrain.checkpoint.restore.reader import Contents, read_contents, read_whole
from slurmtrain.checkpoint.save.staging import available_memory
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.tensors import SAFETENSORS_NAMES, dtype_name, dtype_of
from slurmtrain.errors import UsageError, nearest
from slurmtrain.system.files import fsync_directory, temporary_beside, write_new
from slurmtrain.weights.hf_names import INDEX

SAFETENSORS = ".safetensors"
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
        shape: global shape.
        dtype: dtype in the output.
        source: name in the checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
    with appearing(out) as temporary, opened(path, only, dtype, progress) as checkpoint:
        checkpoint.write_file(temporary, checkpoint.entries, object=only)
    return Exported(out, len(checkpoint.entries), out.stat().st_size)


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Return the contents of a JSON file, as the libraries of Hugging Face write them."""
    return (json.dumps(values, indent=2) + "\n").encode()


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is marked as being read, and the tensors of one of its objects."""

    path: Path
    manifest: Manifest
    contents: Contents
    entries: Sequence[Entry]
    progress: Callable[[int], None]

    def write_folder(
        self,
        out: Path,
        entries: Sequence[Entry],
        files: Mapping[str, bytes],
        *,
        stem: str = "model",
        one_file: bool = False,
    ) -> Exported:
        """Write a folder of weights as save_pretrained does, completely or not at all.

        A file of tensors has at most SHARD_BYTES of them; a larger tensor has a file of its own.

        Args:
            entries: the tensors, in the order in which they fill the files.
            files: further files by name: config.json, those of the tokenizer, generation_config.json.
            stem: begins the names of the files of tensors.
            one_file: all tensors in one, since peft reads no more.

        Raises:
            UsageError: `out` exists, or the folder that it is to be in does not exist.
            CheckpointError: it cannot be written, or reading the tensors fails; `out` does not exist then.
        """
        shards: list[list[Entry]] = [[]]
        size = 0
        for entry in entries:
            if shards[-1] and size + entry.nbytes > SHARD_BYTES and not one_file:
                shards.append([])
                size = 0
            shards[-1].append(entry)
            size += entry.nbytes
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}{SAFETENSORS}" for number in range(1, len(shards) + 1)]
        others = dict(files)
        if len(shards) == 1:
            names = [stem + SAFETENSORS]
        else:
            file_of = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
            total = sum(entry.nbytes for entry in entries)
            others[INDEX] = json_bytes({"metadata": {"total_size": total}, "weight_map": file_of})
        with appearing(out, folder=True) as temporary:
            for name, shard in zip(names, shards, strict=True):
                self.write_file(temporary / name, shard)
            for name, content in others.items():
                write_new(temporary / name, content)
        return Exported(out, len(entries), sum(path.stat().st_size for path in out.iterdir()))

    def write_file(self, path: Path, entries: Sequence[Entry], **about: str) -> None:
        """Write a new .safetensors file, all of which has to be in memory, and wait until it is on the disk.

        Args:
            about: more entries of its header than where it comes from.

        Raises:
            CheckpointError: the checkpoint is damaged, the format has no place for a tensor, a value is too large for its
                type, or memory or disk have no room.
        """
        for entry in entries:
            if entry.dtype not in SAFETENSORS_NAMES:
                raise CheckpointError(
                    f"{entry.name} is {dtype_name(entry.dtype)}, which the safetensors format does not support",
                    hint="read it with slurmtrain.Checkpointer.restore",
                )
        # What is read is in memory at once, and goes as it is converted.
        size = sum(max(entry.nbytes, self.manifest.tensors[entry.source].nbytes) for entry in entries)
        left = available_memory()
        if left is not None and size > left:
            raise CheckpointError(
                f"the whole file has to be in memory: {size / 1e9:.2f} GB, and {left / 1e9:.2f} GB are left",
                hint="--format hf writes files of 5 GB one after the other",
            )
        wanted = {entry.source: entry for entry in entries}
        tensors = {}
        # All of the file's together, which are in memory before it is written.
        for source, tensor in read_whole(self.path, self.contents, self.manifest, wanted, together=math.inf):
            entry = wanted[source]
            tensors[entry.name] = converted = tensor.to(entry.dtype)
            if tensor.dtype != entry.dtype and bool((converted.isinf() & tensor.isfinite()).any()):
                raise CheckpointError(
                    f"{entry.name} holds values that are too large for {dtype_name(entry.dtype)}",
                    hint="bfloat16 has the range of float32",
                )
            self.progress(tensor.nbytes)
        path.touch()
        mode = path.stat().st_mode  # as the umask has it; the library's own files are for their owner alone
        origin = {"step": str(self.manifest.step), "run_id": str(self.manifest.run_id)}
        try:
            save_file(tensors, path, {"format": "pt", **origin, **about})
        except SafetensorError as error:
            raise CheckpointError(f"{path.name} cannot be written: {error}") from None
        path.chmod(mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def opened(
    path: Path, only: str, dtype: str | None, progress: Callable[[int], None] = lambda count: None
) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint `path` for an export of its object `only`.

    Args:
        dtype: dtype to convert floating-point tensors to; None: as saved.
        progress: called with the number of bytes of every tensor read.

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
                entries.append(Entry(name.removeprefix(f"{only}."), fact.shape, target, source=name))
        if not entries:
            objects = {name.partition(".")[0] for name in manifest.tensors if "." in name}
            raise UsageError(f"{path} holds no tensors of an object {only!r}", hint=nearest(only, objects))
        yield OpenCheckpoint(path, manifest, contents, entries, progress)


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
