"""One save: what `Checkpointer.save` returns, and the work of the writing threads, from the copies to the commit.

Every step can fail on any rank, and then fails on all: nothing is committed, and what was written is removed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurmtrain.checkpoint.errors import CheckpointError, DiscardedError, NonFiniteError
from slurmtrain.checkpoint.format.blocks import each, write_file
from slurmtrain.checkpoint.format.directory import file_name
from slurmtrain.checkpoint.format.manifest import FORMAT, FileRecord, Manifest
from slurmtrain.checkpoint.ranks import CheckpointIdentity, RankGroup
from slurmtrain.checkpoint.save.plan import PLAIN, TENSORS, SavePlan
from slurmtrain.checkpoint.save.staging import Image
from slurmtrain.checkpoint.state import merge_plain
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.commit import check_fence, wait_until_visible
from slurmtrain.checkpoint.tensors import bytes_are_finite
from slurmtrain.system.activity import SAVE, doing
from slurmtrain.system.files import fsync_directory

DRAIN_S = 30.0  # how long whoever has failed waits for a save in flight


@dataclass(frozen=True)
class SaveResult:
    """One committed checkpoint.

    Attributes:
        seconds: from the call of `save` until the commit.
        stall_s: seconds for which `save` held up this rank.
        size: bytes of all ranks' files.
        digest: SHA-256 of its manifest.json, in hex.
    """

    path: Path
    step: int
    seconds: float
    stall_s: float = 0.0
    size: int = 0
    digest: str = ""


class PendingSave(Future[SaveResult]):
    """A save that has begun. `result()` waits for the commit.

    Attributes:
        step: optimiser steps done.
        stall_s: seconds for which `save` held up this rank.
        begun: time.monotonic() at the call of `save`.
    """

    def __init__(self, step: int, begun: float):
        super().__init__()
        self.step, self.begun, self.stall_s = step, begun, 0.0
        self.set_running_or_notify_cancel()  # which nobody may cancel

    @doing(SAVE)
    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait for the commit.

        Raises:
            CheckpointError: the save failed, on every rank, and the older checkpoints are as they were; or it takes
                longer than `timeout` seconds.
        """
        try:
            return super().result(timeout)
        except TimeoutError:
            raise CheckpointError(f"the save of step {self.step} is not committed after {timeout} s") from None

    @doing(SAVE)
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is committed or has failed; return False if it is neither after `timeout_s` seconds."""
        return bool(wait([self], timeout_s).done)

    @property
    def error(self) -> BaseException | None:
        """The error with which it failed; None: it has not failed, or is not decided yet."""
        return self.exception() if self.done() else None


@dataclass
class SaveJob:
    """The work of one save, from the copies to the commit, in the writing thread.

    Attributes:
        ranks: the ranks on the writing threads' own group.
        image: this rank's file in memory, or why there is none.
        plain: state that is no tensor.
        optimizers: names in `plain` that are optimisers.
        metrics: metrics of this step.
        finite: names of the tensors that have to be finite.
        discard: set when the save is to be given up.
        report_drift: report what differs between ranks and may; else it was reported before.
        drift: on rank 0: what differs between ranks and may.
    """

    ranks: RankGroup
    identity: CheckpointIdentity
    pending: PendingSave
    plan: SavePlan
    image: Image | CheckpointError
    plain: Mapping[str, Any]
    optimizers: Collection[str]
    metrics: Mapping[str, float]
    finite: Collection[str]
    discard: threading.Event
    report_drift: bool
    drift: str | None = None

    def write(self) -> SaveResult:
        """Write, digest, compare and commit.

        Raises:
            CheckpointError: on every rank; the older checkpoints are as they were.
        """
        try:
            if isinstance(self.image, Image):
                self.image.finish()  # first of all: the optimiser waits for it
        except Exception as error:  # told with all ranks: one that stayed away would hold up the others
            self.image = self.ranks.explain(error)
        directory, incarnation = self.identity.directory, self.identity.incarnation
        begin = partial(commit.begin, directory, self.pending.step, incarnation, size=self.plan.total_bytes)
        temporary = Path(self.ranks.on_rank_0(lambda: str(begin())))
        parts: list[dict[str, Any]] = []  # what all ranks hand in, on rank 0
        try:
            differing = self.ranks.all_do(
                lambda: self._write_own_file(temporary), lambda everyones: self._find_differing(parts, everyones)
            )
            if differing:
                self._name_differences(differing)
            path, size, digest = self.ranks.on_rank_0(lambda: self._commit(temporary, parts))
        except CheckpointError:
            if self.ranks.rank == 0:  # a full disk must not become fuller with every try
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        assert isinstance(self.image, Image)
        seconds = time.monotonic() - self.pending.begun
        stall_s = self.pending.stall_s + self.image.waited_s
        return SaveResult(Path(path), self.pending.step, seconds, stall_s, size, digest)

    def _write_own_file(self, temporary: Path) -> dict[str, Any]:
        """Write this rank's file, and return what rank 0 has to know of it."""
        if isinstance(self.image, CheckpointError):
            raise self.image
        if self.ranks.rank != 0:
            wait_until_visible(temporary)
        name, data, record = file_name(self.ranks.rank), self.image.data, None
        try:
            watched = [piece for piece in self.plan.pieces if piece.name in self.finite]
            tensors = data[self.plan.data_start :]
            fine = each(
                lambda each: bytes_are_finite(tensors[each.begin : each.end], each.dtype), watched, background=True
            )
            not_finite = [piece.name for piece, each in zip(watched, fine, strict=True) if not each]
            if not not_finite:
                record = write_file(temporary / name, data, check=self._check_discarded)
        except FileNotFoundError:
            # A newer incarnation removes what older ones were writing.
            check_fence(self.identity.directory, self.identity.incarnation)
            raise
        fsync_directory(temporary)
        alike = self.image.fingerprints  # short digests are enough to tell ranks apart; blocks have longer ones
        alike[f"{PLAIN} {self.plan.number}"] = {
            key: zlib.crc32(json.dumps(value).encode()) for key, value in self.plain.items()
        }
        return {
            "step": self.pending.step,
            "name": name,
            "record": [record.size, record.digests] if record is not None else None,
            "header": hashlib.sha256(data[: self.plan.data_start]).hexdigest(),
            "plain": dict(self.plain) if self.ranks.rank in self.plan.group_leaders else None,
            "not_finite": not_finite,
            "alike": {
                key: hashlib.sha256(json.dumps(sorted(values.items())).encode()).hexdigest()[:16]
                for key, values in alike.items()
            },
        }

    def _commit(self, temporary: Path, parts: list[dict[str, Any]]) -> tuple[str, int, str]:
        """Commit, on rank 0, the files that all ranks have handed in.

        Returns:
            Path and bytes of the checkpoint, and the digest of its manifest.
        """
        wrong = sorted({name for part in parts for name in part["not_finite"]})
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise NonFiniteError(
                f"{wrong[0]}{more} is not finite after step {self.pending.step}, and is not saved",
                hint="no later step mends that: go on from an older checkpoint with a lower learning rate or other data; what "
                "is meant to be infinite is not trained: requires_grad_(False), or a buffer",
            )
        incarnation, step = self.identity.incarnation, self.pending.step
        manifest = Manifest(
            format=FORMAT,
            run_id=self.identity.run_id,
            step=step,
            incarnation=incarnation.order,
            incarnation_label=incarnation.label,
            world_size=self.ranks.size,
            torch_version=torch.__version__,
            files={part["name"]: FileRecord(*part["record"]) for part in parts},
            headers={part["name"]: part["header"] for part in parts},
            tensors=self.plan.facts,
            state=merge_plain([part["plain"] for part in parts if part["plain"] is not None], self.optimizers),
            config=self.identity.config,
            metrics=self.metrics,
            created=time.time(),
        )
        text = json.dumps(vars(manifest), default=vars).encode()
        self._check_discarded()
        path = commit.commit(temporary, text, step, incarnation)
        return str(path), manifest.size, hashlib.sha256(text).hexdigest()

    def _check_discarded(self) -> None:
        if self.discard.is_set():
            raise DiscardedError("the save was given up for a newer one, or to leave in time")

    # Do ranks that should hold the same do so? Otherwise a mixture would be saved that no rank has ever had. Ranks do not
    # send each other all of their fingerprints, which would be hundreds of megabytes for rank 0 of thousands. Each sends one
    # digest for each group of ranks with which it holds the same. Only of a group that differs are the fingerprints asked
    # for, to name the tensors.

    def _find_differing(self, parts: list[dict[str, Any]], everyones: list[dict[str, Any]]) -> str | None:
        """Take what all ranks hand in, on rank 0, and return the key of a group whose ranks differ, tensors' first."""
        parts.extend(everyones)
        digests: dict[str, set[str]] = {}
        for rank, part in enumerate(parts):
            if part["step"] != self.pending.step:
                raise CheckpointError(
                    f"rank {rank} saves step {part['step']}, but rank 0 saves step {self.pending.step}",
                    hint="save after the same step on every rank: let one rank decide and broadcast it",
                )
            for key, digest in part["alike"].items():
                digests.setdefault(key, set()).add(digest)
        differing = [key for key, found in digests.items() if len(found) > 1]
        differing = [key for key in differing if self.report_drift or key.startswith(TENSORS)]
        return min(differing, key=lambda key: (not key.startswith(TENSORS), key), default=None)

    def _name_differences(self, key: str) -> None:
        """Note in `drift` what differs between ranks of a group. Raise CheckpointError, on all ranks, if tensors do."""

        def fingerprints() -> dict[str, int] | None:
            return self.image.fingerprints.get(key) if isinstance(self.image, Image) else None

        def judge(everyones: list[dict[str, int] | None]) -> None:
            first, *others = differences(key, everyones)
            what = first + (f" (and {len(others)} more)" if others else "")
            if key.startswith(TENSORS):
                raise CheckpointError(
                    f"{what}, and should be the same on all of them",
                    hint="what differs by design belongs into per_rank=; else the ranks have drifted apart: are gradients "
                    "averaged over all of them, or does a node compute wrongly? GPUs of different models differ in the last "
                    "bits: ask for GPUs of one model",
                )
            self.drift = f"{what}: that of the lowest rank is saved; what each is to get back belongs into per_rank="

        self.ranks.all_do(fingerprints, judge)


def differences(key: str, everyone: Sequence[Mapping[str, int] | None]) -> list[str]:
    """Return what differs between the ranks of a group, in words.

    Args:
        key: that of the group.
        everyone: of every rank its fingerprints in the group by name; None if it is not of the group.
    """
    found = []
    for name in dict.fromkeys(name for values in everyone for name in values or ()):
        alike: dict[int | None, list[int]] = {}  # ranks by what they hold
        for rank, values in enumerate(everyone):
            if values is not None:
                alike.setdefault(values.get(name), []).append(rank)
        if len(alike) > 1:
            state = "the state of " if key.startswith(PLAIN) else ""
            found.append(f"{state}{name} differs between {' and '.join(map(_ranks, alike.values()))}")
    return found


def _ranks(group: Sequence[int]) -> str:
    shown = ", ".join(map(str, group[:8])) + (", ..." if len(group) > 8 else "")
    return f"rank{'s' if len(group) > 1 else ''} {shown}"
