"""Save and restore of a whole training state by all ranks, under the commit protocol. It knows nothing of the trainer.

`Checkpointer` is what users hold. To save (`save.pipeline`): objects -> tensors by name and plain JSON (`state`) -> which
rank writes what (`save.plan`) -> a copy in host memory (`save.staging`) -> training goes on, while a thread does the rest
(`save.job`): write and digest (`format.blocks`), check that nothing is missing (`format.tensor_index`), commit
(`store.commit`), read back, and remove checkpoints that are no longer kept (`store.retention`). To restore
(`restore.restorer`): differences are refused (`restore.compatibility`), and everything is verified before it is loaded
(`restore.reader`).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from slurmtrain.checkpoint import module_state, state
from slurmtrain.checkpoint.node_copies.copies import NodeCopies, node_name
from slurmtrain.checkpoint.ranks import RankGroup, RankGroups
from slurmtrain.checkpoint.restore import compatibility
from slurmtrain.checkpoint.restore.restorer import Restored, Restorer, RestoreRequest
from slurmtrain.checkpoint.save.finite import not_finite
from slurmtrain.checkpoint.save.pending_save import PendingSave, SaveResult
from slurmtrain.checkpoint.save.pipeline import SavePipeline, SaveSettings
from slurmtrain.checkpoint.save.staging import Staging
from slurmtrain.checkpoint.store import shared_directory
from slurmtrain.checkpoint.store.fencing import Incarnation
from slurmtrain.checkpoint.store.retention import Keep, Soundness
from slurmtrain.checkpoint.store.shared_directory import CheckpointIdentity
from slurmtrain.choices import ReplicaDrift, Verify
from slurmtrain.errors import CheckpointError, nearest
from slurmtrain.system.logs import show_error

if TYPE_CHECKING:
    from slurmtrain.checkpoint.store.mirror_upload import MirrorUploader

log = logging.getLogger(__name__)

VERIFY = tuple(Verify)
ON_REPLICA_DRIFT = tuple(ReplicaDrift)


class Checkpointer:
    """The checkpoints in one directory, written and read by all ranks of a process group together.

    Args:
        directory: shared by all ranks; final names are `checkpoint_<step>`.
        group: a gloo group of all ranks that nothing else uses, or None for a single process.
        incarnation: which incarnation of the run this is; an older one than the newest is refused. None: the next one,
            so that a second job in the same directory takes over from the first.
        run_id: written into the manifest; checkpoints of another run are refused.
        config: JSON values that a checkpoint is bound to: restoring with other values is refused.
        changed: dotted keys of `config`, such as "optim.lr", that were changed on purpose since: they may differ.
        keep: which complete checkpoints are kept.
        verify: how restored files are compared with their digests before a tensor is touched: "full", "sampled" (one
            block of 16) or "off" (sizes only). Unless "off", a new checkpoint is read back before older ones are
            removed.
        asynchronous: write while training goes on. False: `save` returns after the commit, and raises if it failed.
        max_failures: this many failed saves in a row end the run; 0: any number of failures is only reported.
        on_replica_drift: when ranks hold different values of what should be the same on all of them: "refuse" fails the
            save; "warn" says so once, and of ranks that should hold the same the lowest always writes all of it, alone.
        mirror: URL of a folder of this run's own in an object store (fsspec's: s3://, gs://, file://). Committed
            checkpoints are copied there in the background, and fetched from there if the directory has none.
        local: a folder that each node has for itself, as in /dev/shm: the newest save is copied there, too, and to the
            next node, and is restored from there while it is newer than the directory's.
        node: name of this rank's node, whose ranks read files together; None: the host's, with `local` first SLURM's.
        on_ending: called by the writing thread of every rank when a save is committed or has failed.

    Raises:
        CheckpointError: on every rank: a newer incarnation of the run has used the directory, the ranks were given
            different directories, or the group has not all ranks of the job.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        group: dist.ProcessGroup | None = None,
        incarnation: Incarnation | None = None,
        run_id: str = "",
        config: Mapping[str, Any] | None = None,
        changed: Collection[str] = (),
        keep: Keep = Keep(),  # noqa: B008 (it is frozen)
        verify: str = "full",
        asynchronous: bool = True,
        max_failures: int = 3,
        on_replica_drift: str = "refuse",
        mirror: str | None = None,
        local: Path | str | None = None,
        node: str | None = None,
        on_ending: Callable[[SaveResult | CheckpointError], None] = lambda ending: None,
    ):
        _check_is_one_of("verify", verify, VERIFY)
        _check_is_one_of("on_replica_drift", on_replica_drift, ON_REPLICA_DRIFT)
        shared_directory.check_has_all_ranks(group)
        self.directory = Path(directory)
        self.lost: CheckpointError | None = None  # why a save that a script had begun when it ended was lost
        json_config = shared_directory.config_as_json(config or {})

        ranks = self._ranks = RankGroup(group)
        host = node or (node_name() if local else None)
        hosts = shared_directory.agree_on_directory(ranks, self.directory, host)
        groups = RankGroups.make(ranks, hosts)
        claimed = shared_directory.claim_together(ranks, self.directory, incarnation)
        ranks.all_do(lambda: shared_directory.register_user(self, self.directory, incarnation))
        identity = self._identity = CheckpointIdentity(self.directory, claimed, run_id, json_config)
        uploader: MirrorUploader | None = None
        if mirror:
            from slurmtrain.checkpoint.store.mirror_upload import MirrorUploader

            uploader = MirrorUploader(mirror, ranks, identity, keep)
        shared_directory.check_is_shared(ranks, self.directory, claimed)

        copies = self._node_copies = NodeCopies(ranks, identity, Path(local), hosts) if local else None
        staging = Staging()
        settings = SaveSettings(
            keep=keep,
            read_back=verify != Verify.OFF,
            asynchronous=asynchronous,
            max_failures=max_failures,
            refuse_drift=on_replica_drift == ReplicaDrift.REFUSE,
            on_ending=on_ending,
        )
        self._saves = SavePipeline(groups, identity, staging, uploader, copies, settings)
        self._restorer = Restorer(
            groups, identity, staging.borrow, uploader, copies, changed=frozenset(changed), verify=verify
        )
        # Registered to run before Python's own thread pools end, which the writing needs; `atexit` comes after that.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_close, weakref.ref(self), os.getpid())

    def save(
        self,
        step: int,
        *,
        per_rank: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        **objects: Any,
    ) -> PendingSave:
        """Save `objects` as the state after `step` optimiser steps. All ranks call it together.

        It returns when training may go on; see `PendingSave.result` and `wait` for the commit. If another save is in flight,
        it is waited for first. Parameters and optimiser state on a GPU are still being copied when `save` returns, and
        a hook makes the next `optimizer.step()` wait for that; code that changes them by hand calls `wait_staged`
        before.

        Ranks that hold the same tensors are compared. If they differ, the save fails and names them (see
        on_replica_drift); buffers (BatchNorm) and plain values that differ are reported once, and those of the lowest
        rank are saved.

        Parameters that are trained, and the state of optimisers, have to be finite, else the save fails (NonFiniteError) and
        the older checkpoints stay.
        The copy is checked, in the background. What was not finite already when `restore` was called is not checked.

        Args:
            step: optimiser steps done.
            per_rank: objects that differ between ranks, by name. The random state of every rank is always included.
            metrics: metrics of this step, by which the best checkpoints are chosen.
            objects: modules, optimisers, anything with state_dict and load_state_dict, or plain JSON values.

        Raises:
            CheckpointError: on every rank: the state cannot be saved at all, or `max_failures` saves have failed in a
                row.
        """
        _unclosed.add(self)
        return self._saves.save(step, objects, per_rank, metrics)

    def save_local(self, step: int, *, per_rank: Mapping[str, Any] | None = None, **objects: Any) -> PendingSave:
        """Copy `objects` to the nodes (`local`) as the state after `step` optimiser steps. All ranks call it together.

        As `save`, but no checkpoint of the directory: it is lost with the nodes. A copy that fails is reported, and is
        no failure of the run.

        Raises:
            CheckpointError: on every rank: the state cannot be saved at all, or the Checkpointer was made without `local`.
        """
        if self._node_copies is None:
            raise CheckpointError("there is no folder on the nodes to save in", hint="Checkpointer(local='/dev/shm')")
        _unclosed.add(self)
        return self._saves.save(step, objects, per_rank, None, on_nodes_only=True)

    def remove_local(self) -> None:
        """Remove the copies on the nodes, since the run has ended or leaves them. All ranks call it together."""
        if self._node_copies is not None:
            self._saves.wait_idle()
            self._node_copies.remove(self._ranks)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, so that `save_local` would not wait. Ranks may differ for a moment."""
        return self._saves.idle

    def wait(self, timeout_s: float | None = None) -> SaveResult | None:
        """Wait for the commit of the save in flight, if there is one.

        Raises:
            CheckpointError: the save failed, on every rank; the older checkpoints are as they were.
        """
        return self._saves.wait(timeout_s)

    def wait_staged(self) -> None:
        """Wait until the copy that is written to disk is complete, so that parameters may be changed."""
        self._saves.wait_staged()

    def hurry(self) -> None:
        """Leave everything that a commit does not need to the next incarnation, since the job is to stop.

        That is reading back and cleaning up.
        """
        self._saves.hurry()

    def discard(self) -> None:
        """Give up the save in flight, unless it is already being committed. All ranks call it together."""
        self._saves.discard()

    @property
    def in_flight(self) -> int | None:
        """The step whose save is neither committed nor failed yet. Ranks may differ for a moment."""
        return self._saves.in_flight

    @property
    def sound_step(self) -> int | None:
        """The newest step that is known to be sound; None: not known.

        The newest checkpoint of at most this step is never removed to make room for newer ones, which may be from after a
        trouble that nobody has noticed yet. A training that looks at its numbers sets it.
        """
        return self._saves.soundness.sound_step

    @sound_step.setter
    def sound_step(self, step: int | None) -> None:
        self._saves.soundness = self._saves.soundness._replace(sound_step=step)

    @property
    def unchecked_step(self) -> int | None:
        """The first step of which it is not known yet whether it is sound; None: nobody looks, or all are known.

        Checkpoints of this step and of later ones are not removed to make room. A training that finds out steps later
        whether a step was sound sets it after `sound_step`: else it may lose the checkpoint that turns out to be the last
        sound one.
        """
        return self._saves.soundness.unchecked_step

    @unchecked_step.setter
    def unchecked_step(self, step: int | None) -> None:
        self._saves.soundness = self._saves.soundness._replace(unchecked_step=step)

    def set_soundness(self, soundness: Soundness) -> None:
        """Set `sound_step` and `unchecked_step` at once."""
        self._saves.soundness = soundness

    def remove_newer(self, step: int) -> None:
        """Remove the checkpoints of later steps than `step`, to which training has gone back. All ranks call it together.

        Copies of them in the mirror are removed, too.
        """
        self._saves.remove_newer(step)

    @property
    def last_step(self) -> int | None:
        """The newest step that was saved, is being saved, or was restored."""
        return self._saves.last_step

    def close(self, grace_s: float | None = None) -> None:
        """Finish the save in flight, and end the thread.

        Args:
            grace_s: None: take as long as it takes, reading back and cleaning up included. Otherwise a save that is not
                committed after this many seconds is discarded, and what follows the commit is left to the next
                incarnation.

        Raises:
            CheckpointError: the save in flight failed.
        """
        try:
            self._saves.close(grace_s)
        finally:
            shared_directory.unregister_user(self.directory, self._identity.incarnation)
        _unclosed.discard(self)

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
        """Load the newest checkpoint that is complete and undamaged into `objects`. All ranks call it together.

        A rank that did not exist when the checkpoint was saved keeps its random state, and its `per_rank` objects are
        left as they are. Plain JSON values are not returned; pass an object with `load_state_dict` instead.

        Args:
            path: load this checkpoint and no other, from whatever run.
            at_most: load the newest checkpoint of at most this step.
            allow: what may differ from the checkpoint, of "keys", "shapes", "dtypes", "config": tensors that do not fit
                keep their initial values, dtypes are converted.
            as_start: another training starts with `objects` out of the checkpoint `path`, which holds more. Only the
                part of the config that has their names has to agree, and random states stay as they are.

        Returns:
            None when there is no such checkpoint: a fresh start. Never None when `path` is given.

        Raises:
            CheckpointMismatchError: there are checkpoints, but none fits or none is sound.
            CheckpointError: `path` is no checkpoint or is damaged; or tensors are handed in that could not be loaded.
        """
        compatibility.check_allowed(allow)
        self._ranks.all_do(lambda: state.refuse_loose_tensors({**objects, **(per_rank or {})}))
        self._saves.wait_idle()
        non_finite = self._ranks.all_do(lambda: not_finite(module_state.trained_parameters(objects)))
        own_objects = {} if as_start else state.per_rank_objects(per_rank)
        asked_for = Path(path) if path is not None else None
        restored = self._restorer.restore(RestoreRequest(objects, own_objects, asked_for, allow, as_start, at_most))
        if restored is not None and path is None and not restored.origin:  # a copy on the nodes is lost with them
            self._saves.last_committed_step = restored.step
        if restored is None or not as_start:
            self._saves.reserve(objects, per_rank, restored_size=restored.size if restored is not None else None)
        if restored is not None and at_most is None and self._ranks.rank == 0:
            log.info(restored.sentence)
            plain = [
                key for key, value in {**objects, **(per_rank or {})}.items() if not isinstance(value, state.Stateful)
            ]
            if plain:
                log.warning(
                    "not restored, since plain values cannot be changed in place: %s; an object with state_dict() and "
                    "load_state_dict() can",
                    ", ".join(plain),
                )
        # What was not finite before anything was trained is meant to be so, unless only the restore has filled it.
        if self._ranks.maximum(int(bool(non_finite))):
            non_finite &= self._ranks.all_do(lambda: not_finite(module_state.trained_parameters(objects)))
            self._saves.non_finite_from_start |= non_finite
        return restored


def _check_is_one_of(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise CheckpointError(f"{name}={value!r} is not known", hint=nearest(str(value), known))


# Those that have saved and were not closed, or have lost a save: the end of the process needs them, even where a script has
# dropped its own.
_unclosed: set[Checkpointer] = set()


def _close(reference: weakref.ref[Checkpointer], owner: int) -> None:
    """Close the checkpointer at the end of a script that did not wait for its last save."""
    if os.getpid() != owner:
        return  # a forked child inherits this; thread and group are its parent's
    checkpointer = reference()
    if checkpointer is not None:
        try:
            checkpointer.close()
        except CheckpointError as error:
            checkpointer.lost = error
            show_error(error)
