"""One save, as the writing threads of all ranks carry it out together: from the copies in memory to the commit.

Every step can fail on any rank, and then fails on all: nothing is committed, and what was written is removed.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurmtrain.checkpoint import optimizer_state
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import FileRecord
from slurmtrain.checkpoint.format.coverage import check_coverage
from slurmtrain.checkpoint.format.directory import INDEX, set_aside
from slurmtrain.checkpoint.format.manifest import FORMAT, Manifest
from slurmtrain.checkpoint.format.rank_files import file_name
from slurmtrain.checkpoint.format.tensor_index import Index, Ints
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.save.destination import Destination
from slurmtrain.checkpoint.save.fingerprints import (
    BUFFER,
    BUNDLES_ASKED,
    Bundle,
    Bundles,
    Differing,
    bundles_of,
    digests_of,
    find_differing,
    name_differing,
)
from slurmtrain.checkpoint.save.finite import bytes_are_finite
from slurmtrain.checkpoint.save.plan import SavePlan, TensorPiece
from slurmtrain.checkpoint.save.staging import Image
from slurmtrain.checkpoint.store.fencing import check_fence, wait_until_visible
from slurmtrain.checkpoint.store.shared_directory import CheckpointIdentity
from slurmtrain.errors import CheckpointError, DiscardedError, NonFiniteError
from slurmtrain.system.files import fsync_directory


@dataclass(frozen=True)
class StagedState:
    """The state after `step` optimiser steps, as one rank has staged it.

    Attributes:
        image: this rank's file in memory, or why there is none.
        plain: state that is no tensor.
        optimizers: names in `plain` that are optimisers.
        metrics: metrics of this step.
        finite: names of the tensors that have to be finite.
    """

    step: int
    plan: SavePlan
    image: Image | CheckpointError
    plain: Mapping[str, Any]
    optimizers: Collection[str]
    metrics: Mapping[str, float]
    finite: Collection[str]


@dataclass(frozen=True)
class RankContribution:
    """The contribution of one rank: its file, and the table of the file's contents.

    Attributes:
        plain: JSON of the state that is no tensor, by object; from the first of the ranks that hold the same tensors.
        plain_digests: digests of the state that is no tensor, by object.
        schema: number of this rank's schema.
        bundles: digests of tensors that other ranks hold, too; see `fingerprints.digests_of`.
    """

    step: int
    name: str
    record: FileRecord
    digests: bytes
    table: bytes
    plain: Mapping[str, bytes] | None
    plain_digests: Mapping[str, int]
    schema: int
    bundles: Ints

    def to_json(self) -> list[Any]:
        """Return it as it is sent to rank 0."""
        return [
            self.step,
            self.name,
            [self.record.size, self.record.sha256],
            self.digests,
            self.table,
            dict(self.plain) if self.plain is not None else None,
            dict(self.plain_digests),
            self.schema,
            self.bundles.astype("<i8").tobytes(),
        ]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> RankContribution:
        """Return the part that a rank has sent by `to_json`."""
        step, name, (size, sha256), digests, table, plain, plain_digests, schema, bundles = values
        rows = np.frombuffer(bundles, dtype="<i8").reshape(-1, 3)
        return cls(step, name, FileRecord(size, sha256), digests, table, plain, plain_digests, schema, rows)


class _NoTimeError(Exception):
    """Reading back was cut short."""


class SaveJob:
    """The work of one save.

    Args:
        ranks: the ranks on the writing threads' own group.
        destination: where it is written to.
        discard: set when the save is to be given up.
        refuse_drift: fail when ranks differ that should hold the same; else report it.
        report_drift: report what differs between ranks and may; else it was reported before.
    """

    def __init__(
        self,
        ranks: RankGroup,
        identity: CheckpointIdentity,
        staged: StagedState,
        destination: Destination,
        discard: threading.Event,
        *,
        refuse_drift: bool,
        report_drift: bool,
    ):
        self._ranks, self._identity, self._discard = ranks, identity, discard
        self._destination = destination
        self._step, self._plan, self._image, self._staged = staged.step, staged.plan, staged.image, staged
        self._refuse_drift, self._report_drift = refuse_drift, report_drift
        self._written: list[tuple[str, FileRecord]] = []  # files that this rank has written
        self._bundles: Bundles = {}
        self._contributions: list[RankContribution] = []  # on rank 0, what all have handed in
        self._differing: list[Bundle] = []  # on rank 0
        self._differing_names: list[str] = []  # on rank 0, sentences
        self.drift: str | None = None  # on rank 0: what differs between ranks and may

    @property
    def waited_s(self) -> float:
        """The seconds for which optimisers have waited for the copy of this rank's state."""
        return self._image.waited_s if isinstance(self._image, Image) else 0.0

    @property
    def names(self) -> list[str]:
        """The names of the files that this rank has written."""
        return [name for name, _ in self._written]

    def write(self, last_size: int) -> tuple[Path, int]:
        """Write, digest, check and commit.

        Args:
            last_size: bytes of the checkpoint before; there has to be room for as much.

        Returns:
            Path and bytes of the checkpoint.

        Raises:
            CheckpointError: on every rank; the older checkpoints are as they were.
        """
        self._finish_copy()  # first of all: the optimiser waits for it
        size = max(last_size, self._plan.total_bytes)
        temporary = self._destination.begin(self._ranks, self._step, size)
        with self._destination.removed_on_failure(self._ranks, temporary):
            answer = self._ranks.gather_on_rank_0(
                lambda: self._write_own_file(temporary).to_json(),
                lambda parts: self._commit_or_ask(temporary, [RankContribution.from_json(values) for values in parts]),
            )
            if "ask" in answer:
                answer = self._ranks.gather_on_rank_0(
                    lambda: self._fingerprints(answer["ask"]),
                    lambda answers: self._commit_or_refuse(temporary, answers),
                )
            image = self._image.data if isinstance(self._image, Image) else memoryview(b"")
            path = self._destination.finish(self._ranks, temporary, answer["committed"], image)
        return path, answer["size"]

    def read_back(self, path: Path, *, contents: bool, in_a_hurry: Callable[[], bool]) -> list[str] | None:
        """Compare the files on the disk with what was written; a checkpoint that is damaged is set aside.

        Args:
            contents: compare digests, not only sizes.
            in_a_hurry: returns True once this rank has no time for it any more.

        Returns:
            What is wrong, on every rank; None: not all ranks had the time to look.
        """

        def check() -> None:
            if in_a_hurry():
                raise _NoTimeError

        def compare() -> list[str] | None:
            try:
                check()
                return blocks.find_damage(
                    path, self._written, contents=contents, background=True, from_disk=True, check=check
                )
            except _NoTimeError:
                return None

        def combine(answers: list[list[str] | None]) -> list[str] | None:
            damage = [sentence for found in answers for sentence in found or ()]
            if damage:
                check_fence(self._identity.directory, self._identity.incarnation)
                set_aside(path)
            return damage if damage or None not in answers else None

        found: list[str] | None = self._ranks.gather_on_rank_0(compare, combine)
        return found

    def _finish_copy(self) -> None:
        """Complete the copy in memory.

        An error is handed in later, with all ranks: a rank that stayed away would hold up the others.
        """
        if isinstance(self._image, Image):
            try:
                self._image.finish()
            except Exception as error:
                self._image = self._ranks.explain(error)

    def _write_own_file(self, temporary: Path) -> RankContribution:
        """Write this rank's file."""
        if isinstance(self._image, CheckpointError):
            raise self._image
        if self._ranks.rank != 0:
            wait_until_visible(temporary)
        name = file_name(self._ranks.rank)
        try:
            with blocks.threads(background=True) as pool:
                self._check_finite(self._image, pool)
                record, digests = blocks.write(temporary / name, self._image.data, pool, check=self._check_discarded)
        except FileNotFoundError:
            # A newer incarnation removes what older ones were writing.
            check_fence(self._identity.directory, self._identity.incarnation)
            raise
        self._written = [(name, record)]
        fsync_directory(temporary)
        plan = self._plan
        table = plan.table(self._image.own_bytes).pack()
        plain = {key: json.dumps(value).encode() for key, value in self._staged.plain.items()}
        self._bundles = bundles_of(self._image.fingerprints, plan.replicas)
        return RankContribution(
            self._step,
            name,
            record,
            digests,
            table,
            plain if self._ranks.rank in plan.group_leaders else None,
            {key: zlib.crc32(text) for key, text in plain.items()},
            plan.number,
            digests_of(self._bundles),
        )

    def _check_finite(self, image: Image, pool: ThreadPoolExecutor) -> None:
        """Check the copy that is written, while training goes on."""

        def find(piece: TensorPiece) -> bool:
            return bytes_are_finite(image.data[piece.begin : piece.end], piece.dtype)

        pieces = [piece for piece in self._plan.pieces if piece.name in self._staged.finite]
        wrong = [piece.name for piece, fine in zip(pieces, blocks.each(pool, find, pieces), strict=True) if not fine]
        if wrong:
            more = f" (and {len(wrong) - 1} more of this rank)" if len(wrong) > 1 else ""
            raise NonFiniteError(
                f"{wrong[0]}{more} is not finite after step {self._step}, and is not saved",
                hint="no later step mends that: go on from an older checkpoint with a lower learning rate or other data; what "
                "is meant to be infinite is not trained: requires_grad_(False), or a buffer",
            )

    def _commit_or_ask(self, temporary: Path, parts: list[RankContribution]) -> dict[str, Any]:
        """Commit, on rank 0, the files that all ranks have handed in, unless something differs that has to be named.

        Returns:
            `size` of the checkpoint, and what its destination has `committed`; or what to `ask` before, and whom.
        """
        for part in parts:
            if part.step != self._step:
                raise CheckpointError(
                    f"{part.name} is of step {part.step}, but rank 0 saves step {self._step}",
                    hint="save after the same step on every rank: let one rank decide and broadcast it",
                )
        self._contributions = parts
        differing = find_differing([part.bundles for part in parts])
        if not self._refuse_drift and not self._report_drift:
            differing = []
        self._differing = [bundle for bundle in differing if bundle.part != BUFFER or self._report_drift]
        if self._differing:
            asked = self._differing[:BUNDLES_ASKED]
            return {"ask": [[bundle.group, bundle.part, bundle.asked] for bundle in asked]}
        return self._commit(temporary)

    def _fingerprints(self, asked: list[list[Any]]) -> list[dict[str, int] | None]:
        """Return this rank's fingerprints in each of the bundles, and None where it is not asked for them."""
        return [self._bundles.get((group, part)) if self._ranks.rank in ranks else None for group, part, ranks in asked]

    def _commit_or_refuse(self, temporary: Path, answers: list[list[dict[str, int] | None]]) -> dict[str, Any]:
        """Commit on rank 0, unless what the ranks have answered shows that replicas differ which may not."""
        found: dict[str, Differing] = {}
        for number, bundle in enumerate(self._differing[:BUNDLES_ASKED]):
            for differing in name_differing(bundle, [answers[rank][number] or {} for rank in bundle.asked]):
                found.setdefault(differing.name, differing)
        self._check_replicas(list(found.values()), all_named=len(self._differing) <= BUNDLES_ASKED)
        return self._commit(temporary)

    def _commit(self, temporary: Path) -> dict[str, Any]:
        parts, schemas = self._contributions, self._plan.schemas
        self._note_drift()
        index = Index(schemas, {part.name: part.table for part in parts}, {part.name: part.digests for part in parts})
        try:
            facts = check_coverage(schemas, index.tables.values())
        except CheckpointError as error:
            raise CheckpointError(f"{temporary.name}: {error.message}", hint=error.hint) from None

        def manifest_with(index_record: FileRecord) -> Manifest:
            return Manifest(
                format=FORMAT,
                run_id=self._identity.run_id,
                step=self._step,
                incarnation=self._identity.incarnation.order,
                incarnation_label=self._identity.incarnation.label,
                world_size=self._ranks.size,
                torch_version=torch.__version__,
                files={**{part.name: part.record for part in parts}, INDEX: index_record},
                tensors={name: {"shape": list(fact.shape), "dtype": fact.dtype} for name, fact in facts.items()},
                state=optimizer_state.merge_plain(
                    [
                        {key: json.loads(text) for key, text in part.plain.items()}
                        for part in parts
                        if part.plain is not None
                    ],
                    self._staged.optimizers,
                ),
                config=self._identity.config,
                metrics=self._staged.metrics,
                created=time.time(),
            )

        committed = self._destination.commit_on_rank_0(
            temporary, b"".join(index.chunks()), manifest_with, check=self._check_discarded
        )
        self._written.append((INDEX, committed.index))
        return {"size": committed.size, "committed": committed.answer}

    def _check_replicas(self, found: list[Differing], *, all_named: bool) -> None:
        """Check that ranks which should hold the same do; otherwise a mixture would be saved that no rank has ever had."""
        wrong = [differing for differing in found if not differing.buffer]
        if wrong and self._refuse_drift:
            least = "" if all_named else "at least "
            more = f" (and {least}{len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
            raise CheckpointError(
                f"{wrong[0]}{more}, and should be the same",
                hint="what differs by design belongs into per_rank=; else the ranks have drifted apart: are gradients averaged "
                "over all of them, or does a node compute wrongly? GPUs of different models differ in the last bits: "
                "checkpoint.on_replica_drift=warn saves the lowest rank's",
            )
        self._differing_names = [str(differing) for differing in found]

    def _note_drift(self) -> None:
        """Note what is another one on some ranks and may be."""
        sentences = list(self._differing_names)
        for number in range(len(self._plan.schemas)):
            alike = [
                (rank, part.plain_digests) for rank, part in enumerate(self._contributions) if part.schema == number
            ]
            first, digests = alike[0]
            for key in sorted(digests):
                others = [rank for rank, theirs in alike if theirs.get(key) != digests[key]]
                if others:
                    sentences.append(f"the state of {key} is another one on rank {others[0]} than on rank {first}")
        if sentences:
            more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
            hint = "that of the lowest rank is saved; what each is to get back belongs into per_rank="
            self.drift = f"{sentences[0]}{more}: {hint}"

    def _check_discarded(self) -> None:
        if self._discard.is_set():
            raise DiscardedError("the save was given up for a newer one, or to leave in time")
