"""A copy of the newest state on the nodes themselves, from which a restart on the same nodes goes on in seconds.

A copy is a checkpoint like those of the run directory: the same files, digests and manifest. But no folder is shared: each
node holds the files of its own ranks. It is for a restart in place, on the very nodes that have made it, by the next
incarnation of the run. If a node is another one, or anything is damaged, the newest checkpoint of the run directory is
restored, as without copies.

To save: every rank writes its file on its node, and rank 0 checks that nothing is missing, as for every checkpoint. Then one
rank of each node writes manifest and COMPLETE; when all have, each node renames its folder; when all have, the copy
before it is removed. So at any moment one whole copy is on the nodes.

To restore: the newest copy is taken that every node has, all of whose files are there. It has to be of the incarnation
before this one (or of this one), and from when the newest checkpoint of the run directory was the newest one: so a copy
from before a step back is never taken, since whoever goes back removes the copies of its nodes or is the incarnation in
between. Parts that a node's ranks share with those of other nodes are sent to it, whole files from one node to all.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from slurmtrain.checkpoint.errors import CheckpointError, DamagedError, NodeFolderError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import BLOCK_BYTES
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.format.manifest import Manifest, read_manifest
from slurmtrain.checkpoint.node_folder import MARK, NodeFolder, digest_of, run_folder
from slurmtrain.checkpoint.ranks import CheckpointIdentity, RankGroup
from slurmtrain.checkpoint.save.job import Destination
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.commit import check_fence, previous_claim
from slurmtrain.system.records import read_json

log = logging.getLogger(__name__)


class NodeCopies:
    """The copies of one run, as one rank sees them. Its methods are called by all ranks together.

    Args:
        ranks: the ranks for the thread that trains.
        root: checkpoint.local.
        nodes: node of every rank.
    """

    def __init__(self, ranks: RankGroup, identity: CheckpointIdentity, root: Path, nodes: list[str]):
        self._ranks, self.identity, self._nodes = ranks, identity, nodes
        self._leaders = [nodes.index(node) for node in dict.fromkeys(nodes)]  # one rank of each node
        self.is_leader = ranks.rank in self._leaders
        several = len(self._leaders) > 1 and self.is_leader
        self._between_nodes = ranks.subgroup(self._leaders) if several else RankGroup(None)
        of_run = run_folder(root, identity.directory, identity.run_id)
        self.folder = NodeFolder(root, of_run, nodes[ranks.rank], identity.incarnation.order)
        self.bytes_of_node = 0
        self._fetched: list[Path] = []
        self.on_nodes(ranks, self.folder.open)

    def on_nodes(self, ranks: RankGroup, work: Callable[[], object]) -> None:
        """Run `work` on one rank of each node."""
        ranks.all_do(lambda: work() if self.is_leader else None)

    def expect(self, file_bytes: int, staging_bytes: int | None) -> None:
        """Note how large copies will be, and before the first step check that they fit on every node.

        Args:
            file_bytes: bytes of this rank's file.
            staging_bytes: bytes of host memory that this rank will allocate besides; None: training has begun, and a copy
                for which there is no room is only left out.

        Raises:
            NodeFolderError: on every rank: a node has not that much room.
        """
        sizes = self._ranks.gather(lambda: [file_bytes, staging_bytes or 0])
        here = [each for node, each in zip(self._nodes, sizes, strict=True) if node == self._nodes[self._ranks.rank]]
        self.bytes_of_node = sum(size for size, _ in here)
        if staging_bytes is not None:
            staging = sum(size for _, size in here)
            self.on_nodes(self._ranks, lambda: self.folder.check_room(2, self.bytes_of_node, staging))

    def newest(self, at_most: int | None) -> Path | None:
        """Return this node's part of the newest copy that counts and is whole; None if there is none, or none so new.

        Args:
            at_most: only of at most this step; None: of any step.
        """

        def holds() -> dict[str, dict[str, Any]]:
            found = {}
            for path in committed(self.folder.path) if self.is_leader else ():
                with suppress(CheckpointError, OSError):  # damaged
                    manifest = read_manifest(path, late_s=0)
                    about = {"step": manifest.step, "files": _files_here(path, manifest), "all": list(manifest.files)}
                    found[digest_of(path)] = about | {"mark": read_json(path / MARK)}
            return found

        def choose(answers: list[dict[str, dict[str, Any]]]) -> str | None:
            of_nodes = [answers[rank] for rank in self._leaders]
            shared = committed(self.identity.directory)
            newest = shared[-1] if shared else None
            order = self.identity.incarnation.order
            marks = [
                {"incarnation": number, "durable": newest and newest.name}
                for number in (order, previous_claim(self.identity.directory, order))
            ]
            everywhere = set.intersection(*map(set, of_nodes))
            if any(of_nodes) and not everywhere:
                log.info("not from the copies on the nodes: the nodes of this job do not all have the same one")
            for digest in sorted(everywhere, key=lambda digest: -of_nodes[0][digest]["step"]):
                parts = [copies[digest] for copies in of_nodes]
                step = parts[0]["step"]
                missing = set(parts[0]["all"]).difference(*(part["files"] for part in parts))
                if any(part["mark"] not in marks for part in parts):
                    log.info("the nodes' copy of step %d is not of what this run goes on from", step)
                elif missing:
                    log.info("of the nodes' copy of step %d, no node has %s", step, min(missing))
                elif (at_most is None or step <= at_most) and (newest is None or step >= step_of(newest)):
                    return str(digest)
            return None

        digest = self._ranks.gather_on_rank_0(holds, choose)
        return self._ranks.all_do(lambda: self.folder.find(digest)) if digest is not None else None

    def held(self, path: Path, manifest: Manifest) -> list[str]:
        """Return the names of the files of a copy whose headers this rank is to read: on one rank of a node, all of its."""
        return _files_here(path, manifest) if self.is_leader else []

    def fetch(self, path: Path, manifest: Manifest, needed: Collection[str]) -> None:
        """Send files from node to node that ranks need and that their own node does not hold.

        Args:
            path: the copy on this node.
            needed: names of the files that this rank needs.

        What has arrived is not compared with its digests.

        Raises:
            DamagedError: on every rank: a node has no room for them.
        """
        answers = self._ranks.gather(lambda: [_files_here(path, manifest), sorted(needed)])
        lacking = [set(needs) - set(here) for here, needs in answers]
        own = self._nodes[self._ranks.rank]
        wanted = set[str]().union(*(files for node, files in zip(self._nodes, lacking, strict=True) if node == own))

        def check_room() -> None:
            try:
                self.folder.check_room(1, sum(manifest.sizes[name] for name in wanted))
            except NodeFolderError as error:
                raise DamagedError(f"{path} is damaged: not all of it is here: {error.message}") from None

        self._ranks.all_do(check_room)

        def send_and_receive() -> None:
            for name in sorted(set[str]().union(*lacking)):
                holder = next(number for number, rank in enumerate(self._leaders) if name in answers[rank][0])
                if name in wanted:
                    self._fetched.append(path / name)
                self._pass_on(path / name, manifest.sizes[name], holder, wanted=name in wanted)

        self.on_nodes(self._ranks, send_and_receive)

    def _pass_on(self, file: Path, size: int, holder: int, *, wanted: bool) -> None:
        """Send a file from the node number `holder` to all others, some of which may not want it.

        What cannot be read or written is left out, since the others would wait: the digests show it.
        """
        sends = self._between_nodes.rank == holder
        buffer = torch.zeros(min(size, BLOCK_BYTES), dtype=torch.uint8, device="cpu")
        with ExitStack() as stack:
            opened = None
            with suppress(OSError):
                opened = (
                    stack.enter_context(open(file, "rb" if sends else "wb", buffering=0)) if sends or wanted else None
                )
            for begin in range(0, size, BLOCK_BYTES):
                block = buffer[: min(BLOCK_BYTES, size - begin)]
                with suppress(OSError, EOFError):
                    if sends and opened is not None:
                        blocks.read_into(opened.fileno(), block.numpy().data, begin)
                self._between_nodes.share(block, holder)
                with suppress(OSError):
                    if not sends and opened is not None:
                        blocks.write_all(opened.fileno(), block.numpy().data, begin)

    def end_restoring(self) -> None:
        """Remove from this node what `fetch` has brought there."""
        while self._fetched:
            self._fetched.pop().unlink(missing_ok=True)

    def begin(self, base: Path | None) -> None:
        """Make all copies void but the one that was restored, before training goes on from it.

        Args:
            base: this node's part of it; None: training goes on from something else.
        """

        def begin() -> None:
            self.folder.keep_only(digest_of(base) if base is not None else None)
            if base is not None:
                self.folder.mark(base, (read_json(base / MARK) or {}).get("durable"))

        self.on_nodes(self._ranks, begin)

    def remove(self) -> None:
        """Remove all copies, when the run has ended or its newest state is in the run directory."""
        self.on_nodes(self._ranks, self.folder.remove)


class NodesDestination(Destination):
    """The folders of all nodes, each with its own part."""

    def __init__(self, ranks: RankGroup, copies: NodeCopies):
        super().__init__(ranks, copies.identity)
        self._copies, self._folder = copies, copies.folder
        self.cleans_up = copies.is_leader

    def begin(self, step: int, size: int) -> Path:
        def begin() -> None:
            self._folder.check_room(1, self._copies.bytes_of_node)
            self._folder.begin(step)

        self._ranks.on_rank_0(lambda: check_fence(self._identity.directory, self._identity.incarnation))
        self._copies.on_nodes(self._ranks, begin)
        return self._folder.temporary(step)

    def commit_on_rank_0(self, temporary: Path, manifest: Manifest) -> Any:
        check_fence(self._identity.directory, self._identity.incarnation)
        shared = committed(self._identity.directory)
        return [manifest.step, commit.manifest_bytes(manifest).decode(), shared[-1].name if shared else None]

    def finish(self, answer: Any) -> Path:
        """Let all nodes commit together."""
        step, text, durable = answer
        digest, folder = hashlib.sha256(text.encode()).hexdigest(), self._folder
        self._copies.on_nodes(self._ranks, lambda: folder.describe(step, text.encode(), durable))
        self._copies.on_nodes(self._ranks, lambda: folder.publish(step))
        self._copies.on_nodes(self._ranks, lambda: folder.keep_only(digest))  # all nodes have it: the one before may go
        return folder.find(digest)


def _files_here(path: Path, manifest: Manifest) -> list[str]:
    """Return the names of the files of a copy that are on this node and have the right size."""
    return [
        name
        for name, size in manifest.sizes.items()
        if (path / name).is_file() and (path / name).stat().st_size == size
    ]
