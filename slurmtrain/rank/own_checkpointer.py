"""`slurmtrain.Checkpointer`: the Checkpointer of a script of the user's own, bound to its run by `slurmtrain.init`."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint import checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.restore.restorer import Restored
from slurmtrain.checkpoint.save.job import SaveResult
from slurmtrain.checkpoint.store.commit import Incarnation
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.rank import attempt_context
from slurmtrain.rank.api import exit_for_requeue, session, should_stop


class Checkpointer(checkpointer.Checkpointer):
    """The checkpoints of this run, in its run directory. All ranks make one together, after `slurmtrain.init`.

    Args:
        directory: shared by all ranks; default: the run's, or ./checkpoints for a script that was not submitted.
        keep: which complete checkpoints are kept, for instance slurmtrain.Keep(last=3, every=1000).
        max_failures: this many failed saves in a row end the run; 0: any number of failures is only reported.
        config: JSON values that a checkpoint is bound to: restoring with other values is refused.
        changed: dotted keys of `config`, such as "optim.lr", that were changed on purpose since: they may differ.
        mirror: URL of a folder of this run's own in an object store (fsspec's: s3://, gs://, file://). Committed
            checkpoints are copied there in the background, and fetched from there if the directory has none.
        local: a folder that each node has for itself, as in /dev/shm; default: checkpoint.local of a submitted script. The
            newest checkpoint is copied there, too, and a restart on the same nodes reads it there in seconds.
            `remove_local` removes the copies.

    Raises:
        RuntimeError: `slurmtrain.init` has not been called.
        CheckpointError: on every rank: a newer incarnation of the run has used the directory, the ranks were given
            different directories, or an argument is not known.
        NodeFolderError: on every rank: a node has no folder `local`.
    """

    def __init__(
        self,
        directory: Path | str | None = None,
        *,
        keep: Keep = Keep(),  # noqa: B008 (it is frozen)
        max_failures: int = 3,
        config: Mapping[str, Any] | None = None,
        changed: Collection[str] = (),
        mirror: str | None = None,
        local: Path | str | None = None,
    ):
        distributed, _ = session.initialised()
        context = session.context
        incarnation, run_id = None, ""
        if context is not None:
            incarnation = Incarnation(context.number, context.incarnation_label(distributed.environment))
            run_id = context.run_dir.id
        if directory is None:
            directory = context.run_dir.checkpoints if context is not None else Path("checkpoints")
        super().__init__(
            directory,
            group=distributed.checkpoint_group,
            incarnation=incarnation,
            run_id=run_id,
            config=config,
            changed=changed,
            keep=keep,
            max_failures=max_failures,
            mirror=mirror,
            local=local or session.local_copies,
            on_ending=_note_saved,
        )
        session.checkpointers.add(self)

    def restore(
        self,
        *,
        path: Path | str | None = None,
        at_most: int | None = None,
        allow: Collection[str] = (),
        per_rank: Mapping[str, Any] | None = None,
        as_start: bool = False,
        **objects: Any,
    ) -> Restored | None:
        restored = super().restore(
            path=path, at_most=at_most, allow=allow, per_rank=per_rank, as_start=as_start, **objects
        )
        first_step = restored.step if restored and not as_start else 0
        # A later one goes back, or reads weights: the attempt does not begin there.
        if session.initialised()[1].rounds == 0:
            session.first_step = first_step
            _note(first_step=first_step, stepping=time.time())
        return restored

    def after_step(self, step: int, *, every: int = 0, **objects: Any) -> None:
        """Save `objects` if it is time, or if the run is told to stop, and then leave: it starts again by itself.

        All ranks call it after each step. It is `should_stop`, `save` and `exit_for_requeue` in one.

        Args:
            step: steps done.
            every: save after each so many steps, too; 0: only when the run is told to stop.

        Raises:
            CheckpointError: a save failed, as in `save` and `exit_for_requeue`.
        """
        stop = should_stop()
        if stop or (every and step % every == 0):
            self.save(step, **objects)
        if stop:
            exit_for_requeue()


def _note(**changes: Any) -> None:
    """Write into the record of the attempt, on rank 0, if the script was submitted."""
    if session.context is not None and session.initialised()[0].environment.rank == 0:
        attempt_context.update_attempt(session.context, **changes)


def _note_saved(ending: SaveResult | CheckpointError) -> None:
    if isinstance(ending, SaveResult):
        _note(last_step=ending.step, saved=str(ending.path.absolute()))
