"""A directory of checkpoints, and what each of them is: names, manifest, and how a file is written.

A tensor is held as boxes: axis-aligned parts of its global shape, each with a name of its own. A file is written, digested and
compared as blocks of 16 MiB, each with its SHA-256. A digest for every block lets threads and ranks share one file's work, and
lets a reader that needs a part of a file check that part. Imports no torch and no numpy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import sub
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from slurmtrain.checkpoint.errors import CheckpointMismatchError, DamagedError
from slurmtrain.system.files import file_mode, fsync_directory

A = TypeVar("A")
T = TypeVar("T")
Natural = Annotated[int, msgspec.Meta(ge=0)]
Extent = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

FORMAT = 4
MANIFEST, COMPLETE = "manifest.json", "COMPLETE"
OWN = "own/"  # begins the names of what each rank has for itself
OWN_STATE = "own/"  # the entry of a file with the JSON of it
FINAL_NAME = re.compile(r"checkpoint_(\d{7,})(?:\.(\d+))?")
TEMPORARY_NAME = re.compile(r"checkpoint_\d{7,}(?:\.\d+)?\.(?:tmp|removed)-(\d+)")

BLOCK_BYTES = 16 << 20
DIGEST_LETTERS = 64
# One thread digests 1.5 to 2 GB/s (SHA-256 by the processor's own instructions), so this many digest what one rank's share of
# a node's fast disks or of its network gives. In the background they share the cores with the training.
THREADS, BACKGROUND_THREADS = 8, 4
NICENESS = 10

# Of a tensor, not counting extents of 0: torch counts the bytes of an empty one's strides in 64 bits, too.
MOST_ELEMENTS = 1 << 59

# Smaller tensors are written whole by one of the ranks that hold them; larger ones are split among all of these.
SPLIT_BYTES = 1 << 20
EVEN = 8  # rows per rank from which on one row more or less does not matter
MAX_DIMENSIONS = 64  # greatest number of dimensions of a tensor
# Bytes per element by torch's names, for readers that do not import torch.
DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float4_e2m1fn_x2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    "complex128": 16,
}


# What is in a directory.


def checkpoint_name(step: int, revision: int = 1) -> str:
    """Return the final name of a checkpoint; a second one of the same step has revision 2."""
    return f"checkpoint_{step:07d}" + (f".{revision}" if revision > 1 else "")


def file_name(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"rank{rank:05d}.safetensors"


def own_name(rank: int, name: str) -> str:
    """Return the name in a checkpoint of what a rank has for itself under the name `name`."""
    return f"{OWN}{rank:05d}/{name}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = FINAL_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


def committed(directory: Path) -> list[Path]:
    """Return the committed checkpoints, oldest first, without directories that lack COMPLETE."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = FINAL_NAME.fullmatch(path.name)
        if match is not None and (path / COMPLETE).is_file():
            found.append((int(match[1]), int(match[2] or 1), path))
    return [path for _, _, path in sorted(found)]


def newest_committed_step(directory: Path) -> int | None:
    """Return the step of the newest committed checkpoint; None if there is none."""
    found = committed(directory)
    return step_of(found[-1]) if found else None


def remove(path: Path, order: int) -> None:
    """Remove a checkpoint or a leftover. It is renamed first, so that nobody sees it half removed.

    A leftover is renamed, too: if its writer is alive after all, the writer still commits either all of it or nothing.
    Files that cannot be deleted right now (still open over NFS) stay under the name of a leftover until leftovers are
    cleaned up.

    Args:
        path: a checkpoint or a leftover of one; may be gone already.
        order: order of the incarnation that removes it.

    Raises:
        OSError: it could not be renamed, and is as it was.
    """
    checkpoint = FINAL_NAME.match(path.name)
    assert checkpoint is not None, path
    removed = path.with_name(f"{checkpoint[0]}.removed-{order}")
    if path != removed:
        shutil.rmtree(removed, ignore_errors=True)  # an earlier removal of the same step that was cut short
        try:
            path.rename(removed)
        except FileNotFoundError:
            return
        fsync_directory(path.parent)  # otherwise, after a power loss, files may be missing under the old name
    shutil.rmtree(removed, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that no reader finds it, but keep it for people who want to look at it."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(target)
    fsync_directory(path.parent)
    return target


def damaged(directory: Path) -> list[str]:
    """Return the names of the checkpoints that were set aside and still exist."""
    return sorted(path.name for path in directory.glob("checkpoint_*.damaged-*"))


# What is in a checkpoint.


@dataclass(frozen=True)
class Box:
    """A part of a tensor: first index and extent along every dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def intersection(self, other: Box) -> Box | None:
        """Return the part that both boxes have; None: there is none."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(map(sub, ends, start))
        return Box(start, size) if not size or min(size) > 0 else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the index of this box in an array that holds `other`."""
        firsts = map(sub, self.start, other.start)
        return tuple([slice(first, first + extent) for first, extent in zip(firsts, self.size, strict=True)])


@dataclass(frozen=True)
class TensorFacts:
    """The facts of a tensor that all ranks have to agree on: global shape, and dtype ("float32"), one of `DTYPE_BYTES`."""

    shape: Annotated[tuple[Extent, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def piece_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return the name of a box of a tensor in a safetensors header: the tensor's name, and which part of it."""
    if box.size == tuple(shape):
        return name
    return name + "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(box.start, box.size, strict=True)) + "]"


def share(box: Box, itemsize: int, key: str, index: int, holders: int) -> Box | None:
    """Return the part of `box` that the `index`-th of the `holders` ranks that hold it writes; None: nothing.

    Large boxes are cut along the first dimension that is long enough to give even parts, so that every rank writes, and
    has to copy, the same number of bytes. Each smaller box is written by one rank, chosen by a checksum of the name:
    the same on all ranks.
    """
    if holders == 1:
        return box
    if math.prod(box.size) * itemsize >= SPLIT_BYTES:
        even = [dimension for dimension, extent in enumerate(box.size) if extent >= EVEN * holders]
        dimension = even[0] if even else max(range(len(box.size)), key=lambda one: box.size[one], default=0)
        extent = box.size[dimension] if box.size else 1
        if extent >= holders:
            first, last = extent * index // holders, extent * (index + 1) // holders
            start, size = list(box.start), list(box.size)
            start[dimension] += first
            size[dimension] = last - first
            return Box(tuple(start), tuple(size))
    return box if zlib.crc32(key.encode()) % holders == index else None


@dataclass(frozen=True)
class FileRecord:
    """The size and digests of a file as it was written.

    Attributes:
        size: size in bytes.
        digests: SHA-256 of each of the file's blocks, in hex, one after another.
    """

    size: Annotated[int, msgspec.Meta(ge=0)]
    digests: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint: its contents, and what it belongs to.

    Attributes:
        format: version of the format.
        run_id: the run that has saved it; empty without one.
        step: optimiser steps done.
        incarnation, incarnation_label: the incarnation of the run that has saved it; see `store.commit`.
        world_size: number of ranks that have saved it.
        torch_version: of those ranks.
        files: record of the file of every rank.
        headers: SHA-256, in hex, of the header of every file, with its length in front.
        tensors: global shape and dtype of all tensors by name; what a rank has for itself has its number there (`own_name`).
        state: everything that is not a tensor and the same on all ranks.
        config: config values of the run, so that later changes can be found.
        metrics: metrics of this step, as they were passed to `save`.
        created: unix time of the commit in seconds; for people, nothing is decided by it.
    """

    format: int
    run_id: str
    step: Natural
    incarnation: Natural
    incarnation_label: str
    world_size: Natural
    torch_version: str
    files: Mapping[str, FileRecord]
    headers: Mapping[str, str]
    tensors: Mapping[str, TensorFacts]
    state: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: float = 0.0

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(record.size for record in self.files.values())


def parse_manifest(path: Path, text: str, expected: str) -> Manifest:
    """Return the manifest in `text`, checked against the digest `expected`.

    Raises:
        DamagedError: the manifest is damaged. CheckpointMismatchError: it is of another format.
    """
    if hashlib.sha256(text.encode()).hexdigest() != expected:
        raise DamagedError(f"{path} is damaged: the digest of manifest.json is not the one in COMPLETE")
    try:
        values = json.loads(text)
        if values.get("format") != FORMAT:
            # Not damaged, and nothing to set aside: another version of this package wrote it.
            raise CheckpointMismatchError(
                f"{path} has format {values.get('format')}, expected {FORMAT}",
                hint="read it with the version of slurmtrain that wrote it",
            )
        manifest = msgspec.convert(values, Manifest)
        size = manifest.size
        for name, facts in manifest.tensors.items():
            if facts.dtype not in DTYPE_BYTES:
                raise ValueError(f"{name[:100]} has the unknown dtype {facts.dtype[:100]!r}")
            if facts.nbytes > size or math.prod(filter(None, facts.shape)) >= MOST_ELEMENTS:
                raise ValueError(f"{name[:100]} is larger than the checkpoint")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: manifest.json cannot be read: {error}") from None
    ranks = {file_name(rank) for rank in range(len(manifest.files))}
    if len(ranks) != manifest.world_size or manifest.files.keys() != ranks:
        others = sorted(manifest.files.keys() - ranks)[:1]
        raise DamagedError(
            f"{path} is damaged: manifest.json has other files than one for each of its {manifest.world_size} ranks"
            + "".join(f": {name[:100]!r}" for name in others)
        )
    named = FINAL_NAME.fullmatch(path.name)
    if named is not None and manifest.step != int(named[1]):
        raise DamagedError(
            f"{path} is damaged: manifest.json is of step {manifest.step}, so it belongs to another checkpoint"
        )
    return manifest


# Writing.


def each(work: Callable[[A], T], items: Iterable[A], *, background: bool = False) -> list[T]:
    """Return `work` of every item, in order, by threads; the first error is raised when no thread works any more.

    There are two threads for each core that this process may use, since one of them waits for the disk; at most 8.

    Args:
        background: training goes on: take at most 4 threads, and lower their priority, so that others get the core first.
    """
    count = min(BACKGROUND_THREADS if background else THREADS, 2 * len(os.sched_getaffinity(0)))
    step_back = partial(os.setpriority, os.PRIO_PROCESS, 0, NICENESS)  # 0 is the thread that calls, in Linux
    pool = ThreadPoolExecutor(count, "checkpoint-blocks", step_back if background else None)
    try:
        return list(pool.map(work, items))
    finally:
        # It waits: a descriptor that is closed while a thread still uses its number could be another file's by then.
        pool.shutdown(cancel_futures=True)


def write_file(path: Path, image: memoryview, *, check: Callable[[], None] = lambda: None) -> FileRecord:
    """Write `image` to a new file, in the background, and wait until it is on the disk. An error of any thread is raised.

    Args:
        check: called before every block; an error that it raises ends the writing.
    """
    with ExitStack() as opened:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode(path.parent))
        opened.callback(os.close, descriptor)
        past_the_cache: int | None = None
        with suppress(OSError):  # not every file system can
            # Past the page cache, which saves a copy of every byte and its memory (open(2), O_DIRECT).
            past_the_cache = os.open(path, os.O_WRONLY | os.O_DIRECT)
            opened.callback(os.close, past_the_cache)

        def write_block(begin: int) -> str:
            check()
            block = image[begin : begin + BLOCK_BYTES]
            done = 0
            if past_the_cache is not None and len(block) == BLOCK_BYTES:
                try:
                    done = os.pwrite(past_the_cache, block, begin)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # memory or file system do not have the alignment that this needs
                        raise
                done = done if done == len(block) else 0
            while done < len(block):
                done += os.pwrite(descriptor, block[done:], begin + done)
            return hashlib.sha256(block).hexdigest()

        # An empty file has one block, which is empty.
        digests = "".join(each(write_block, range(0, max(1, len(image)), BLOCK_BYTES), background=True))
        os.fsync(descriptor)
    return FileRecord(len(image), digests)
