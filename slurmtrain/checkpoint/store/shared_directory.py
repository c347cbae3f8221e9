"""The ranks of a job agree on one directory of checkpoints, which all of them see, and claim it for their incarnation.

All ranks call these functions together. See `commit` for what an incarnation is and what claiming means.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.checkpoint.format.manifest import Manifest
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.store.commit import Incarnation, claim, claim_file, wait_until_visible


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


def config_as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the form that a checkpoint will give it back: tuples as lists, keys as text."""
    try:
        values: dict[str, Any] = json.loads(json.dumps(config))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"config= cannot be written into a checkpoint: {error}", hint="give plain values"
        ) from None
    return values


def check_has_all_ranks(group: dist.ProcessGroup | None) -> None:
    """Check that the process group has all ranks of the job.

    Without it, each rank would save as if alone, into one directory.
    """
    variables = os.environ
    stated = variables.get("WORLD_SIZE")
    if stated is None and "SLURM_PROCID" in variables and "SLURM_STEP_NUM_TASKS" in variables:
        stated = variables["SLURM_STEP_NUM_TASKS"]
    have = dist.get_world_size(group) if group is not None else 1
    if stated is not None and stated.isdigit() and int(stated) > have:
        raise CheckpointError(
            f"this job has {stated} ranks, but the process group has {have}",
            hint="initialise torch.distributed in every rank before you create the Checkpointer (slurmtrain.init() does)",
        )


def agree_on_directory(ranks: RankGroup, directory: Path, host: str | None = None) -> list[str]:
    """Check that all ranks were given the same directory, and return the host of every rank.

    Args:
        host: name of this rank's host; None: the one that the host gives itself.
    """
    answers = ranks.gather(lambda: [str(directory.absolute()), host or socket.gethostname()])
    first = answers[0][0]
    for rank, (other, _) in enumerate(answers):
        if other != first:
            raise CheckpointError(
                f"rank {rank} was told to save in {other}, rank 0 in {first}",
                hint="choose the directory on rank 0 and broadcast it (a time stamp differs between ranks)",
            )
    return [host for _, host in answers]


def claim_together(ranks: RankGroup, directory: Path, incarnation: Incarnation | None) -> Incarnation:
    """Claim the directory on rank 0, and return the incarnation; see `commit.claim`."""
    label = f"pid {os.getpid()} on {socket.gethostname()}"
    return Incarnation(*ranks.on_rank_0(lambda: astuple(claim(directory, incarnation, label=label))))


def check_is_shared(ranks: RankGroup, directory: Path, incarnation: Incarnation) -> None:
    """Raise CheckpointError on all ranks if one of them does not see the claim that rank 0 has written."""

    def check() -> None:
        path = claim_file(directory, incarnation)
        wait_until_visible(path)
        if not path.exists():
            raise CheckpointError(
                f"rank {ranks.rank} on {socket.gethostname()} does not see what rank 0 wrote in {directory}",
                hint="checkpoints need a directory that all nodes share",
            )

    ranks.all_do(check)


# Users of a directory in this process, by directory and incarnation: two of one incarnation would delete each other's files.
_in_use: weakref.WeakValueDictionary[tuple[str, int], object] = weakref.WeakValueDictionary()


def register_user(user: object, directory: Path, incarnation: Incarnation | None) -> None:
    """Record that `user` saves into the directory as `incarnation`; one without (None) takes a new one for itself.

    Raises:
        CheckpointError: another object of this process does so.
    """
    if incarnation is None:
        return
    key = (str(directory.absolute()), incarnation.order)
    if key in _in_use:
        raise CheckpointError(
            f"{directory} already has a Checkpointer in this process",
            hint="save everything through one: save(step, model=..., other=...); or close() the first",
        )
    _in_use[key] = user


def unregister_user(directory: Path, incarnation: Incarnation) -> None:
    """End what `register_user` has begun."""
    _in_use.pop((str(directory.absolute()), incarnation.order), None)
