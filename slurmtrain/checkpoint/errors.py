"""Errors about checkpoints: the storage, what is in it, and who may write there."""

from __future__ import annotations

from slurmtrain.errors import EXIT_CONFIG, SlurmtrainError


class CheckpointError(SlurmtrainError):
    """A checkpoint cannot be written, or cannot be trusted."""


class LostPeersError(CheckpointError):
    """Another rank went away in the middle of a save or restore: its failure, not this rank's, came first."""


class UnreadableError(CheckpointError):
    """The storage does not give a checkpoint's files now, which says nothing about them. A retry may help."""


class DamagedError(CheckpointError):
    """The files of a checkpoint are not what was written."""


class SupersededError(CheckpointError):
    """A newer incarnation of the run is at work: this one may not commit any more, and has nothing left to do."""


class DiscardedError(CheckpointError):
    """A save was given up on purpose."""


class NonFiniteError(CheckpointError):
    """Parameters are not finite, and are not saved: no later step mends them, and the same bits would do the same again."""

    exit_code = EXIT_CONFIG


class NodeFolderError(CheckpointError):
    """A node has no folder, or no room, for copies of checkpoints (checkpoint.local). The same attempt would fail again."""

    exit_code = EXIT_CONFIG


class CheckpointMismatchError(CheckpointError):
    """There are checkpoints, but none that this run may continue from: damaged, or of another model. No retry helps."""

    exit_code = EXIT_CONFIG
