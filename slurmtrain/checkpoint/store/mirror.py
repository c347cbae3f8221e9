"""Copies of committed checkpoints in an object store: scratch is wiped, and clusters go away.

Promise: every copy that `committed` names is complete; no upload that dies at any moment can leave one that is not;
nothing that was committed is ever written again.

The steps, and why each is needed. Object stores have no rename, and overwrite without asking:
 1. A copy has a prefix of its own, `<url>/checkpoint_0001000.7-1f0c9a3b/`: step, order of the incarnation, and the
    beginning of the digest in COMPLETE. The digest, because a run that moved to another cluster counts its incarnations
    from the beginning there: another checkpoint of the same step and order has another prefix.
 2. Every rank uploads its own files, block by block, and compares their sizes with what the store reports.
 3. When all have, rank 0 compares what is in the store with the manifest: names and sizes.
 4. manifest.json, then COMPLETE: one small object that is there or not. COMPLETE alone commits.
 5. A process that removes a copy deletes COMPLETE first.

Stores: whatever fsspec knows (s3://, gs://, file://, memory://). fsspec comes with torch; s3:// needs the package s3fs,
and gs:// gcsfs. What a store reports is believed at once: Amazon's and Google's are consistent in that way. Parts of a
file whose upload was killed are visible to nobody, and are charged for: a bucket needs a rule that removes incomplete
multipart uploads.

Sizes are compared here, digests when a copy is restored. This module does not decide when to copy, and knows neither
torch nor ranks: the synchronisation of ranks between steps 2 and 3 is the caller's.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES
from slurmtrain.checkpoint.format.directory import COMPLETE, MANIFEST, checkpoint_name, step_of
from slurmtrain.checkpoint.format.manifest import (
    FILE_NAME,
    MANIFEST_BYTES,
    Manifest,
    parse_manifest,
    read_manifest_bytes,
)
from slurmtrain.checkpoint.store.retention import UNKNOWN_SOUNDNESS, Keep, Kept, Soundness, surplus
from slurmtrain.checkpoint.store.transfers import note_block
from slurmtrain.errors import CheckpointError
from slurmtrain.system.files import fsync_directory
from slurmtrain.system.modes import file_mode

T = TypeVar("T")

COPY_NAME = re.compile(r"checkpoint_(\d{7,})\.(\d+)-([0-9a-f]{8})")
DAMAGED = "DAMAGED"
DIGEST = re.compile(r"[0-9a-f]{64}")
COMPLETE_BYTES = 65  # a digest and a newline: COMPLETE that a file system holds half of is none
LEFTOVER_S = 86400.0  # no upload goes on for a day without a file that is new
PARTS = 9000  # greatest number of parts of one object; S3 accepts 10,000

TRIES = 4
FIRST_PAUSE_S = 1.0
# Trying again cannot help. All of them are OSErrors, as are TimeoutError and ConnectionError, which can be helped.
FINAL = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
# Packages whose errors a store's package passes on unchanged.
STORE_PACKAGES = {
    "aiobotocore",
    "aiohttp",
    "azure",
    "botocore",
    "fsspec",
    "gcsfs",
    "google",
    "requests",
    "s3fs",
    "urllib3",
}


class MissingError(CheckpointError):
    """The store has no such object."""


class Mirror:
    """The copies under one URL.

    Every method raises CheckpointError, naming URL and file, if the store still fails at the fourth try.

    Args:
        url: a folder: s3://bucket/run, gs://bucket/run, file:///path. Copies of two runs need two folders.
        sleep: waits between tries, for some seconds.

    Raises:
        CheckpointError: it is no URL, or has no folder or an unknown protocol, or the protocol's package is not
            installed.
    """

    def __init__(self, url: str, *, sleep: Callable[[float], None] = time.sleep):
        protocol, separator, _ = url.partition("://")
        if not separator:
            raise CheckpointError(
                f"{url!r} is not a URL that checkpoints can be copied to",
                hint="write s3://bucket/folder, gs://... or file:///folder",
            )
        try:
            self._fs, root = url_to_fs(url)
        except ImportError as error:
            package = known_implementations.get(protocol, {}).get("class", protocol).partition(".")[0]
            raise CheckpointError(
                f"checkpoints cannot be copied to {protocol}:// without a package that is not installed: {error}",
                hint=f"pip install '{package}'",
            ) from None
        except Exception as error:
            if not isinstance(error, ValueError | OSError) and not _is_of_a_store(error):
                raise
            raise CheckpointError(
                f"checkpoints cannot be copied to {protocol}://: {_sentence(error)}",
                hint="write s3://bucket/folder, gs://bucket/folder or file:///folder",
            ) from None
        self._root = root.rstrip("/")
        if not self._root:
            raise CheckpointError(
                f"{protocol}:// names no folder to copy checkpoints to", hint="use a separate folder for every run"
            )
        self.url: str = self._fs.unstrip_protocol(self._root)  # without a password that the one given may have held
        self._sleep = sleep
        self._metrics: dict[str, Mapping[str, float]] = {}  # metrics of copies, which never change

    # Writing.

    def upload(self, path: Path, names: Sequence[str], order: int, *, check: Callable[[], None] = lambda: None) -> None:
        """Copy these files of the committed checkpoint `path`. Called by every rank for its own files.

        A copy that is complete already is left as it is.

        Args:
            order: order of the incarnation that copies.
            check: called before every block; an error that it raises ends the upload.

        Raises:
            CheckpointError: a file cannot be read here, or cannot be written to the store.
        """
        name = copy_name(path, order)
        if self._is_complete(name):
            return
        for file in names:
            self._upload(path / file, self._at(name, file), check)

    def complete(self, path: Path, order: int) -> None:
        """Commit the copy of `path`. Called by rank 0, when every rank's `upload` has returned.

        Raises:
            CheckpointError: a file of the manifest is missing in the store, or has another size.
        """
        text, expected = read_manifest_bytes(path)
        manifest = parse_manifest(path, text, expected)
        name = copy_name(path, order)
        if self._is_complete(name):
            return
        there = self._sizes(name)
        wrong = [
            f"{file} has {there[file]} bytes instead of {size}" if file in there else f"{file} is missing"
            for file, size in sorted(manifest.sizes.items())
            if there.get(file) != size
        ]
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise CheckpointError(f"{self.url}/{name} is not what was copied: {wrong[0]}{more}")
        self._put(f"{name}/{MANIFEST}", text)
        self._put(f"{name}/{COMPLETE}", f"{expected}\n".encode())

    # Reading.

    def committed(self, at_most: int | None = None) -> list[str]:
        """Return the names of the complete copies, oldest first: by step, then by incarnation.

        The list is empty if there is no such folder.

        Args:
            at_most: those of at most this step; None: of all steps.
        """
        names = [name for name in self._names() if at_most is None or _parts(name)[0] <= at_most]
        return [name for name in names if self._is_complete(name)]

    def manifest_bytes(self, name: str) -> tuple[bytes, str]:
        """Return the bytes of manifest.json of a copy and the digest in its COMPLETE, unchecked.

        Raises:
            CheckpointError: they cannot be read.
            MissingError: it is no complete copy, or no longer one.
        """
        _check_name(name)
        expected = self._get(f"{name}/{COMPLETE}", COMPLETE_BYTES).decode(errors="replace").strip()
        return self._get(f"{name}/{MANIFEST}", MANIFEST_BYTES), expected

    def manifest(self, name: str) -> Manifest:
        """Read and check manifest.json of a copy against COMPLETE, and both against the copy's name.

        Raises:
            CheckpointError: manifest.json is missing, damaged, of another format, or of another checkpoint.
        """
        return self.parse_manifest(name, *self.manifest_bytes(name))

    def parse_manifest(self, name: str, text: bytes, expected: str) -> Manifest:
        """Check what `manifest_bytes` has read, on any rank.

        Raises:
            CheckpointError: manifest.json is damaged, of another format, or of another checkpoint.
        """
        step, _, digest = _parts(name)
        try:
            manifest = parse_manifest(Path(name), text, expected)
        except CheckpointError as error:
            raise CheckpointError(f"in {self.url}: {error.message}", hint=error.hint) from None
        if manifest.step != step or not expected.startswith(digest):
            raise CheckpointError(
                f"{self.url}/{name}: manifest.json is of step {manifest.step} with digest {expected[:8]}, "
                "so it belongs to another checkpoint"
            )
        for file in manifest.files:
            _check_file(file)
        return manifest

    def download(self, name: str, directory: Path, sizes: Mapping[str, int]) -> None:
        """Fetch files of a copy into `directory`, which has none of them yet, and wait until they are on the disk.

        Args:
            sizes: bytes of each of the files, from the manifest; see `share`.

        Raises:
            CheckpointError: a file is missing or has another size, or cannot be written here.
        """
        if not sizes:
            return
        with blocks.threads() as pool:
            for file, size in sizes.items():
                self._download(self._at(name, file), directory / file, size, pool)
        with _Local(directory):
            fsync_directory(directory)

    # Removing.

    def set_aside(self, name: str, why: str) -> None:
        """Mark a damaged copy so that no reader finds it and it is not counted among the kept ones, but keep its files.

        It may have been damaged on the way, and not in the store.
        """
        _check_name(name)
        self._put(f"{name}/{DAMAGED}", why.encode())
        self._remove(f"{name}/{COMPLETE}", recursive=False)

    def damaged(self) -> list[str]:
        """Return the names of the copies that were set aside and still exist."""
        return [name for name in self._names() if DAMAGED in self._sizes(name) and not self._is_complete(name)]

    def prune(
        self,
        keep: Keep,
        *,
        spare: Collection[str] = (),
        soundness: Soundness = UNKNOWN_SOUNDNESS,
    ) -> list[str]:
        """Remove the copies that `keep` does not want, and leftovers of uploads that ended more than a day ago.

        Copies that were set aside stay, and so do leftovers whose times the store does not report.

        Args:
            spare: names of copies that stay in any case: the last one, which is not the newest after a step back.
            soundness: the newest copy that is known to be sound stays, too, and so do those of which it is not known yet.

        Returns:
            Names of what was removed.
        """
        present = self._names()
        complete = [name for name in present if self._is_complete(name)]
        kept = [Kept(_parts(name)[0], self._metrics_of(name) if keep.best else {}) for name in complete]
        spared = {_parts(name)[0] for name in spare}
        steps = set(surplus(kept, keep, in_use=spared, soundness=soundness))
        gone = [name for name in complete if _parts(name)[0] in steps]
        now = time.time()
        gone += [name for name in present if name not in complete and self._is_leftover(name, now)]
        for name in gone:
            self._remove_copy(name)
        return gone

    def remove_newer(self, step: int) -> None:
        """Remove the complete copies of later steps than `step`."""
        for name in self.committed():
            if _parts(name)[0] > step:
                self._remove_copy(name)

    def _remove_copy(self, name: str) -> None:
        # Without COMPLETE no reader sees the copy while its other files are removed, even if that is cut short.
        self._remove(f"{name}/{COMPLETE}", recursive=False)
        self._remove(name, recursive=True)

    def _metrics_of(self, name: str) -> Mapping[str, float]:
        """Return the metrics of a copy; a damaged copy has none.

        A copy that merely cannot be read at the moment is an error: it may be the best, and must not be removed.
        """
        if name not in self._metrics:
            try:
                texts = self.manifest_bytes(name)
            except MissingError:
                return {}
            try:
                self._metrics[name] = self.parse_manifest(name, *texts).metrics
            except CheckpointError:
                return {}
        return self._metrics[name]

    def _is_leftover(self, name: str, now: float) -> bool:
        """Return whether nothing in it has changed for a day; False if the store does not report times."""
        try:
            files = self._try(name, lambda: self._fs.find(f"{self._root}/{name}"))
            if f"{self._root}/{name}/{DAMAGED}" in files:
                return False
            # A file system may hold a directory without a file.
            return all(self._age(file, now) > LEFTOVER_S for file in files or [f"{self._root}/{name}"])
        except (MissingError, NotImplementedError, KeyError):  # s3fs and gcsfs: of what is no object
            return False

    def _age(self, at: str, now: float) -> float:
        changed = self._try(at.removeprefix(f"{self._root}/"), lambda: self._fs.modified(at))
        if not isinstance(changed, datetime):
            raise NotImplementedError
        return now - (changed if changed.tzinfo is not None else changed.replace(tzinfo=UTC)).timestamp()

    def _remove(self, what: str, *, recursive: bool) -> None:
        with suppress(MissingError):  # removed by somebody else, or by an earlier try
            self._try(what, lambda: self._fs.rm(f"{self._root}/{what}", recursive=recursive))

    # Objects.

    def _at(self, name: str, file: str) -> str:
        _check_name(name)
        _check_file(file)
        return f"{name}/{file}"

    def _upload(self, source: Path, what: str, check: Callable[[], None]) -> None:
        with _Local(source):
            size = source.stat().st_size
        part = BLOCK_BYTES * -(-max(1, size) // (BLOCK_BYTES * PARTS))

        def send() -> None:
            # An object store has no directories, and s3fs would make a bucket.
            if getattr(self._fs, "local_file", False):
                self._fs.makedirs(f"{self._root}/{what}".rpartition("/")[0], exist_ok=True)
            sent = 0
            target = self._fs.open(f"{self._root}/{what}", "wb", block_size=part)
            try:
                for block in _blocks_of(source):
                    check()
                    target.write(block)
                    sent += len(block)
                    note_block()
                target.close()
            except BaseException:
                _give_up(target)
                raise
            self._check_size(what, sent)

        self._try(what, send)

    def _put(self, what: str, data: bytes) -> None:
        def put() -> None:
            self._fs.pipe_file(f"{self._root}/{what}", data)
            self._check_size(what, len(data))

        self._try(what, put)

    def _check_size(self, what: str, expected: int) -> None:
        """Raise OSError, after which the operation is tried again, if the store has another size."""
        found = self._info(what)["size"]
        if found != expected:
            raise OSError(errno.EIO, f"the store has {found} bytes instead of {expected}")

    def _get(self, what: str, most: int) -> bytes:
        """Return the bytes of a small object."""

        def get() -> bytes:
            size = self._info(what)["size"]
            if size > most:
                raise CheckpointError(f"{self.url}/{what} has {size} bytes, expected are {most} at most")
            data: bytes = self._fs.cat_file(f"{self._root}/{what}")
            return data

        return self._try(what, get)

    def _download(self, what: str, target: Path, size: int, pool: ThreadPoolExecutor) -> None:
        found = self._try(what, lambda: self._info(what)["size"])
        if found != size:
            raise CheckpointError(f"{self.url}/{what} has {found} bytes instead of {size}")
        with _Local(target):
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode(target.parent))

        def fetch(number: int) -> None:
            begin, end = number * BLOCK_BYTES, min(size, (number + 1) * BLOCK_BYTES)

            def get() -> bytes:
                block: bytes = self._fs.cat_file(f"{self._root}/{what}", start=begin, end=end)
                if len(block) != end - begin:  # a connection that was cut
                    raise OSError(errno.EIO, f"{len(block)} bytes came instead of {end - begin}")
                return block

            block = self._try(what, get)
            with _Local(target):
                blocks.write_all(descriptor, memoryview(block), begin)
            note_block()

        try:
            # Several at a time: one connection does not fill a network. Of an empty object no range can be asked for.
            blocks.each(pool, fetch, range(blocks.block_count(size) if size else 0))
            with _Local(target):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _is_complete(self, name: str) -> bool:
        """Return whether a copy is complete.

        fsspec's `exists` would also return False when the store does not answer.
        """
        try:
            found = self._try(f"{name}/{COMPLETE}", lambda: self._info(f"{name}/{COMPLETE}"))
        except MissingError:
            return False
        return bool(found["type"] == "file" and found["size"] == COMPLETE_BYTES)

    def _names(self) -> list[str]:
        """Return the names of all copies, complete or not."""
        names = {_base(entry) for entry in self._list("")}
        return sorted((name for name in names if COPY_NAME.fullmatch(name)), key=lambda name: (_parts(name)[:2], name))

    def _sizes(self, name: str) -> dict[str, int]:
        return {_base(entry): entry["size"] for entry in self._list(name) if entry["type"] == "file"}

    def _list(self, what: str) -> list[dict[str, Any]]:
        def look() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            found: list[dict[str, Any]] = self._fs.ls(f"{self._root}/{what}".rstrip("/"), detail=True)
            return found

        try:
            return self._try(what, look)
        except MissingError:
            return []

    def _info(self, what: str) -> dict[str, Any]:
        self._fs.invalidate_cache()  # fsspec may answer from a listing of before
        found: dict[str, Any] = self._fs.info(f"{self._root}/{what}")
        return found

    def _try(self, what: str, work: Callable[[], T]) -> T:
        """Run `work`, which asks the store, at most 4 times.

        A store that answers "503 Slow Down" is no error: it does so when many ranks begin at the same moment, until it
        has spread the load (S3 asks for such a pause in its manual). So ranks try again after different times, each
        longer than the one before.

        Raises:
            CheckpointError: the store still fails; the message names URL and file.
            MissingError: there is no such object.
        """
        for attempt in range(1, TRIES + 1):
            try:
                return work()
            except FINAL as error:
                kind = MissingError if isinstance(error, FileNotFoundError) else CheckpointError
                raise kind(
                    f"{self._where(what)}: {_sentence(error)}",
                    hint="check that the folder is there, and what the credentials allow",
                ) from None
            except Exception as error:
                if not isinstance(error, OSError) and not _is_of_a_store(error, self._fs):
                    raise
                if attempt == TRIES:
                    raise CheckpointError(
                        f"{self._where(what)}: the store has failed {TRIES} times: {_sentence(error)}"
                    ) from None
            self._sleep(FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        raise AssertionError

    def _where(self, what: str) -> str:
        return f"{self.url}/{what}".rstrip("/")


def copy_name(path: Path, order: int) -> str:
    """Return the name of the copy that this incarnation makes of the committed checkpoint `path`.

    Raises:
        CheckpointError: it is not committed.
    """
    with _Local(path / COMPLETE):
        digest = (path / COMPLETE).read_text(errors="replace").strip()
    if not DIGEST.fullmatch(digest):
        raise CheckpointError(f"{path / COMPLETE} does not hold a digest")
    return f"{checkpoint_name(step_of(path))}.{order}-{digest[:8]}"


def share(sizes: Mapping[str, int], rank: int, world_size: int) -> dict[str, int]:
    """Return the files that `rank` downloads, when all ranks together download into a file system that they share."""
    return {file: sizes[file] for file in sorted(sizes)[rank::world_size]}


def _parts(name: str) -> tuple[int, int, str]:
    """Return step, order of the incarnation, and beginning of the digest from a copy's name."""
    match = _check_name(name)
    return int(match[1]), int(match[2]), match[3]


def _check_name(name: str) -> re.Match[str]:
    match = COPY_NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{name[:100]!r} is not the name of a copy of a checkpoint")
    return match


def _check_file(file: str) -> None:
    """Check the name of a file: a rank that uploads or downloads COMPLETE would commit."""
    if not FILE_NAME.fullmatch(file) or file in (MANIFEST, COMPLETE, DAMAGED):
        raise CheckpointError(f"{file[:100]!r} is not the name of a file of a checkpoint")


def _base(entry: Mapping[str, Any]) -> str:
    name: str = entry["name"]
    return name.rstrip("/").rpartition("/")[2]


def _blocks_of(path: Path) -> Iterator[bytes]:
    with _Local(path), open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            yield block


class _Local:
    """A context that turns errors of our own disk into CheckpointError.

    So they are not taken for the store's errors and tried again.
    """

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise CheckpointError(f"{self._path}: {_sentence(error)}") from None


def _give_up(target: Any) -> None:
    """End an incomplete upload. Closing alone would finish it: half a file, under the name of a whole one.

    The part that S3 has received by then is visible to nobody, and charged for, until it is told to remove it.
    """
    with suppress(Exception):
        target.discard()
    with suppress(Exception):
        target.close()


def _is_of_a_store(error: Exception, file_system: object = None) -> bool:
    """Return whether an error is of a store's package: of a known one, or of that which this file system is from."""
    package = _package(error)
    return package in STORE_PACKAGES or (file_system is not None and package == _package(file_system))


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _sentence(error: BaseException) -> str:
    text = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
