"""Where a save is written to: the directory that all ranks share, or a folder of each node (`node_copies`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.manifest import Manifest
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.shared_directory import CheckpointIdentity


class Destination:
    """The directory that all ranks share: rank 0 makes the folder, and its rename is the commit (`store.commit`).

    The methods are the steps of a commit that depend on where a save is written to, in this order. All ranks call them
    together.
    """

    def __init__(self, identity: CheckpointIdentity):
        self._identity = identity

    def begin(self, ranks: RankGroup, step: int, size: int) -> Path:
        """Make the folder that this rank writes its file into, and return it.

        Args:
            size: bytes of the whole checkpoint, as far as known.

        Raises:
            CheckpointError: on every rank: there is no room, or a newer incarnation has started.
        """
        begin = partial(commit.begin, self._identity.directory, step, self._identity.incarnation, size=size)
        return Path(ranks.on_rank_0(lambda: str(begin())))

    def removed_on_failure(self, ranks: RankGroup, temporary: Path) -> AbstractContextManager[None]:
        """Remove what was written if it is not committed."""
        return commit.removed_on_failure(temporary, on_this_rank=ranks.rank == 0)

    def commit_on_rank_0(self, temporary: Path, manifest: Manifest) -> Any:
        """Commit what all ranks have handed in, or prepare it for all ranks to commit; called by rank 0 alone.

        Returns:
            What the other ranks are told, and `finish` gets: values that ranks can send.
        """
        return str(commit.commit(temporary, manifest, self._identity.incarnation))

    def finish(self, ranks: RankGroup, temporary: Path, answer: Any) -> Path:
        """Do what is left for all ranks, after `commit_on_rank_0` has given this `answer`, and return the final path."""
        return Path(answer)
