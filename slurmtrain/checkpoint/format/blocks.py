"""Files as blocks of 16 MiB, each with its SHA-256: written, digested and compared block by block, several at a time.

A digest for every block lets threads and ranks share one file's work, and lets a reader that needs a part of a file
check that part. The work is done by threads, since
SHA-256 and file operations release the interpreter's lock. Imports no torch, and knows nothing of checkpoints.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from slurmtrain.checkpoint.errors import UnreadableError
from slurmtrain.system import patience
from slurmtrain.system.files import file_mode
from slurmtrain.system.patience import LATE_S

A = TypeVar("A")
T = TypeVar("T")

BLOCK_BYTES = 16 << 20
# Read in pieces that stay in the core's own cache until they are digested.
PIECE_BYTES = 512 << 10
DIGEST_LETTERS = 64
# One thread digests 1.5 to 2 GB/s (SHA-256 by the processor's own instructions), so this many digest what one rank's share of
# a node's fast disks or of its network gives. In the background they share the cores with the training.
THREADS, BACKGROUND_THREADS = 8, 4
NICENESS = 10


@dataclass(frozen=True)
class FileRecord:
    """The size and digests of a file as it was written.

    Attributes:
        size: size in bytes.
        digests: SHA-256 of each of the file's blocks, in hex, one after another.
    """

    size: Annotated[int, msgspec.Meta(ge=0)]
    digests: str


def patiently(work: Callable[[], T], path: Path, *, late_s: float = LATE_S) -> T:
    """Run `work`, which reads from the file `path`, again and again while the storage fails, with `patience.RESTORE`.

    Args:
        late_s: seconds to wait for a file that is missing.

    Raises:
        OSError: the file does not exist or is no regular file, or this process may not read it.
        UnreadableError: the storage still fails when patience is over; nothing is known about the file.
    """
    policy = patience.RESTORE
    try:
        return patience.patiently(work, policy, late=path, late_s=late_s)
    except OSError as error:
        if not patience.may_pass(error):
            raise
        raise UnreadableError(
            f"{path} cannot be read: {error.strerror or error}, still after {policy.within_s:.0f} s",
            hint="that is the storage's failure and says nothing about the checkpoint, which stays where it is",
        ) from None


def threads(*, background: bool = False) -> ThreadPoolExecutor:
    """Return a pool for reading, writing and digesting blocks.

    It has two threads for each core that this process may use, since one of them waits for the disk; at most 8.

    Args:
        background: training goes on: take at most 4 threads, and lower their priority, so that others get the core first.
    """
    count = min(BACKGROUND_THREADS if background else THREADS, 2 * len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(count, "checkpoint-blocks", _step_back if background else lambda: None)


def _step_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def block_count(size: int) -> int:
    """Return the number of blocks of a file; an empty file has one, which is empty."""
    return max(1, -(-size // BLOCK_BYTES))


def each(pool: ThreadPoolExecutor, work: Callable[[A], T], items: Iterable[A]) -> list[T]:
    """Return `work` of every item, several at a time, in order; the first error is raised when no thread works any more.

    `pool.map` would not do: a descriptor that is closed while a thread still uses its number could be another file's by
    then.
    """
    futures = [pool.submit(work, item) for item in items]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def write(
    path: Path, image: memoryview, pool: ThreadPoolExecutor, *, check: Callable[[], None] = lambda: None
) -> FileRecord:
    """Write `image` to a new file and wait until it is on the disk. An error of any thread is raised.

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

        def write_block(number: int) -> str:
            check()
            block = image[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            if past_the_cache is None or len(block) < BLOCK_BYTES or not _write_direct(past_the_cache, block, number):
                write_all(descriptor, block, number * BLOCK_BYTES)
            return hashlib.sha256(block).hexdigest()

        digests = "".join(each(pool, write_block, range(block_count(len(image)))))
        os.fsync(descriptor)
    return FileRecord(len(image), digests)


def _write_direct(descriptor: int, block: memoryview, number: int) -> bool:
    """Write a block past the page cache; return False if memory or file system do not have the alignment that this needs."""
    try:
        return os.pwrite(descriptor, block, number * BLOCK_BYTES) == len(block)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to the file from byte `offset` on."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def read_into(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` from the file, from byte `offset` on.

    Raises:
        EOFError: the file ends before.
    """
    while buffer:
        count = os.preadv(descriptor, [buffer], offset)
        if count == 0:
            raise EOFError(f"it ends at byte {offset}")
        buffer, offset = buffer[count:], offset + count


def open_file(path: Path) -> int:
    """Open a regular file for reading; a pipe, or a device that never ends, is an error."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file")
    return descriptor


def digest_block(path: Path, number: int, size: int, into: Sequence[memoryview] | None = None) -> str:
    """Return the SHA-256, in hex, of one block of a file of `size` bytes.

    Args:
        into: buffers that the block's bytes are read into, one after another; together as long as the block.
    """
    checksum = hashlib.sha256()
    offset, end = number * BLOCK_BYTES, min(size, (number + 1) * BLOCK_BYTES)
    pieces: Iterable[memoryview]
    if into is None:
        pieces = (_scratch()[: min(PIECE_BYTES, end - begin)] for begin in range(offset, end, PIECE_BYTES))
    else:
        pieces = (part[begin : begin + PIECE_BYTES] for part in into for begin in range(0, len(part), PIECE_BYTES))
    # No posix_fadvise: the kernel reads ahead in large pages by itself, and in small ones when advised.
    with os.fdopen(open_file(path), "rb", buffering=0) as file:
        for piece in pieces:
            read_into(file.fileno(), piece, offset)
            checksum.update(piece)
            offset += len(piece)
    return checksum.hexdigest()


_local = threading.local()


def _scratch() -> memoryview:
    """Return this thread's buffer of one piece: a new buffer each time would cost as much in page faults as the reading."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(PIECE_BYTES))
    buffer: memoryview = _local.buffer
    return buffer


def find_damage(
    directory: Path,
    files: Mapping[str, FileRecord],
    *,
    contents: bool = True,
    late_s: float = LATE_S,
    progress: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Describe what is wrong with the given files, one sentence each: their sizes, and with `contents` also their digests.

    A storage that fails is waited for, so that only a wrong size, a wrong digest or a missing file counts as damage.

    Args:
        late_s: seconds to wait for all missing files together.
        progress: called with the number of bytes of every block, from any thread.

    Raises:
        UnreadableError: see `patiently`.
    """
    damage = []
    right_size: dict[str, Sequence[int]] = {}
    for name, expected in files.items():
        path, begun = directory / name, time.monotonic()
        try:
            size = patiently(partial(os.stat, path), path, late_s=late_s).st_size
            late_s = max(0.0, late_s - (time.monotonic() - begun))
        except OSError as error:
            late_s = 0.0
            damage.append(cannot_be_read(name, error))
            continue
        if size != expected.size:
            damage.append(f"{name} has {size} bytes instead of {expected.size}")
        else:
            right_size[name] = range(block_count(size))
    if contents:
        with threads() as pool:
            damage += compare(directory, files, right_size, pool, progress=progress)
    return damage


def compare(
    directory: Path,
    records: Mapping[str, FileRecord],
    numbers: Mapping[str, Sequence[int]],
    pool: ThreadPoolExecutor,
    *,
    into: Callable[[str, int], Sequence[memoryview] | None] = lambda name, number: None,
    progress: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Compare blocks of files with their digests, and return what is wrong: one sentence for each file.

    Args:
        records: of the files, by name.
        numbers: of the blocks to compare, by file.
        into: returns buffers that a block is read into; see `digest_block`.
        progress: see `find_damage`.

    Raises:
        UnreadableError: see `patiently`.
    """

    def find_wrong(block: tuple[str, int]) -> str | None:
        name, number = block
        path, size = directory / name, records[name].size
        try:
            found = patiently(partial(digest_block, path, number, size, into(name, number)), path, late_s=0.0)
        except OSError as error:
            return cannot_be_read(name, error)
        except EOFError as error:
            return f"{name} cannot be read: {error}"
        progress(min(BLOCK_BYTES, size - number * BLOCK_BYTES))
        fine = found == records[name].digests[number * DIGEST_LETTERS : (number + 1) * DIGEST_LETTERS]
        return None if fine else f"{name} is not what was written: its digest differs"

    damage: dict[str, str] = {}
    # All blocks of all files at once: one large file must not be one thread's work.
    work = [(name, number) for name in sorted(numbers) for number in numbers[name]]
    for (name, _), wrong in zip(work, each(pool, find_wrong, work), strict=True):
        if wrong is not None:
            damage.setdefault(name, wrong)
    return list(damage.values())


def cannot_be_read(name: str, error: OSError) -> str:
    """Return a sentence for a file that is damaged. Raise `error` itself if it says nothing about the file."""
    if patience.is_of_this_process(error):
        raise error
    return f"{name} cannot be read: {error.strerror or error}"


# A store may be slow. Who watches a rank that waits for a copy to a mirror, or from one, sees by this number that it gets on.
_counter = itertools.count(1)
_moved = 0


def note_block() -> None:
    """Count one more block that this process has copied to or from a mirror. Called from any thread."""
    global _moved
    _moved = next(_counter)


def blocks_moved() -> int:
    """Return the number of blocks so far."""
    return _moved
