"""Copies of committed checkpoints in an object store, made while training goes on, and fetched if the run directory has none.

A store is slower than the file system: copying has a thread and a group of its own, and skips checkpoints that are
committed faster than it can follow. A copy that fails is reported, and training goes on; the checkpoint itself is
committed.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.directory import step_of
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.save.background_thread import BackgroundThread
from slurmtrain.checkpoint.store import commit, retention
from slurmtrain.checkpoint.store.fencing import wait_until_visible
from slurmtrain.checkpoint.store.mirror import Mirror, copy_name, share
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.checkpoint.store.shared_directory import CheckpointIdentity
from slurmtrain.errors import CheckpointError

log = logging.getLogger(__name__)

SLOWEST_S = 6 * 3600.0  # ranks that are done wait for the slowest upload; a store's hours are not training's


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
        self._thread = BackgroundThread("checkpoint-uploader")
        self._leaving = threading.Event()
        self.soundness = retention.UNKNOWN_SOUNDNESS
        self._skipped: tuple[Path, list[str]] | None = None  # the last one, if it came too soon after the one before

    def offer(self, ranks: RankGroup, path: Path, names: list[str]) -> None:
        """Copy a committed checkpoint in the background, unless the one before is still being copied.

        Args:
            ranks: the ranks of the calling threads.
            path: the committed checkpoint.
            names: names of the files that this rank has written.
        """
        if not ranks.on_rank_0(lambda: self._thread.idle):  # rank 0 decides; the others are done within moments
            self._skipped = path, names
            return
        self._skipped = None
        held = ExitStack()
        if ranks.rank == 0:
            held.enter_context(retention.reading(path))  # so that it is not removed meanwhile
        self._thread.run(lambda: self._copy(path, names, held))

    def _copy(self, path: Path, names: list[str], held: ExitStack) -> None:
        order = self._identity.incarnation.order

        def finish(_: list[None]) -> None:
            self._mirror.complete(path, order)
            self._mirror.prune(self._keep, spare=[copy_name(path, order)], soundness=self.soundness)

        try:
            with held:
                self._ranks.gather_on_rank_0(
                    lambda: self._mirror.upload(path, names, order, check=self._check_leaving), finish
                )
        except Exception as error:  # of a store's package, which has errors of its own, or a bug
            told = self._ranks.explain(error)
            if self._ranks.rank == 0 and not self._leaving.is_set():
                log.warning("%s was not copied to %s: %s", path.name, self._mirror.url, told.message)

    def _check_leaving(self) -> None:
        if self._leaving.is_set():
            raise CheckpointError("the run is being left")

    def close(self, ranks: RankGroup, grace_s: float | None) -> None:
        """Wait for the copying to end.

        With grace_s=None, wait until the last checkpoint is copied, else give up what is not done in time.
        """
        if grace_s is None:
            self._thread.wait_idle()
            if self._skipped is not None:
                self.offer(ranks, *self._skipped)
        else:
            self._leaving.set()
        if self._thread.stop(grace_s):
            self._ranks.end()

    def remove_newer(self, ranks: RankGroup, step: int) -> None:
        """Remove the copies of later steps than `step`, once a copy that is being made is done."""
        self._thread.wait_idle()
        if self._skipped is not None and step_of(self._skipped[0]) > step:
            self._skipped = None
        ranks.on_rank_0(lambda: self._mirror.remove_newer(step))

    def fetch(self, ranks: RankGroup, at_most: int | None = None) -> tuple[Path, str] | None:
        """Commit the newest copy into the directory, which has no checkpoint, and return its path and its name in the store.

        Args:
            at_most: take the newest of at most this step; None: of any step.

        Raises:
            CheckpointError: the store does not answer, which is not the same as a fresh start.
        """
        directory, incarnation = self._identity.directory, self._identity.incarnation

        def choose() -> list[Any] | None:
            """Return name, manifest, its digest, and where to write."""
            for name in reversed(self._mirror.committed(at_most)):
                texts = self._mirror.manifest_bytes(name)
                try:
                    manifest = self._mirror.parse_manifest(name, *texts)
                except CheckpointError as error:
                    log.warning(error.message)
                    self._mirror.set_aside(name, error.message)
                    continue
                where = f"{self._mirror.url}/{name}"
                self._identity.check_run(where, manifest, hint="give each run a mirror of its own")
                return [name, *texts, str(commit.begin(directory, manifest.step, incarnation, size=manifest.size))]
            return None

        chosen = ranks.on_rank_0(choose)
        if chosen is None:
            return None
        name, text, digest, temporary = *chosen[:3], Path(chosen[3])
        manifest = self._mirror.parse_manifest(name, text, digest)

        def download() -> None:
            wait_until_visible(temporary)
            self._mirror.download(name, temporary, share(manifest.sizes, self._ranks.rank, self._ranks.size))

        with commit.removed_on_failure(temporary, on_this_rank=ranks.rank == 0):
            final = Path(
                self._ranks.gather_on_rank_0(
                    download, lambda _: str(commit.publish(temporary, text, manifest.step, incarnation))
                )
            )
        if ranks.rank == 0:
            log.info("%s was fetched from %s/%s", final.name, self._mirror.url, name)
        return final, name

    def set_aside(self, name: str, why: str) -> None:
        """Set a copy aside, on rank 0, that was fetched and is damaged."""
        self._mirror.set_aside(name, why)

    def damaged(self) -> list[str]:
        """Return, on rank 0, the names of the copies that were set aside."""
        return self._mirror.damaged()
