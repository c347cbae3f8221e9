"""Export the tensors of one object of a checkpoint to a file that other programs read: safetensors, or torch.save.

The tensors are read as for a restore, digests included, some of them at a time, so that a .safetensors file of any size
takes the memory of some tensors. The output's name does not exist before all of it was verified and is on the disk.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES
from slurmtrain.checkpoint.format.boxes import Box, TensorFacts
from slurmtrain.checkpoint.format.dtypes import SAFETENSORS_NAMES, dtype_name, dtype_of
from slurmtrain.checkpoint.format.headers import Contents, read_contents
from slurmtrain.checkpoint.format.manifest import Manifest, read_manifest
from slurmtrain.checkpoint.host_memory import available_memory
from slurmtrain.checkpoint.restore.reader import bytes_of, read_whole
from slurmtrain.checkpoint.save.finite import bytes_are_finite
from slurmtrain.checkpoint.store import retention
from slurmtrain.errors import UsageError, nearest
from slurmtrain.system.files import fsync_directory, give_name, temporary_beside

SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth")
DTYPES = ("float32", "float16", "bfloat16", "float64")
ALIGNMENT = 8  # alignment of the data in a safetensors file
NAMES_SHOWN = 8  # of tensors whose values are not finite
BATCH_BYTES, BLOCKS_OF_FILE = 4 << 30, 4

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """The file that was written, its number of tensors and its size in bytes."""

    path: Path
    tensors: int
    size: int


@dataclass(frozen=True)
class Entry:
    """A tensor to export.

    Attributes:
        name: name in the output.
        shape, saved: global shape, and dtype in the checkpoint.
        dtype: dtype in the output.
    """

    name: str
    shape: tuple[int, ...]
    saved: torch.dtype
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).numel * self.dtype.itemsize


class Output(Protocol):
    """A file format to which tensors can be written in any order."""

    def write(self, entry: Entry, tensor: Tensor) -> None:
        """Write a tensor of the entry's shape and element type."""

    def finish(self) -> None:
        """Write everything to the disk, after all tensors were passed to `write`."""


def export(
    path: Path,
    out: Path,
    *,
    only: str = "model",
    dtype: str | None = None,
    force: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Exported:
    """Write the tensors of the object `only` of the checkpoint `path` to `out`, without the object's name in front.

    Args:
        out: ends in .safetensors, or in .pt or .pth: a dict of tensors, for torch.load(weights_only=True).
        dtype: dtype to convert floating-point tensors to.
        force: replace `out` if it exists.
        progress: called with the number of bytes of every tensor read.

    Raises:
        UsageError: `out` or `only` are not valid.
        CheckpointError: the checkpoint is damaged, or `out` cannot be written; `out` does not exist then.
    """
    check_output(out, force=force)
    with opened(path, only, dtype) as checkpoint:
        entries = list(checkpoint.entries.values())
        temporary = temporary_beside(out, ".tmp")
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # the umask decides who reads it
            try:
                output: Output = (
                    SafetensorsOutput(descriptor, entries, {"format": "pt", **checkpoint.about, "object": only})
                    if out.suffix in SAFETENSORS
                    else TorchOutput(descriptor, entries)
                )
                for entry, tensor in checkpoint.tensors(progress):
                    output.write(entry, tensor)
                output.finish()
                os.fsync(descriptor)
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            _publish(temporary, out, force=force)
        except OSError as error:
            raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from None
        finally:
            with suppress(OSError):
                temporary.unlink()
    return Exported(out, len(entries), size)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is marked as being read, and the tensors of one of its objects.

    Attributes:
        entries: the tensors by name in the checkpoint.
    """

    path: Path
    manifest: Manifest
    contents: Contents
    entries: Mapping[str, Entry]

    @property
    def about(self) -> dict[str, str]:
        """What an export says of where it comes from."""
        return {"step": str(self.manifest.step), "run_id": str(self.manifest.run_id)}

    def tensors(
        self, progress: Callable[[int], None], entries: Mapping[str, Entry] | None = None
    ) -> Iterator[tuple[Entry, Tensor]]:
        """Yield all tensors, or those of `entries` (by name in the checkpoint), in the element types of their entries.

        Raises:
            CheckpointError: the checkpoint is damaged, or a value is too large for its type.
        """
        not_finite = []
        for batch in self._batches(self.entries if entries is None else entries):
            found = read_whole(self.path, self.contents, self.manifest, batch)
            for name, entry in batch.items():
                tensor = found.pop(name)
                if not bytes_are_finite(bytes_of(tensor), entry.saved):
                    not_finite.append(entry.name)
                progress(tensor.nbytes)
                yield entry, in_type(entry, tensor)
        # Parameters that are trained never are, in a checkpoint; buffers, such as masks, may be meant to be so.
        if not_finite:
            shown, more = sorted(not_finite)[:NAMES_SHOWN], len(not_finite) - NAMES_SHOWN
            log.warning(
                "values that are not finite (NaN or infinite) are exported as they are, in %s%s",
                ", ".join(shown),
                f" and {more} more tensors" if more > 0 else "",
            )

    def _batches(self, entries: Mapping[str, Entry]) -> Iterator[dict[str, Entry]]:
        """Divide entries into batches that are read at once: some blocks of each file, of which few are then read twice."""
        size = min(BATCH_BYTES, BLOCKS_OF_FILE * BLOCK_BYTES * len(self.contents.files))
        batch: dict[str, Entry] = {}
        held = 0
        for name, entry in entries.items():
            batch[name] = entry
            held += Box.whole(entry.shape).numel * entry.saved.itemsize
            if held >= size:
                yield batch
                batch, held = {}, 0
        if batch:
            yield batch


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
        yield OpenCheckpoint(path, manifest, contents, entries_of(path, contents.facts, only, dtype))


def check_output(out: Path, *, force: bool) -> None:
    """Raise UsageError if nothing can be written to `out`."""
    if out.suffix not in (*SAFETENSORS, *TORCH):
        raise UsageError(
            f"{out} does not have the suffix of a known format",
            hint=f"end it in one of: {', '.join((*SAFETENSORS, *TORCH))}",
        )
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} to write {out.name} into")
    if out.is_dir():
        raise UsageError(f"{out} is a folder")
    if os.path.lexists(out) and not force:
        raise UsageError(f"{out} exists", hint="choose another name, or replace it with --force")


def entries_of(path: Path, facts: Mapping[str, TensorFacts], only: str, dtype: str | None) -> dict[str, Entry]:
    """Return the tensors of the object `only` to export, by name in the checkpoint."""
    target = dtype_of(dtype) if dtype is not None else None
    entries = {}
    for name, fact in facts.items():
        if not name.startswith(f"{only}."):
            continue
        saved = dtype_of(fact.dtype)
        converted = target if target is not None and saved.is_floating_point else saved
        entries[name] = Entry(name.removeprefix(f"{only}."), fact.shape, saved, converted)
    if not entries:
        objects = {name.partition(".")[0] for name in facts if "." in name}
        raise UsageError(f"{path} holds no tensors of an object {only!r}", hint=nearest(only, objects))
    return entries


def _publish(temporary: Path, out: Path, *, force: bool) -> None:
    if force:
        temporary.replace(out)
    else:
        try:
            give_name(temporary, out)
        except FileExistsError:
            raise UsageError(f"{out} exists", hint="choose another name, or replace it with --force") from None
    fsync_directory(out.parent)


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


# The outputs.


class SafetensorsOutput:
    """A .safetensors file: the length of the header, the header, the bytes of all tensors.

    The format is described at https://github.com/huggingface/safetensors#format.
    """

    def __init__(self, descriptor: int, entries: Sequence[Entry], about: Mapping[str, str]):
        self._descriptor = descriptor
        self._begins: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": dict(about)}
        position = 0
        # An element type's size divides the next larger one's, so all are aligned.
        for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
            if entry.dtype not in SAFETENSORS_NAMES:
                raise CheckpointError(
                    f"{entry.name} is {dtype_name(entry.dtype)}, which the safetensors format does not support",
                    hint="export to a .pt file",
                )
            if entry.name == "__metadata__":
                raise CheckpointError(f"the safetensors format knows no tensor called {entry.name}")
            self._begins[entry.name] = position
            header[entry.name] = {
                "dtype": SAFETENSORS_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [position, position := position + entry.nbytes],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
        self._data_start = 8 + len(text)
        free = shutil.disk_usage(f"/proc/self/fd/{descriptor}").free
        if free < self._data_start + position:
            raise CheckpointError(
                f"the export takes {(self._data_start + position) / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free there"
            )
        os.ftruncate(descriptor, self._data_start + position)
        blocks.write_all(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)

    def write(self, entry: Entry, tensor: Tensor) -> None:
        blocks.write_all(self._descriptor, bytes_of(tensor), self._data_start + self._begins[entry.name])

    def finish(self) -> None:
        """Do nothing, since everything is already written."""


class TorchOutput:
    """A file of torch.save, for which all tensors are kept in memory first."""

    def __init__(self, descriptor: int, entries: Sequence[Entry]):
        size, left = sum(entry.nbytes for entry in entries), available_memory()
        if left is not None and size > left:
            raise CheckpointError(
                f"torch.save needs the whole file in memory: {size / 1e9:.2f} GB, and {left / 1e9:.2f} GB are left",
                hint="export to a .safetensors file, which needs the memory of a few tensors",
            )
        self._descriptor = descriptor
        self._tensors: dict[str, Tensor] = {}

    def write(self, entry: Entry, tensor: Tensor) -> None:
        self._tensors[entry.name] = tensor

    def finish(self) -> None:
        with os.fdopen(self._descriptor, "wb", closefd=False) as file:
            torch.save(self._tensors, file)
