"""The copies on the nodes as one rank sees them: its node among all, the folder there, and which copies count."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slurmtrain.checkpoint.host_memory import available_memory
from slurmtrain.checkpoint.node_copies.folder import NodeFolder, run_folder
from slurmtrain.checkpoint.node_copies.lineage import Lineage, begin_lineage
from slurmtrain.checkpoint.node_copies.transfer import ranks_of
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.store.shared_directory import CheckpointIdentity
from slurmtrain.errors import NodeFolderError
from slurmtrain.slurm.environment import own_node_name

log = logging.getLogger(__name__)

COPIES = 2  # the newest one, and the one that is being written
SPARE_BYTES = 16 << 20


def node_name() -> str:
    """Return the name of this node: SLURM's, else the host's."""
    return own_node_name() or socket.gethostname()


class NodeCopies:
    """The copies of one run. Its methods are called by all ranks together.

    Args:
        ranks: the ranks for the thread that trains.
        root: checkpoint.local.
        nodes: node of every rank.

    Attributes:
        nodes: node of every rank.
        by_node: ranks of each node, the nodes in the order of their first rank.
        is_leader: whether this rank writes for its node what one rank of a node writes.
        folder: that of this node.
    """

    def __init__(self, ranks: RankGroup, identity: CheckpointIdentity, root: Path, nodes: list[str]):
        self.identity, self.nodes, self.by_node = identity, nodes, ranks_of(nodes)
        self.is_leader = self.by_node[nodes[ranks.rank]][0] == ranks.rank
        of_run = run_folder(root, identity.directory, identity.run_id)
        self.folder = NodeFolder(root, of_run, nodes[ranks.rank], identity.incarnation.order)
        self._lineage: Lineage | None = None
        self._bytes_of_node = 0
        ranks.all_do(self.on_leader(self.folder.open))

    def on_leader(self, work: Callable[[], object]) -> Callable[[], None]:
        """Return a function that runs `work` on one rank of each node."""

        def run() -> None:
            if self.is_leader:
                work()

        return run

    def lineage(self, ranks: RankGroup) -> Lineage:
        """Return which copies count: those that this attempt makes."""
        if self._lineage is None:
            self.begin(ranks, None)
        assert self._lineage is not None
        return self._lineage

    def begin(self, ranks: RankGroup, base: str | None) -> None:
        """Make all copies void but the one that was restored, before training goes on from it.

        Args:
            base: its digest; None: training goes on from something else.
        """
        directory, incarnation = self.identity.directory, self.identity.incarnation
        token = ranks.on_rank_0(lambda: begin_lineage(directory, incarnation, base).token)
        self._lineage = Lineage(token, base)
        ranks.all_do(self.on_leader(partial(self.folder.keep_only, base)))

    def expect(self, ranks: RankGroup, file_bytes: int, staging_bytes: int | None) -> None:
        """Note how large copies will be, and before the first step check that they fit on every node.

        Args:
            file_bytes: bytes of this rank's file.
            staging_bytes: bytes of host memory that this rank will allocate besides; None: training has begun, and a copy
                for which there is no room is only left out.

        Raises:
            NodeFolderError: on every rank: a node has not that much room.
        """
        sizes = ranks.gather(lambda: [file_bytes, staging_bytes or 0])
        names = list(self.by_node)
        here = names.index(self.nodes[ranks.rank])
        held_for = {here, (here - 1) % len(names)}  # this node, and the one before it, once if there is no other
        self._bytes_of_node = sum(sizes[rank][0] for number in held_for for rank in self.by_node[names[number]])
        if staging_bytes is None:
            return
        staging = sum(sizes[rank][1] for rank in self.by_node[names[here]])
        ranks.all_do(self.on_leader(lambda: self._check_room(COPIES, staging)))

    def check_room(self) -> None:
        """Check, on one rank of a node, that one more copy fits.

        Raises:
            NodeFolderError: there is not that much room.
        """
        self._check_room(1, 0)

    def _check_room(self, copies: int, staging_bytes: int) -> None:
        folder, of_others = self.folder, "" if len(self.by_node) == 1 else ", the part of the node before it included"
        held = folder.held_bytes() if copies > 1 else 0
        wanted = copies * self._bytes_of_node - held
        what = f"{copies} of {self._bytes_of_node / 1e9:.2f} GB{of_others}"
        hint = "smaller parts on more nodes, another folder (checkpoint.local), or none: checkpoint.local=null"
        if wanted + SPARE_BYTES > (free := folder.free_bytes()):
            raise NodeFolderError(
                f"{folder.root} on {socket.gethostname()} has {free / 1e9:.2f} GB left for copies of checkpoints: {what}",
                hint=hint,
            )
        left = available_memory() if folder.in_memory else None
        if left is not None and wanted + staging_bytes + SPARE_BYTES > left:
            raise NodeFolderError(
                f"{folder.root} on {socket.gethostname()} is memory of this job, which has {left / 1e9:.2f} GB left, and "
                f"copies of checkpoints take {what}",
                hint=f"request more memory (cluster.mem_per_node_gb); {hint}",
            )

    def remove(self, ranks: RankGroup) -> None:
        """Remove all copies, when the run has ended or its newest state is in the run directory."""
        ranks.all_do(self.on_leader(self.folder.remove))
