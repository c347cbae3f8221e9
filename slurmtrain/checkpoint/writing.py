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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurmtrain.checkpoint import blocks, commit, state
from slurmtrain.checkpoint.blocks import FileRecord
from slurmtrain.checkpoint.commit import Incarnation, Manifest
from slurmtrain.checkpoint.fingerprints import (
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
from slurmtrain.checkpoint.finite import bytes_are_finite
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.save_plan import SavePlan, TensorPiece, file_name
from slurmtrain.checkpoint.staging import Image
from slurmtrain.checkpoint.tensor_index import Index, Ints, check_coverage
from slurmtrain.errors import CheckpointError, CheckpointMismatchError, DiscardedError, NonFiniteError
from slurmtrain.system.files import fsync_directory


@dataclass(frozen=True)
class CheckpointIdentity:
    """The identity that every checkpoint of this incarnation is bound to.

    Attributes:
        config: JSON values.
    """

    directory: Path
    incarnation: Incarnation
    run_id: str
    config: Mapping[str, Any]

    def check_run(self, where: Path | str, manifest: Manifest, *, hint: str) -> None:
        """Raise CheckpointMismatchError if the checkpoint at `where` belongs to another run."""
        if self.run_id and manifest.run_id != self.run_id:
            raise CheckpointMismatchError(
                f"{where} belongs to run {manifest.run_id or '(none)'}, this is run {self.run_id}", hint=hint
            )


@dataclass(frozen=True)
class RankContribution:
    """The contribution of one rank: its file, and the table of the file's contents.

    Attributes:
        plain: JSON of the state that is no tensor, by object; from the first of the ranks that hold the same tensors.
        plain_digests: digests of the state that is no tensor, by object.
        catalogue: number of this rank's catalogue.
        bundles: digests of tensors that other ranks hold, too; see `fingerprints.digests_of`.
    """

    step: int
    name: str
    record: FileRecord
    digests: bytes
    table: bytes
    plain: Mapping[str, bytes] | None
    plain_digests: Mapping[str, int]
    catalogue: int
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
            self.catalogue,
            self.bundles.astype("<i8").tobytes(),
        ]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> RankContribution:
        """Return the part that a rank has sent by `to_json`."""
        step, name, (size, sha256), digests, table, plain, plain_digests, catalogue, bundles = values
        rows = np.frombuffer(bundles, dtype="<i8").reshape(-1, 3)
        return cls(step, name, FileRecord(size, sha256), digests, table, plain, plain_digests, catalogue, rows)


class _NoTimeError(Exception):
    """Reading back was cut short."""


class SaveJob:
    """The work of one save.

    Args:
        ranks: the ranks on the writing threads' own group.
        image: this rank's file in memory, or why there is none.
        plain: state that is no tensor.
        optimizers: names in `plain` that are optimisers.
        discard: set when the save is to be given up.
        finite: names of what has to be finite.
        refuse_drift: fail when ranks differ that should hold the same; else say so.
        tell: what differs between ranks and may is to be said; else it was said before.
    """

    def __init__(
        self,
        ranks: RankGroup,
        bound: CheckpointIdentity,
        step: int,
        plan: SavePlan,
        image: Image | CheckpointError,
        plain: Mapping[str, Any],
        optimizers: Collection[str],
        metrics: Mapping[str, float],
        discard: threading.Event,
        *,
        finite: Collection[str] = frozenset(),
        refuse_drift: bool = True,
        tell: bool = True,
    ):
        self._ranks, self._bound, self._step, self._plan, self._image = ranks, bound, step, plan, image
        self._plain, self._optimizers, self._metrics, self._discard = plain, optimizers, metrics, discard
        self._finite, self._refuse_drift, self._tell = frozenset(finite), refuse_drift, tell
        self._written: list[tuple[str, FileRecord]] = []  # files that this rank has written
        self._bundles: Bundles = {}
        self._parts: list[RankContribution] = []  # on rank 0, what all have handed in
        self._differing: list[Bundle] = []  # on rank 0
        self._differing_names: list[str] = []  # on rank 0, sentences
        self.told: str | None = None  # on rank 0: what differs between ranks and may

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
        directory, incarnation = self._bound.directory, self._bound.incarnation
        size = max(last_size, self._plan.total_bytes)
        begin = partial(commit.begin, directory, self._step, incarnation, size=size)
        temporary = Path(self._ranks.on_rank_0(lambda: str(begin())))
        with commit.nothing_left(temporary, here=self._ranks.rank == 0):
            answer = self._ranks.gather_on_rank_0(
                lambda: self._hand_in(temporary).to_json(),
                lambda parts: self._commit_or_ask(temporary, [RankContribution.from_json(values) for values in parts]),
            )
            if "ask" in answer:
                answer = self._ranks.gather_on_rank_0(
                    lambda: self._fingerprints(answer["ask"]), lambda told: self._commit_or_refuse(temporary, told)
                )
        return Path(answer["path"]), answer["size"]

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
                with blocks.threads(background=True) as pool:
                    return blocks.find_damage(
                        path, self._written, pool, contents=contents, from_disk=True, patient=True, check=check
                    )
            except _NoTimeError:
                return None

        def combine(answers: list[list[str] | None]) -> list[str] | None:
            damage = [sentence for found in answers for sentence in found or ()]
            if damage:
                commit.check_fence(self._bound.directory, self._bound.incarnation)
                commit.set_aside(path)
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

    def _hand_in(self, temporary: Path) -> RankContribution:
        """Write this rank's file."""
        if isinstance(self._image, CheckpointError):
            raise self._image
        if self._ranks.rank != 0:
            commit.wait_until_visible(temporary)
        name = file_name(self._ranks.rank)
        try:
            with blocks.threads(background=True) as pool:
                self._check_finite(self._image, pool)
                record, digests = blocks.write(temporary / name, self._image.data, pool, check=self._check_discarded)
        except FileNotFoundError:
            commit.check_fence(
                self._bound.directory, self._bound.incarnation
            )  # a newer incarnation removes what older ones were writing
            raise
        self._written = [(name, record)]
        fsync_directory(temporary)
        plan = self._plan
        table = plan.table(self._image.own_bytes).pack()
        plain = {key: json.dumps(value).encode() for key, value in self._plain.items()}
        self._bundles = bundles_of(self._image.fingerprints, plan.replicas)
        return RankContribution(
            self._step,
            name,
            record,
            digests,
            table,
            plain if self._ranks.rank in plan.spokesmen else None,
            {key: zlib.crc32(text) for key, text in plain.items()},
            plan.number,
            digests_of(self._bundles),
        )

    def _check_finite(self, image: Image, pool: ThreadPoolExecutor) -> None:
        """Check the copy that is written, while training goes on."""

        def find(piece: TensorPiece) -> bool:
            return bytes_are_finite(image.data[piece.begin : piece.end], piece.dtype)

        pieces = [piece for piece in self._plan.pieces if piece.name in self._finite]
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
            `path` and `size` of the checkpoint; or what to `ask` before, and whom.
        """
        for part in parts:
            if part.step != self._step:
                raise CheckpointError(
                    f"{part.name} is of step {part.step}, but rank 0 saves step {self._step}",
                    hint="save after the same step on every rank: let one decide when, and tell the others",
                )
        self._parts = parts
        differing = find_differing([part.bundles for part in parts])
        if not self._refuse_drift and not self._tell:
            differing = []
        self._differing = [bundle for bundle in differing if bundle.part != BUFFER or self._tell]
        if self._differing:
            asked = self._differing[:BUNDLES_ASKED]
            return {"ask": [[bundle.group, bundle.part, bundle.asked] for bundle in asked]}
        return self._commit(temporary)

    def _fingerprints(self, asked: list[list[Any]]) -> list[dict[str, int] | None]:
        """Return this rank's fingerprints in each of the bundles, and None where it is not asked for them."""
        return [self._bundles.get((group, part)) if self._ranks.rank in ranks else None for group, part, ranks in asked]

    def _commit_or_refuse(self, temporary: Path, told: list[list[dict[str, int] | None]]) -> dict[str, Any]:
        """Commit on rank 0, unless what the ranks have answered shows that replicas differ which may not."""
        found: dict[str, Differing] = {}
        for number, bundle in enumerate(self._differing[:BUNDLES_ASKED]):
            for differing in name_differing(bundle, [told[rank][number] or {} for rank in bundle.asked]):
                found.setdefault(differing.name, differing)
        self._check_replicas(list(found.values()), all_named=len(self._differing) <= BUNDLES_ASKED)
        return self._commit(temporary)

    def _commit(self, temporary: Path) -> dict[str, Any]:
        parts, catalogues = self._parts, self._plan.catalogues
        self._say_what_differs()
        index = Index(
            catalogues, {part.name: part.table for part in parts}, {part.name: part.digests for part in parts}
        )
        try:
            facts = check_coverage(catalogues, index.tables.values())
        except CheckpointError as error:
            raise CheckpointError(f"{temporary.name}: {error.message}", hint=error.hint) from None
        with blocks.threads(background=True) as pool:
            index_record, _ = blocks.write(temporary / commit.INDEX, memoryview(b"".join(index.chunks())), pool)
        self._written.append((commit.INDEX, index_record))
        manifest = Manifest(
            format=commit.FORMAT,
            run_id=self._bound.run_id,
            step=self._step,
            incarnation=self._bound.incarnation.order,
            incarnation_label=self._bound.incarnation.label,
            world_size=self._ranks.size,
            torch_version=torch.__version__,
            files={**{part.name: part.record for part in parts}, commit.INDEX: index_record},
            tensors={name: {"shape": list(fact.shape), "dtype": fact.dtype} for name, fact in facts.items()},
            state=state.merge_plain(
                [
                    {key: json.loads(text) for key, text in part.plain.items()}
                    for part in parts
                    if part.plain is not None
                ],
                self._optimizers,
            ),
            config=self._bound.config,
            metrics=self._metrics,
            created=time.time(),
        )
        self._check_discarded()
        return {"path": str(commit.commit(temporary, manifest, self._bound.incarnation)), "size": manifest.size}

    def _check_replicas(self, found: list[Differing], *, all_named: bool) -> None:
        """Check that ranks which should hold the same do; otherwise a mixture would be saved that no rank has ever had."""
        wrong = [differing for differing in found if not differing.buffer]
        if wrong and self._refuse_drift:
            least = "" if all_named else "at least "
            more = f" (and {least}{len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
            raise CheckpointError(
                f"{wrong[0]}{more}, and should be the same",
                hint="what differs by design belongs into per_rank=; else the ranks have drifted apart: are gradients averaged "
                "over all of them, or does a node compute wrongly? GPUs of several models differ in the last bits: "
                "checkpoint.on_replica_drift=warn saves the lowest rank's",
            )
        self._differing_names = [str(differing) for differing in found]

    def _say_what_differs(self) -> None:
        """Tell what is another one on some ranks and may be."""
        told = list(self._differing_names)
        for number in range(len(self._plan.catalogues)):
            alike = [(rank, part.plain_digests) for rank, part in enumerate(self._parts) if part.catalogue == number]
            first, digests = alike[0]
            for key in sorted(digests):
                others = [rank for rank, theirs in alike if theirs.get(key) != digests[key]]
                if others:
                    told.append(f"the state of {key} is another one on rank {others[0]} than on rank {first}")
        if told:
            more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
            self.told = (
                f"{told[0]}{more}: that of the lowest rank is saved; what each is to get back belongs into per_rank="
            )

    def _check_discarded(self) -> None:
        if self._discard.is_set():
            raise DiscardedError("the save was given up for a newer one, or to leave in time")
