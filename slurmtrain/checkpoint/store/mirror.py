"""Copies of committed checkpoints in an object store: scratch is wiped, and clusters go away.

Promise: every copy that `committed` names is complete; no upload that dies at any moment can leave one that is not.

The steps, and why each is needed. Object stores have no rename, and overwrite without asking:
 1. A copy has a prefix of its own, `<url>/checkpoint_0001000.7-1f0c9a3b/`: step, order of the incarnation, and the
    beginning of the digest in COMPLETE. The digest, because a run that moved to another cluster counts its incarnations
    from the beginning there: another checkpoint of the same step and order has another prefix.
 2. Every rank uploads its own files. When all have, rank 0 compares what is in the store with the manifest: names and sizes.
 3. manifest.json, then COMPLETE: one small object that is there or not. COMPLETE alone commits.
 4. A process that removes a copy deletes COMPLETE first.

Stores: whatever fsspec knows (s3://, gs://, file://, memory://). fsspec comes with torch; s3:// needs the package s3fs,
and gs:// gcsfs, which try again by themselves what a busy store has refused. What a store reports is believed at once:
Amazon's and Google's are consistent in that way. Parts of a file whose upload was killed are visible to nobody, and are
charged for: a bucket needs a rule that removes incomplete multipart uploads. Sizes are compared here, digests when a copy
is restored.

A store is slower than the file system: copying has a thread and a group of its own, and skips checkpoints that are
committed faster than it can follow. A copy that fails is reported, and training goes on.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError, UnreadableError
from slurmtrain.checkpoint.format.blocks import each, note_block, read_manifest_text
from slurmtrain.checkpoint.format.directory import COMPLETE, MANIFEST, checkpoint_name, file_name, step_of
from slurmtrain.checkpoint.format.manifest import Manifest, parse_manifest
from slurmtrain.checkpoint.store import commit, retention
from slurmtrain.checkpoint.store.commit import wait_until_visible
from slurmtrain.checkpoint.store.retention import UNKNOWN_SOUNDNESS, Keep, Kept, Soundness, surplus
from slurmtrain.system.files import file_mode, fsync_directory

if TYPE_CHECKING:
    from slurmtrain.checkpoint.ranks import CheckpointIdentity, RankGroup

log = logging.getLogger(__name__)

COPY_NAME = re.compile(r"checkpoint_(\d{7,})\.(\d+)-([0-9a-f]{8})")
SLOWEST_S = 6 * 3600.0  # ranks that are done wait for the slowest upload; a store's hours are not training's


class Mirror:
    """The copies under one URL. Every method raises CheckpointError, naming URL and file, if the store fails.

    Args:
        url: a folder: s3://bucket/run, gs://bucket/run, file:///path. Copies of two runs need two folders.

    Raises:
        CheckpointError: it is no URL, or has no folder or an unknown protocol, or the protocol's package is not
            installed.
    """

    def __init__(self, url: str):
        protocol, separator, _ = url.partition("://")
        hint = "write s3://bucket/folder, gs://bucket/folder or file:///folder"
        if not separator:
            raise CheckpointError(f"{url!r} is not a URL that checkpoints can be copied to", hint=hint)
        try:
            self._fs, root = url_to_fs(url)
        except Exception as error:  # that of a package that is not installed names it
            raise CheckpointError(f"checkpoints cannot be copied to {protocol}://: {error}", hint=hint) from None
        self._root = root.rstrip("/")
        if not self._root:
            raise CheckpointError(
                f"{protocol}:// names no folder to copy checkpoints to", hint="use a separate folder for every run"
            )
        self.url: str = self._fs.unstrip_protocol(self._root)  # without a password that the one given may have held
        if getattr(self._fs, "local_file", False):  # an object store has no directories
            self._fs.auto_mkdir = True
        self._metrics: dict[str, Mapping[str, float]] = {}  # metrics of copies, which never change

    # Writing.

    def upload(self, path: Path, file: str, order: int) -> None:
        """Copy one file of the committed checkpoint `path`. Called by every rank for its own.

        Args:
            order: order of the incarnation that copies.
        """
        target = f"{copy_name(path, order)}/{file}"
        with self._told(target):
            self._fs.put_file(str(path / file), f"{self._root}/{target}", callback=_Progress())

    def complete(self, path: Path, order: int) -> None:
        """Commit the copy of `path`. Called by rank 0, when every rank's `upload` has returned.

        Raises:
            CheckpointError: a file of the manifest is missing in the store, or has another size.
        """
        text, expected = read_manifest_text(path)
        name, there = copy_name(path, order), self._sizes(copy_name(path, order))
        for file, record in sorted(parse_manifest(path, text, expected).files.items()):
            if there.get(file) != record.size:
                raise CheckpointError(
                    f"{self.url}/{name} is not what was copied: {file} "
                    + (f"has {there[file]} bytes instead of {record.size}" if file in there else "is missing")
                )
        self._put(f"{name}/{MANIFEST}", text.encode())
        self._put(f"{name}/{COMPLETE}", f"{expected}\n".encode())

    # Reading.

    def committed(self) -> list[str]:
        """Return the names of the complete copies, oldest first: by step, then by incarnation."""
        return [name for name in self._names() if COMPLETE in self._sizes(name)]

    def manifest(self, name: str) -> tuple[bytes, Manifest]:
        """Return manifest.json of a copy: its bytes, and what it says.

        Raises:
            CheckpointError: it is damaged. CheckpointMismatchError: it is of another format.
            UnreadableError: the store fails.
        """
        with self._told(name):
            text, complete = (self._fs.cat_file(f"{self._root}/{name}/{file}") for file in (MANIFEST, COMPLETE))
        expected = complete.decode(errors="replace").strip()
        try:
            return text, parse_manifest(Path(name), text.decode(errors="replace"), expected)
        except CheckpointError as error:
            raise type(error)(f"in {self.url}: {error.message}", hint=error.hint) from None

    def download(self, name: str, directory: Path, files: Collection[str]) -> None:
        """Fetch files of a copy into `directory`, which has none of them yet, and wait until they are on the disk."""

        def fetch(file: str) -> None:
            target = directory / file
            with self._told(f"{name}/{file}"):
                descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode(directory))
                try:
                    self._fs.get_file(f"{self._root}/{name}/{file}", str(target), callback=_Progress())
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

        each(fetch, files)  # several at a time: one connection does not fill a network
        fsync_directory(directory)

    # Removing.

    def prune(self, keep: Keep, *, spare: str, soundness: Soundness = UNKNOWN_SOUNDNESS) -> list[str]:
        """Remove the copies that `keep` does not want, and leftovers of uploads of this incarnation and older ones.

        Args:
            spare: name of the copy just made, which stays and is not the newest after a step back.
            soundness: the newest copy that is known to be sound stays, too, and so do those of which it is not known yet.

        Returns:
            Names of what was removed.
        """
        names = self._names()
        complete = [name for name in names if COMPLETE in self._sizes(name)]
        for name in complete if keep.best else ():
            self._metrics[name] = self._metrics.get(name) or self.manifest(name)[1].metrics
        kept = [Kept(_step(name), self._metrics.get(name, {})) for name in complete]
        steps = set(surplus(kept, keep, in_use=[_step(spare)], soundness=soundness))
        gone = [name for name in complete if _step(name) in steps]
        gone += [name for name in names if name not in complete and _order(name) <= _order(spare)]
        for name in gone:
            self._remove_copy(name)
        return gone

    def remove_newer(self, step: int) -> None:
        """Remove the complete copies of later steps than `step`."""
        for name in self.committed():
            if _step(name) > step:
                self._remove_copy(name)

    def _remove_copy(self, name: str) -> None:
        # Without COMPLETE no reader sees the copy while its other files are removed, even if that is cut short.
        for what in (f"{self._root}/{name}/{COMPLETE}", f"{self._root}/{name}"):
            with self._told(name), suppress(FileNotFoundError):  # removed by somebody else, or never there
                self._fs.rm(what, recursive=True)

    # Objects.

    def _names(self) -> list[str]:
        """Return the names of all copies, complete or not."""
        names = [name for name, _ in self._list("") if COPY_NAME.fullmatch(name)]
        return sorted(set(names), key=lambda name: (_step(name), _order(name), name))

    def _sizes(self, name: str) -> dict[str, int]:
        return {file: entry["size"] for file, entry in self._list(name) if entry["type"] == "file"}

    def _list(self, what: str) -> list[tuple[str, dict[str, Any]]]:
        with self._told(what):
            self._fs.invalidate_cache()  # fsspec may answer from a listing of before
            try:
                found = self._fs.ls(f"{self._root}/{what}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
        return [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in found]

    def _put(self, what: str, data: bytes) -> None:
        with self._told(what):
            self._fs.pipe_file(f"{self._root}/{what}", data)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn any error into a sentence that names the file: a store's package has errors of its own."""
        try:
            yield
        except Exception as error:
            reason = str(error).strip().partition("\n")[0][:300]
            raise UnreadableError(
                f"{self.url}/{what}".rstrip("/") + f": {type(error).__name__}: {reason}",
                hint="check that the folder is there, and what the credentials allow",
            ) from error


class _Progress(Callback):  # type: ignore[misc]  # fsspec has no types
    """Counts what moves, for whoever waits for it."""

    def relative_update(self, inc: int = 1) -> None:
        note_block()


def copy_name(path: Path, order: int) -> str:
    """Return the name of the copy that this incarnation makes of the committed checkpoint `path`.

    Raises:
        CheckpointError: it is not committed.
    """
    _, digest = read_manifest_text(path)
    return f"{checkpoint_name(step_of(path))}.{order}-{digest[:8]}"


def _step(name: str) -> int:
    return int(name.partition(".")[0].partition("_")[2])


def _order(name: str) -> int:
    return int(name.partition(".")[2].partition("-")[0])


class MirrorUploader:
    """The copies of one run, under one URL. Its methods are called by all ranks together.

    Args:
        url: a folder of this run's own: s3://bucket/run, gs://..., file://...

    Raises:
        CheckpointError: on every rank: there is no such store.
    """

    def __init__(self, url: str, ranks: RankGroup, identity: CheckpointIdentity, keep: Keep):
        self._mirror = ranks.all_do(lambda: Mirror(url))
        self._ranks, self._identity, self._keep = ranks.own_group(SLOWEST_S), identity, keep
        self._thread = threading.Thread()  # of the last copy; this one has ended
        self._skipped: Path | None = None  # the last one, if it came too soon after the one before
        self._leaving = False

    def offer(self, ranks: RankGroup, path: Path, soundness: Soundness = UNKNOWN_SOUNDNESS) -> None:
        """Copy a committed checkpoint in the background, unless the one before is still being copied.

        Args:
            ranks: the ranks of the calling threads.
            path: the committed checkpoint.
        """
        if ranks.on_rank_0(self._thread.is_alive):  # rank 0 decides; the others are done within moments
            self._skipped = path
            return
        self._skipped = None
        held = ExitStack()
        if ranks.rank == 0:
            held.enter_context(retention.reading(path))  # so that it is not removed meanwhile
        self._wait()
        self._thread = threading.Thread(
            target=self._copy, args=(path, held, soundness), name="checkpoint-uploader", daemon=True
        )
        self._thread.start()

    def _wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the copy that is being made; return False if it is not done after `timeout_s` seconds."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _copy(self, path: Path, held: ExitStack, soundness: Soundness) -> None:
        order = self._identity.incarnation.order

        def finish(_: list[None]) -> None:
            self._mirror.complete(path, order)
            self._mirror.prune(self._keep, spare=copy_name(path, order), soundness=soundness)

        try:
            with held:
                self._ranks.all_do(lambda: self._mirror.upload(path, file_name(self._ranks.rank), order), finish)
        except CheckpointError as error:
            if self._ranks.rank == 0 and not self._leaving:
                log.warning("%s was not copied to %s: %s", path.name, self._mirror.url, error.message)

    def close(self, ranks: RankGroup, grace_s: float | None) -> None:
        """Wait for the copying to end.

        With grace_s=None, wait until the last checkpoint is copied, else leave what is not done in time.
        """
        self._leaving = grace_s is not None
        if grace_s is None:
            self._wait()
            if self._skipped is not None:
                self.offer(ranks, self._skipped)
        if self._wait(grace_s):
            self._ranks.end()

    def remove_newer(self, ranks: RankGroup, step: int) -> None:
        """Remove the copies of later steps than `step`, once a copy that is being made is done."""
        self._wait()
        if self._skipped is not None and step_of(self._skipped) > step:
            self._skipped = None
        ranks.on_rank_0(lambda: self._mirror.remove_newer(step))

    def fetch(self, ranks: RankGroup, at_most: int | None, damaged: Collection[str]) -> tuple[Path, str] | None:
        """Commit the newest copy into the directory, which has no checkpoint, and return its path and its name in the store.

        Args:
            at_most: take the newest of at most this step; None: of any step.
            damaged: names of copies that were fetched before, and were damaged.

        Raises:
            CheckpointError: the store does not answer, or what every copy says of itself is damaged, which is not the same as
                a fresh start.
        """
        directory, incarnation, mirror = self._identity.directory, self._identity.incarnation, self._mirror
        text = b""  # of manifest.json, on rank 0

        def choose() -> list[Any] | None:
            """Return name, files, and where to write."""
            nonlocal text
            refused = []
            for name in reversed(mirror.committed()):
                if name in damaged or (at_most is not None and _step(name) > at_most):
                    continue
                try:
                    text, manifest = mirror.manifest(name)
                except (CheckpointMismatchError, UnreadableError):
                    raise
                except CheckpointError as error:
                    log.warning(error.message)
                    refused.append(error.message)
                    continue
                self._identity.check_run(f"{mirror.url}/{name}", manifest, hint="give each run a mirror of its own")
                temporary = commit.begin(directory, manifest.step, incarnation, size=manifest.size)
                return [name, sorted(manifest.files), str(temporary)]
            if refused and at_most is None:
                raise CheckpointMismatchError(
                    f"no checkpoint is left, and every copy in {mirror.url} is damaged: {'; '.join(refused)}",
                    hint="look at them; remove them to start from scratch",
                )
            return None

        chosen = ranks.on_rank_0(choose)
        if chosen is None:
            return None
        name, files, temporary = chosen[0], chosen[1], Path(chosen[2])

        def download() -> None:
            wait_until_visible(temporary)
            mirror.download(name, temporary, files[ranks.rank :: ranks.size])

        def publish(_: list[None]) -> str:
            return str(commit.commit(temporary, text, _step(name), incarnation))

        try:
            final = Path(self._ranks.all_do(download, publish))
        except CheckpointError:
            if ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if ranks.rank == 0:
            log.info("%s was fetched from %s/%s", final.name, mirror.url, name)
        return final, name
