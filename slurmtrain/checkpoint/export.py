"""Export the tensors of one object of a checkpoint to a file that other programs read: safetensors, or torch.save.

The rank files are read block by block, in parallel, each byte once. A block is compared with its digest and then copied
to its place in the output, so a .safetensors file of any size takes the memory of a few blocks. The output's name does
not exist before all of it was verified and is on the disk.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES
from slurmtrain.checkpoint.format.directory import INDEX
from slurmtrain.checkpoint.format.dtypes import SAFETENSORS_NAMES, check_types, dtype_name, dtype_of
from slurmtrain.checkpoint.format.index_file import read_whole_index
from slurmtrain.checkpoint.format.manifest import Manifest, read_manifest
from slurmtrain.checkpoint.format.tensor_index import Box, BoxLocation, Index, TensorFacts
from slurmtrain.checkpoint.host_memory import available_memory
from slurmtrain.checkpoint.restore.reader import need_of
from slurmtrain.checkpoint.save.finite import bytes_are_finite
from slurmtrain.checkpoint.store import retention
from slurmtrain.errors import CheckpointError, UsageError, nearest
from slurmtrain.system.files import fsync_directory, give_name, temporary_beside

SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth")
DTYPES = ("float32", "float16", "bfloat16", "float64")
ALIGNMENT = 8  # alignment of the data in a safetensors file
NAMES_SHOWN = 8  # of tensors whose values are not finite

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
    """A file format to which bytes of tensors can be written in any order, from several threads."""

    def write(self, entry: Entry, offset: int, data: memoryview) -> None:
        """Write `data`, the bytes of the tensor from its byte `offset` on."""

    def finish(self) -> None:
        """Write everything to the disk, after all bytes were passed to `write`."""


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
        progress: called with the number of bytes of every block read, from any thread.

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
                checkpoint.copy(output, progress)
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
    index: Index
    entries: Mapping[str, Entry]

    @property
    def about(self) -> dict[str, str]:
        """What an export says of where it comes from."""
        return {"step": str(self.manifest.step), "run_id": str(self.manifest.run_id)}

    def copy(self, output: Output, progress: Callable[[int], None], entries: Mapping[str, Entry] | None = None) -> None:
        """Write all tensors, or some of them, to `output`. Raises as `copy_tensors`."""
        chosen = self.entries if entries is None else entries
        copy_tensors(self.path, self.manifest, self.index, chosen, output, progress)


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
        index = read_whole_index(path, manifest)
        check_types(index.schemas)
        yield OpenCheckpoint(path, manifest, index, entries_of(path, index.facts, only, dtype))


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


# From the rank files to the output.


@dataclass(frozen=True)
class ExportPiece:
    """A box of a tensor, in the bytes `begin` to `end` of a rank file."""

    entry: Entry
    box: Box
    begin: int
    end: int


def copy_tensors(
    path: Path,
    manifest: Manifest,
    index: Index,
    entries: Mapping[str, Entry],
    output: Output,
    progress: Callable[[int], None],
) -> None:
    """Write all `entries`, which are by name in the checkpoint, to `output`.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    found = index.find({name: Box.whole(entry.shape) for name, entry in entries.items()})
    pieces: dict[str, list[ExportPiece]] = {}
    for name, sources in found.items():
        for source in sources:
            piece = _piece(entries[name], source, manifest)
            pieces.setdefault(source.file, []).append(piece)
    for inside in pieces.values():
        inside.sort(key=lambda piece: piece.begin)
    stopped = threading.Event()
    not_finite: set[str] = set()

    def work(block: tuple[str, int]) -> None:
        if stopped.is_set():
            return
        file, number = block
        data = _read_block(path, file, number, manifest.files[file].size, index.digests[file])
        begin = number * BLOCK_BYTES
        inside = pieces[file]
        for piece in inside[bisect_right(inside, begin, key=lambda piece: piece.end) :]:
            if piece.begin >= begin + len(data):
                break
            if not _is_finite(piece, data, begin):
                not_finite.add(piece.entry.name)
            _scatter(piece, data, begin, output)
        progress(len(data))

    ranges = [(file, piece.begin, piece.end) for file, inside in pieces.items() for piece in inside]
    with blocks.threads() as pool:
        try:
            for _ in pool.map(
                work, [(file, number) for file, numbers in need_of(ranges).items() for number in numbers]
            ):
                pass
        finally:
            stopped.set()  # leaving the pool waits for what is queued
    # Parameters that are trained never are, in a checkpoint; buffers, such as masks, may be meant to be so.
    if not_finite:
        shown, more = sorted(not_finite)[:NAMES_SHOWN], len(not_finite) - NAMES_SHOWN
        log.warning(
            "values that are not finite (NaN or infinite) are exported as they are, in %s%s",
            ", ".join(shown),
            f" and {more} more tensors" if more > 0 else "",
        )


def _is_finite(piece: ExportPiece, data: memoryview, begin: int) -> bool:
    """Return whether the part of `piece` in a block that begins at byte `begin` of its file has finite numbers only."""
    low, high = max(piece.begin, begin), min(piece.end, begin + len(data))
    return bytes_are_finite(data[low - begin : high - begin], piece.entry.saved)


def _piece(entry: Entry, source: BoxLocation, manifest: Manifest) -> ExportPiece:
    end = source.offset + source.box.numel * entry.saved.itemsize
    record = manifest.files.get(source.file)
    if record is None or not 0 <= source.offset < end <= record.size or source.offset % entry.saved.itemsize:
        raise CheckpointError(
            f"{INDEX} is damaged: it says that {entry.name} lies at byte {source.offset} of {source.file!r}"
        )
    return ExportPiece(entry, source.box, source.offset, end)


_local = threading.local()


def _read_block(path: Path, file: str, number: int, size: int, digests: bytes) -> memoryview:
    """Read one block into this thread's buffer, and verify it."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(BLOCK_BYTES))
    data: memoryview = _local.buffer[: min(BLOCK_BYTES, size - number * BLOCK_BYTES)]
    try:
        descriptor = blocks.open_file(path / file)
        try:
            found = blocks.digest_block(descriptor, number, size, [data])
        finally:
            os.close(descriptor)
    except (OSError, EOFError) as error:
        raise CheckpointError(
            f"{path.name}: {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if found != blocks.digest_at(digests, number):
        raise CheckpointError(f"{path.name} is damaged: {file} is not what was written: its digest differs")
    return data


def _scatter(piece: ExportPiece, data: memoryview, begin: int, output: Output) -> None:
    """Write to `output` the part of `piece` that lies in the block `data`, which begins at byte `begin` of its file."""
    entry = piece.entry
    low, high = max(piece.begin, begin), min(piece.end, begin + len(data))
    part = _converted(entry, data[low - begin : high - begin])
    first, last = ((byte - piece.begin) // entry.saved.itemsize for byte in (low, high))
    itemsize = entry.dtype.itemsize
    for at, start, stop in runs(piece.box, entry.shape, first, last):
        output.write(entry, at * itemsize, part[start * itemsize : stop * itemsize])


def _converted(entry: Entry, data: memoryview) -> memoryview:
    if entry.dtype == entry.saved:
        return data
    values = torch.frombuffer(data, dtype=entry.saved)
    return in_type(entry, values).view(torch.uint8).numpy().data


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


def runs(box: Box, shape: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield elements `first` to `last` of a box, as stretches that are contiguous in the whole tensor.

    Yields:
        The element of the tensor at which a stretch begins; the stretch's first and last element, counted from `first`.
    """
    # Trailing dimensions that the box has whole, and the one before them, lie together.
    length, outer = 1, 0
    for dimension in reversed(range(len(shape))):
        length *= box.size[dimension]
        outer = dimension
        if box.size[dimension] != shape[dimension]:
            break
    strides = [Box.whole(shape[dimension + 1 :]).numel for dimension in range(len(shape))]
    origin = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    numbers = np.arange(first // length, (last - 1) // length + 1)
    begins = np.full(len(numbers), origin, dtype=np.int64)
    for dimension, coordinate in enumerate(np.unravel_index(numbers, box.size[:outer]) if outer else ()):
        begins += coordinate * strides[dimension]
    for number, begin in zip(numbers.tolist(), begins.tolist(), strict=True):
        start, stop = max(first, number * length), min(last, (number + 1) * length)
        yield begin + start - number * length, start - first, stop - first


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

    def write(self, entry: Entry, offset: int, data: memoryview) -> None:
        blocks.write_all(self._descriptor, data, self._data_start + self._begins[entry.name] + offset)

    def finish(self) -> None:
        """Do nothing, since everything is already written."""


class InMemory:
    """An output that keeps whole tensors in memory.

    Attributes:
        tensors: by name in the output.
    """

    def __init__(self, entries: Sequence[Entry]):
        self.tensors = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu") for entry in entries}
        self._bytes = {name: tensor.reshape(-1).view(torch.uint8).numpy().data for name, tensor in self.tensors.items()}

    def write(self, entry: Entry, offset: int, data: memoryview) -> None:
        self._bytes[entry.name][offset : offset + len(data)] = data

    def finish(self) -> None:
        """Do nothing, since everything is already there."""


class TorchOutput(InMemory):
    """A file of torch.save, for which whole tensors are assembled in memory first."""

    def __init__(self, descriptor: int, entries: Sequence[Entry]):
        size, left = sum(entry.nbytes for entry in entries), available_memory()
        if left is not None and size > left:
            raise CheckpointError(
                f"torch.save needs the whole file in memory: {size / 1e9:.2f} GB, and {left / 1e9:.2f} GB are left",
                hint="export to a .safetensors file, which needs only a few blocks of memory",
            )
        super().__init__(entries)
        self._descriptor = descriptor

    def finish(self) -> None:
        with os.fdopen(self._descriptor, "wb", closefd=False) as file:
            torch.save(self.tensors, file)
