"""A save into a folder of each node: the destination of a copy (see `node_copies` for the steps)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES, FileRecord
from slurmtrain.checkpoint.format.directory import step_of
from slurmtrain.checkpoint.format.manifest import Manifest, parse_manifest
from slurmtrain.checkpoint.format.rank_files import file_name
from slurmtrain.checkpoint.format.tensor_index import Index
from slurmtrain.checkpoint.node_copies.copies import NodeCopies
from slurmtrain.checkpoint.node_copies.lineage import Mark, newest_durable
from slurmtrain.checkpoint.node_copies.transfer import exchange, to_neighbours
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.save.destination import CommitResult
from slurmtrain.checkpoint.store.fencing import check_fence
from slurmtrain.errors import CheckpointError
from slurmtrain.system.modes import file_mode


class NodesDestination:
    """The folders of all nodes, each with its own part and that of the node before it."""

    def __init__(self, copies: NodeCopies):
        self._copies = copies

    def begin(self, ranks: RankGroup, step: int, size: int) -> Path:
        folder, identity = self._copies.folder, self._copies.identity

        def begin() -> None:
            self._copies.check_room()
            folder.begin(step)

        ranks.on_rank_0(lambda: check_fence(identity.directory, identity.incarnation))
        ranks.all_do(self._copies.on_leader(begin))
        return folder.temporary(step)

    @contextmanager
    def removed_on_failure(self, ranks: RankGroup, temporary: Path) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            if self._copies.is_leader:
                self._copies.folder.give_up(_step_of(temporary))
            raise

    def commit_on_rank_0(
        self,
        temporary: Path,
        index: bytes,
        manifest_with: Callable[[FileRecord], Manifest],
        *,
        check: Callable[[], None],
    ) -> CommitResult:
        record = FileRecord(len(index), blocks.root(blocks.digests_of(index)))
        manifest = manifest_with(record)
        check()
        identity = self._copies.identity
        check_fence(identity.directory, identity.incarnation)
        text = json.dumps(asdict(manifest), indent=1).encode()
        return CommitResult(record, manifest.size, [text, index, newest_durable(identity.directory)])

    def finish(self, ranks: RankGroup, temporary: Path, answer: Any, image: memoryview) -> Path:
        """Send files to the next nodes, and let all nodes commit together."""
        text, index_bytes, durable = answer
        step, folder = _step_of(temporary), self._copies.folder
        manifest = parse_manifest(temporary, text, hashlib.sha256(text).hexdigest())
        index = ranks.all_do(lambda: Index.parse(index_bytes, manifest.sizes))
        ranks.all_do(lambda: self._send_to_neighbours(ranks, temporary, manifest, index, image))
        mark = Mark(self._copies.lineage(ranks).token, durable)
        ranks.all_do(self._copies.on_leader(partial(folder.describe, step, text, index_bytes, mark)))
        published: list[Path] = []
        ranks.all_do(self._copies.on_leader(lambda: published.append(folder.publish(step))))
        # All nodes have it: only now may the one before it go.
        ranks.all_do(self._copies.on_leader(partial(folder.keep_only, hashlib.sha256(text).hexdigest())))
        return published[0] if published else folder.path / temporary.name.partition(".")[0]

    def _send_to_neighbours(
        self, ranks: RankGroup, temporary: Path, manifest: Manifest, index: Index, image: memoryview
    ) -> None:
        """Send this rank's file to the next node, and write what the node before this one sends."""
        files = [file_name(rank) for rank in range(ranks.size)]
        transfers = to_neighbours(self._copies.nodes, files, manifest.sizes)
        descriptors: dict[str, int] = {}

        def read(file: str, block: int) -> memoryview:
            return image[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]

        def write(file: str, block: int, data: memoryview) -> None:
            if not blocks.is_intact(data, index.digests[file], block):
                raise CheckpointError(f"block {block} of {file} did not arrive as it was sent: its digest differs")
            if file not in descriptors:
                descriptors[file] = os.open(
                    temporary / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode(temporary)
                )
            blocks.write_all(descriptors[file], data, block * BLOCK_BYTES)

        try:
            exchange(ranks, transfers, manifest.sizes, read=read, write=write)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)


def _step_of(temporary: Path) -> int:
    return step_of(Path(temporary.name.partition(".")[0]))
