"""One save: what `Checkpointer.save` returns, and the work of the writing threads, from the copies to the commit.

Every step can fail on any rank, and then fails on all: nothing is committed, and what was written is removed.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurmtrain.checkpoint.errors import CheckpointError, DiscardedError, NonFiniteError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import FileRecord
from slurmtrain.checkpoint.format.directory import file_name
from slurmtrain.checkpoint.format.manifest import FORMAT, Manifest
from slurmtrain.checkpoint.ranks import CheckpointIdentity, RankGroup
from slurmtrain.checkpoint.save.plan import PLAIN, TENSORS, SavePlan, TensorPiece, group_key, short_digest
from slurmtrain.checkpoint.save.staging import Image
from slurmtrain.checkpoint.state import merge_plain
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.commit import check_fence, wait_until_visible
from slurmtrain.checkpoint.tensors import bytes_are_finite
from slurmtrain.system.activity import SAVE, doing
from slurmtrain.system.files import fsync_directory

GROUPS_NAMED = 8  # of those that differ; it is no use to name more


DRAIN_S = 30.0  # how long whoever has failed waits for a save in flight


@dataclass(frozen=True)
class SaveResult:
    """One committed checkpoint.

    Attributes:
        seconds: from the call of `save` until the commit.
        stall_s: seconds for which `save` held up this rank.
        size: bytes of all ranks' files.
    """

    path: Path
    step: int
    seconds: float
    stall_s: float = 0.0
    size: int = 0


class PendingSave:
    """A save that has begun. `result()` waits for the commit.

    Attributes:
        step: optimiser steps done.
        stall_s: seconds for which `save` held up this rank.
        begun: time.monotonic() at the call of `save`.
    """

    def __init__(self, step: int, begun: float):
        self.step, self.begun = step, begun
        self.stall_s = 0.0
        self._decided = threading.Event()
        self._ending: SaveResult | CheckpointError | None = None

    def done(self) -> bool:
        """Return whether it is committed or has failed."""
        return self._decided.is_set()

    @doing(SAVE)
    def result(self, timeout_s: float | None = None) -> SaveResult:
        """Wait for the commit.

        Raises:
            CheckpointError: the save failed, on every rank, and the older checkpoints are as they were; or it takes
                longer than `timeout_s` seconds.
        """
        if not self._decided.wait(timeout_s):
            raise CheckpointError(f"the save of step {self.step} is not committed after {timeout_s} s")
        if isinstance(self._ending, SaveResult):
            return self._ending
        assert self._ending is not None
        raise self._ending

    @doing(SAVE)
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is committed or has failed; return False if it is neither after `timeout_s` seconds."""
        return self._decided.wait(timeout_s)

    def decide(self, ending: SaveResult | CheckpointError) -> None:
        """Record how the save ended. Called by the writer."""
        self._ending = ending
        self._decided.set()

    @property
    def error(self) -> CheckpointError | None:
        """The error with which it failed; None: it has not failed, or is not decided yet."""
        return self._ending if isinstance(self._ending, CheckpointError) else None


class Destination:
    """Where a save is written to: the directory that all ranks share, whose commit is rank 0's rename (`store.commit`).

    The methods are the steps of a commit that depend on it, in this order. All ranks call them together.

    Attributes:
        cleans_up: whether this rank removes what was written if it is not committed.
    """

    def __init__(self, ranks: RankGroup, identity: CheckpointIdentity):
        self._ranks, self._identity = ranks, identity
        self.cleans_up = ranks.rank == 0

    def begin(self, step: int, size: int) -> Path:
        """Make the folder that this rank writes its file into, and return it.

        Args:
            size: bytes of the whole checkpoint, as far as known.

        Raises:
            CheckpointError: on every rank: there is no room, or a newer incarnation has started.
        """
        begin = partial(commit.begin, self._identity.directory, step, self._identity.incarnation, size=size)
        return Path(self._ranks.on_rank_0(lambda: str(begin())))

    def commit_on_rank_0(self, temporary: Path, manifest: Manifest) -> Any:
        """Commit what all ranks have handed in, or prepare it for all ranks to commit; called by rank 0 alone.

        Returns:
            What the other ranks are told, and `finish` gets: values that ranks can send.
        """
        return str(commit.commit(temporary, manifest, self._identity.incarnation))

    def finish(self, answer: Any) -> Path:
        """Do what is left for all ranks, after `commit_on_rank_0` has given this `answer`, and return the final path."""
        return Path(answer)


@dataclass
class SaveJob:
    """The work of one save of the state after `step` optimiser steps.

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
    step: int
    plan: SavePlan
    image: Image | CheckpointError
    plain: Mapping[str, Any]
    optimizers: Collection[str]
    metrics: Mapping[str, float]
    finite: Collection[str]
    discard: threading.Event
    report_drift: bool
    drift: str | None = None

    @property
    def waited_s(self) -> float:
        """The seconds for which optimisers have waited for the copy of this rank's state."""
        return self.image.waited_s if isinstance(self.image, Image) else 0.0

    def write(self, destination: Destination) -> tuple[Path, int]:
        """Write, digest, check and commit.

        Returns:
            Path and bytes of the checkpoint.

        Raises:
            CheckpointError: on every rank; the older checkpoints are as they were.
        """
        try:
            if isinstance(self.image, Image):
                self.image.finish()  # first of all: the optimiser waits for it
        except Exception as error:  # told with all ranks: one that stayed away would hold up the others
            self.image = self.ranks.explain(error)
        self._check_replicas()
        temporary = destination.begin(self.step, self.plan.total_bytes)
        with commit.removed_on_failure(temporary, on_this_rank=destination.cleans_up):
            answer = self.ranks.gather_on_rank_0(
                lambda: self._write_own_file(temporary), lambda parts: self._commit(destination, temporary, parts)
            )
            path = destination.finish(answer["committed"])
        return path, answer["size"]

    # Do ranks that should hold the same do so? Otherwise a mixture would be saved that no rank has ever had.

    def _check_replicas(self) -> None:
        """Compare what ranks hold alike; what may differ is noted in `drift`, once.

        Ranks do not send each other all of their fingerprints, which would be hundreds of megabytes for rank 0 of
        thousands. Each sends one digest for each group of ranks with which it holds the same. Only of groups that differ
        are the fingerprints asked for, to name the tensors.
        """

        def digests() -> dict[str, Any]:
            if isinstance(self.image, CheckpointError):
                raise self.image
            plain = {key: zlib.crc32(json.dumps(value).encode()) for key, value in self.plain.items()}
            self.image.fingerprints[group_key(PLAIN, self.plan.number)] = plain
            found = {key: short_digest(sorted(values.items())) for key, values in self.image.fingerprints.items()}
            return {"step": self.step, "digests": found}

        def compare(answers: list[dict[str, Any]]) -> list[str]:
            states: dict[str, set[str]] = {}
            for rank, answer in enumerate(answers):
                if answer["step"] != self.step:
                    raise CheckpointError(
                        f"rank {rank} saves step {answer['step']}, but rank 0 saves step {self.step}",
                        hint="save after the same step on every rank: let one rank decide and broadcast it",
                    )
                for key, digest in answer["digests"].items():
                    states.setdefault(key, set()).add(digest)
            wanted = [key for key, found in states.items() if len(found) > 1]
            wanted = [key for key in wanted if self.report_drift or key.startswith(TENSORS)]
            return sorted(wanted, key=lambda key: (not key.startswith(TENSORS), key))

        differing: list[str] = self.ranks.gather_on_rank_0(digests, compare)
        if not differing:
            return
        asked = differing[:GROUPS_NAMED]

        def fingerprints() -> list[dict[str, int] | None]:
            known = self.image.fingerprints if isinstance(self.image, Image) else {}
            return [known.get(key) for key in asked]

        def judge(answers: list[list[dict[str, int] | None]]) -> None:
            named = [differences(key, [answer[number] for answer in answers]) for number, key in enumerate(asked)]
            every = [name for names in named for name in names]
            wrong = [name for key, names in zip(asked, named, strict=True) if key.startswith(TENSORS) for name in names]
            if wrong:
                least = "at least " if len(differing) > len(asked) else ""
                more = f" (and {least}{len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
                raise CheckpointError(
                    f"{wrong[0]}{more}, and should be the same on all of them",
                    hint="what differs by design belongs into per_rank=; else the ranks have drifted apart: are gradients "
                    "averaged over all of them, or does a node compute wrongly? GPUs of different models differ in the last "
                    "bits: ask for GPUs of one model",
                )
            more = f" (and {len(every) - 1} more)" if len(every) > 1 else ""
            self.drift = (
                f"{every[0]}{more}: that of the lowest rank is saved; what each is to get back belongs into per_rank="
            )

        self.ranks.gather_on_rank_0(fingerprints, judge)

    # The files.

    def _write_own_file(self, temporary: Path) -> dict[str, Any]:
        """Write this rank's file, and return what rank 0 has to know of it."""
        assert isinstance(self.image, Image)
        if self.ranks.rank != 0:
            wait_until_visible(temporary)
        name = file_name(self.ranks.rank)
        try:
            with blocks.threads(background=True) as pool:
                self._check_finite(self.image, pool)
                record = blocks.write(temporary / name, self.image.data, pool, check=self._check_discarded)
        except FileNotFoundError:
            # A newer incarnation removes what older ones were writing.
            check_fence(self.identity.directory, self.identity.incarnation)
            raise
        fsync_directory(temporary)
        return {
            "name": name,
            "record": [record.size, record.digests],
            "header": hashlib.sha256(self.image.header).hexdigest(),
            "plain": dict(self.plain) if self.ranks.rank in self.plan.group_leaders else None,
        }

    def _check_finite(self, image: Image, pool: ThreadPoolExecutor) -> None:
        """Check the copy that is written, while training goes on."""

        def find(piece: TensorPiece) -> bool:
            return bytes_are_finite(image.bytes_of(piece), piece.dtype)

        pieces = [piece for piece in self.plan.pieces if piece.name in self.finite]
        wrong = [piece.name for piece, fine in zip(pieces, blocks.each(pool, find, pieces), strict=True) if not fine]
        if wrong:
            more = f" (and {len(wrong) - 1} more of this rank)" if len(wrong) > 1 else ""
            raise NonFiniteError(
                f"{wrong[0]}{more} is not finite after step {self.step}, and is not saved",
                hint="no later step mends that: go on from an older checkpoint with a lower learning rate or other data; what "
                "is meant to be infinite is not trained: requires_grad_(False), or a buffer",
            )

    def _commit(self, destination: Destination, temporary: Path, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Commit, on rank 0, the files that all ranks have handed in.

        Returns:
            `size` of the checkpoint, and what its destination has `committed`.
        """
        plain = [part["plain"] for part in parts if part["plain"] is not None]
        manifest = Manifest(
            format=FORMAT,
            run_id=self.identity.run_id,
            step=self.step,
            incarnation=self.identity.incarnation.order,
            incarnation_label=self.identity.incarnation.label,
            world_size=self.ranks.size,
            torch_version=torch.__version__,
            files={part["name"]: FileRecord(*part["record"]) for part in parts},
            headers={part["name"]: part["header"] for part in parts},
            tensors=self.plan.facts,
            state=merge_plain(plain, self.optimizers),
            config=self.identity.config,
            metrics=self.metrics,
            created=time.time(),
        )
        self._check_discarded()
        return {"size": manifest.size, "committed": destination.commit_on_rank_0(temporary, manifest)}

    def _check_discarded(self) -> None:
        if self.discard.is_set():
            raise DiscardedError("the save was given up for a newer one, or to leave in time")


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
