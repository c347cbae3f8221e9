"""How the files of a checkpoint are written, and read: with patience, and compared with their digests.

A file is written, digested and compared as blocks of 16 MiB, each with its SHA-256. A digest for every block lets threads and
ranks share one file's work, and lets a reader that needs a part of a file check that part. Imports no torch and no numpy.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from slurmtrain.checkpoint.errors import DamagedError, UnreadableError
from slurmtrain.checkpoint.format.directory import COMPLETE, MANIFEST
from slurmtrain.checkpoint.format.manifest import DIGEST_LETTERS, FileRecord, Manifest, parse_manifest
from slurmtrain.system import patience
from slurmtrain.system.files import file_mode
from slurmtrain.system.patience import LATE_S

A = TypeVar("A")
T = TypeVar("T")

# Read in pieces that stay in the core's own cache until they are digested.
PIECE_BYTES = 512 << 10
MANIFEST_BYTES = 1 << 30  # more than that of a million tensors

BLOCK_BYTES = 16 << 20
# One thread digests 1.5 to 2 GB/s (SHA-256 by the processor's own instructions), so this many digest what one rank's share of
# a node's fast disks or of its network gives. In the background they share the cores with the training.
THREADS, BACKGROUND_THREADS = 8, 4
NICENESS = 10


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


# Reading and comparing.


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


def read_manifest(path: Path, *, late_s: float = LATE_S) -> Manifest:
    """Read and check manifest.json against COMPLETE.

    Args:
        late_s: seconds to wait for a file that is missing.

    Raises:
        DamagedError: manifest.json is missing or damaged. CheckpointMismatchError: it is of another format.
        UnreadableError: see `patiently`.
    """
    return parse_manifest(path, *read_manifest_text(path, late_s=late_s))


def read_manifest_text(path: Path, *, late_s: float = LATE_S) -> tuple[str, str]:
    """Return the text of manifest.json and the digest in COMPLETE, unchecked; see `read_manifest`."""

    def read(name: str) -> str:
        with os.fdopen(open_file(path / name), "rb") as file:
            if os.fstat(file.fileno()).st_size > MANIFEST_BYTES:
                raise ValueError(f"{name} has {os.fstat(file.fileno()).st_size} bytes")
            return file.read(MANIFEST_BYTES).decode()

    try:
        files = (MANIFEST, COMPLETE)
        text, digest = (patiently(partial(read, name), path / name, late_s=late_s) for name in files)
    except OSError as error:
        raise DamagedError(f"{path} is damaged: {cannot_be_read(MANIFEST, error)}") from None
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {MANIFEST} cannot be read: {error}") from None
    return text, digest.removesuffix("\n")


def check_block(path: Path, record: FileRecord, number: int, into: Sequence[memoryview] | None = None) -> str | None:
    """Compare a block of a file with its digest, and return what is wrong, in a sentence; None: nothing.

    Args:
        record: of the file.
        into: buffers that the block's bytes are read into, one after another; together as long as the block.

    Raises:
        UnreadableError: see `patiently`.
    """
    begin, end = number * BLOCK_BYTES, min(record.size, (number + 1) * BLOCK_BYTES)

    def digest() -> str:
        checksum, offset = hashlib.sha256(), begin
        pieces: Iterable[memoryview]
        if into is None:
            pieces = (_scratch()[: min(PIECE_BYTES, end - at)] for at in range(begin, end, PIECE_BYTES))
        else:
            pieces = (part[at : at + PIECE_BYTES] for part in into for at in range(0, len(part), PIECE_BYTES))
        # No posix_fadvise: the kernel reads ahead in large pages by itself, and in small ones when advised.
        with os.fdopen(open_file(path), "rb", buffering=0) as file:
            for piece in pieces:
                read_into(file.fileno(), piece, offset)
                checksum.update(piece)
                offset += len(piece)
        return checksum.hexdigest()

    try:
        found = patiently(digest, path, late_s=0.0)
    except OSError as error:
        return cannot_be_read(path.name, error)
    except EOFError as error:
        return f"{path.name} cannot be read: {error}"
    fine = found == record.digests[number * DIGEST_LETTERS : (number + 1) * DIGEST_LETTERS]
    return None if fine else f"{path.name} is not what was written: its digest differs"


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
    damage: list[str] = []
    work: list[tuple[str, int]] = []  # all blocks of all files at once: one large file must not be one thread's work
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
            work += [(name, number) for number in range(max(1, -(-size // BLOCK_BYTES)))]

    def check(block: tuple[str, int]) -> str | None:
        name, number = block
        wrong = check_block(directory / name, files[name], number)
        progress(min(BLOCK_BYTES, files[name].size - number * BLOCK_BYTES))
        return wrong

    if contents:
        damage += dict.fromkeys(filter(None, each(check, work)))
    return damage


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
