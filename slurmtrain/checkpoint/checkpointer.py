"""Save and restore of a whole training state by all ranks, under the commit protocol. It knows nothing of the trainer.

`Checkpointer` is what users hold. To save: objects -> tensors by name and plain JSON (`state`) -> which rank writes what
(`save.plan`) -> a copy in host memory (`save.staging`) -> training goes on, while a thread does the rest (`save.job`):
write and digest (`format.blocks`), commit (`store.commit`), and remove checkpoints that are no longer kept
(`store.retention`). To restore (`restore.restorer`): the headers say what is where (`restore.reader`), differences are
refused, and everything is verified before it is loaded (`restore.reader`).
"""

from __future__ import annotations

import atexit
import json
import logging
import operator
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer

from slurmtrain.checkpoint import state
from slurmtrain.checkpoint.errors import (
    CheckpointError,
    DiscardedError,
    LostPeersError,
    NonFiniteError,
    SupersededError,
)
from slurmtrain.checkpoint.format.directory import committed, file_name, newest_committed_step, step_of
from slurmtrain.checkpoint.format.directory import remove as remove_checkpoint
from slurmtrain.checkpoint.node_folder import NodeFolder
from slurmtrain.checkpoint.ranks import (
    CheckpointIdentity,
    RankGroup,
    check_has_all_ranks,
    claim_directory,
    config_as_json,
)
from slurmtrain.checkpoint.restore.restorer import Restored, Restorer
from slurmtrain.checkpoint.save.job import PendingSave, SaveJob, SaveResult
from slurmtrain.checkpoint.save.plan import SavePlan, make_plan
from slurmtrain.checkpoint.save.staging import Image, Staging
from slurmtrain.checkpoint.state import FlatState
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.store.commit import Incarnation, check_fence
from slurmtrain.checkpoint.store.retention import Keep, Soundness
from slurmtrain.system.activity import RESTORE, SAVE, doing
from slurmtrain.system.logs import show_error

if TYPE_CHECKING:
    from slurmtrain.checkpoint.store.mirror import MirrorUploader

log = logging.getLogger(__name__)


class Checkpointer:
    """The checkpoints in one directory, written and read by all ranks of a process group together.

    At most one save is in flight. It is an error to train on when several in a row have failed.

    Args:
        directory: shared by all ranks; final names are `checkpoint_<step>`.
        group: a gloo group of all ranks that nothing else uses, or None for a single process.
        incarnation: which incarnation of the run this is; an older one than the newest is refused. None: the next one,
            so that a second job in the same directory takes over from the first.
        run_id: written into the manifest; checkpoints of another run are refused.
        config: JSON values that a checkpoint is bound to: restoring with other values is refused.
        changed: dotted keys of `config`, such as "optim.lr", that were changed on purpose since: they may differ.
        keep: which complete checkpoints are kept.
        max_failures: this many failed saves in a row end the run; 0: any number of failures is only reported.
        mirror: URL of a folder of this run's own in an object store (fsspec's: s3://, gs://, file://). Committed
            checkpoints are copied there in the background, and fetched from there if the directory has none.
        local: a folder that each node has for itself, as in /dev/shm: the files of the newest checkpoint are copied there,
            too, and a restart in place, on the same nodes, reads them there.
        on_ending: called by the writing thread of every rank when a save is committed or has failed.

    Attributes:
        lost: why a save that a script had begun when it ended was lost.
        last_committed_step: step of the last checkpoint that was committed or restored.
        sound_step: set by a training that looks at its numbers: the newest step that is known to be sound. The newest
            checkpoint of at most this step is never removed to make room for newer ones, which may be from after a trouble
            that nobody has noticed yet. None: not known.
        unchecked_step: the first step of which that is not known yet; None: nobody looks, or all are known. Checkpoints of
            this step and of later ones are not removed to make room. A training that finds out steps later whether a step
            was sound sets it after `sound_step`: else it may lose the checkpoint that turns out to be the last sound one.

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
        max_failures: int = 3,
        mirror: str | None = None,
        local: Path | str | None = None,
        on_ending: Callable[[SaveResult | CheckpointError], None] = lambda ending: None,
    ):
        check_has_all_ranks(group)
        self.directory = Path(directory)
        self._keep, self._max_failures, self._on_ending = keep, max_failures, on_ending
        json_config = config_as_json(config or {})

        ranks = self._ranks = RankGroup(group)
        claimed, hosts = claim_directory(ranks, self.directory, incarnation, local)
        # The thread that writes has messages of its own, which must not meet those of the thread that trains.
        self._writing, self._on_host = ranks.own_group(), ranks.of_host(hosts)
        identity = self._identity = CheckpointIdentity(self.directory, claimed, run_id, json_config)
        ranks.all_do(self._check_is_alone)
        self._uploader: MirrorUploader | None = None
        if mirror:
            from slurmtrain.checkpoint.store.mirror import MirrorUploader

            self._uploader = MirrorUploader(mirror, ranks, identity, keep)
        self._node_folder = NodeFolder(Path(local), self.directory, run_id) if local else None
        if self._node_folder is not None:
            ranks.all_do(self._node_folder.open)
        self._staging = Staging()
        self._changed = frozenset(changed)
        self.lost: CheckpointError | None = None
        self.last_committed_step: int | None = None
        self.sound_step: int | None = None
        self.unchecked_step: int | None = None
        self._writer = threading.Thread()  # of the last save; this one has ended
        self._writer.start()
        self._discard, self._hurried, self._closed = threading.Event(), threading.Event(), False
        self._pending: PendingSave | None = None
        self._plan: SavePlan | None = None
        self._checked_objects: tuple[Any, ...] | None = None  # those that were last found restorable
        self._saves_begun = 0  # the same on all ranks
        self._failures_in_a_row = 0
        self._drift_reported = False
        self._copy_failed = False  # whether the last one in the node's folder did
        # Registered to run before Python's own thread pools end, which the writing needs; `atexit` comes after that.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_close, self, os.getpid())
        _open.add(self)  # last: one that could not be made cannot be closed

    def _check_is_alone(self) -> None:
        """Check that nothing else in this process saves as the same incarnation: they would delete each other's files."""
        own = self.directory.absolute(), self._identity.incarnation
        if own in [(each.directory.absolute(), each._identity.incarnation) for each in _open]:
            raise CheckpointError(
                f"{self.directory} already has a Checkpointer in this process",
                hint="save everything through one: save(step, model=..., other=...); or close() the first",
            )

    # Saving, as the thread that trains sees it.

    @doing(SAVE)
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

        Ranks that hold the same tensors are compared. If they differ, the save fails and names them; plain values that
        differ are reported once. Of them, and of buffers (BatchNorm), which are not compared, those of the lowest rank
        are saved.

        Parameters that are trained, and the state of optimisers, have to be finite, else the save fails (NonFiniteError) and
        the older checkpoints stay. The copy is checked, in the background.

        Args:
            step: optimiser steps done.
            per_rank: objects that differ between ranks, by name. The random state of every rank is always included.
            metrics: metrics of this step, by which the best checkpoints are chosen.
            objects: modules, optimisers, anything with state_dict and load_state_dict, or plain JSON values.

        Raises:
            CheckpointError: on every rank: the state cannot be saved at all, or `max_failures` saves have failed in a
                row.
        """
        begun = time.monotonic()
        if self._closed:
            raise CheckpointError(f"step {step} cannot be saved: the Checkpointer is closed", hint="create a new one")
        previous = self._wait_idle()
        failed = previous.error if previous is not None else None
        if isinstance(failed, (LostPeersError, SupersededError)):
            raise failed  # the group cannot be used any more, and another attempt has a new one; or no later save is committed
        if (
            previous is not None
            and isinstance(failed, CheckpointError)
            and 0 < self._max_failures <= self._failures_in_a_row
        ):
            kind = NonFiniteError if isinstance(failed, NonFiniteError) else CheckpointError
            raise kind(
                f"{self._failures_in_a_row} saves in a row have failed, the last of step {previous.step}: {failed.message}",
                hint=failed.hint or "checkpoint.max_failures says how many are put up with",
            )
        numbers: dict[str, float] = {}
        flat = self._flatten(objects, per_rank)
        try:
            step, numbers = _as_plain(step, metrics or {})
        except Exception as error:
            flat.error = self._ranks.explain(error)
        plan = make_plan(flat, self._ranks, self._plan)
        if plan is not self._plan:
            self._ranks.all_do(lambda: self._staging.prepare(plan.data_end, sharers=self._on_host.size))
            self._plan = plan
        optimizers = {key: value for key, value in objects.items() if isinstance(value, Optimizer)}
        image: Image | CheckpointError
        try:
            own, waiting = json.dumps(flat.own_plain).encode(), optimizers.values()
            image = self._staging.stage(plan, flat.tensors, own, flat.guarded, waiting, number=self._saves_begun)
        except Exception as error:  # handed in like one of the writing, so that nobody waits for this rank
            image = self._ranks.explain(error)
        self._saves_begun += 1
        self._discard.clear()
        self._pending = pending = PendingSave(step, begun)
        job = SaveJob(
            ranks=self._writing,
            identity=self._identity,
            pending=pending,
            plan=plan,
            image=image,
            plain=flat.plain,
            optimizers=optimizers.keys(),
            metrics=numbers,
            finite=flat.finite,
            discard=self._discard,
            report_drift=not self._drift_reported,
        )
        pending.stall_s = time.monotonic() - begun
        self._writer = threading.Thread(target=self._carry_out, args=(job,), name="checkpoint-writer", daemon=True)
        self._writer.start()
        return pending

    def _flatten(
        self, objects: Mapping[str, Any], per_rank: Mapping[str, Any] | None, *, expect: bool = False
    ) -> FlatState:
        """Return what is saved of all objects, see `state.flatten`, or why it cannot be.

        That may be an error of somebody's state_dict, and `make_plan` tells all ranks.

        That it can be restored is checked once for the same objects with the same names: it takes longer than listing them.

        Args:
            expect: with stand-ins for what optimisers will have after their first step.
        """
        try:
            live = state.live_state(objects, per_rank or {}, self._ranks.rank)
            flat = state.flatten(live, expect=expect)
            found = (tuple((key, id(value)) for key, value in live.objects.items()), tuple(flat.tensors))
            if found != self._checked_objects:
                state.check(live)
                self._checked_objects = found
            return flat
        except Exception as error:
            return FlatState(error=self._ranks.explain(error))

    # What becomes of a save.

    @doing(SAVE)
    def wait(self, timeout_s: float | None = None) -> SaveResult | None:
        """Wait for the commit of the save in flight, if there is one.

        Raises:
            CheckpointError: the save failed, on every rank; the older checkpoints are as they were.
        """
        pending = self._pending
        if pending is None:
            return None
        try:
            return pending.result(timeout_s)
        finally:
            if pending.done():
                self._count(pending)

    def _count(self, pending: PendingSave) -> None:
        """Count a save that has ended, once, as a success or as one more failure."""
        self._pending = None
        if pending.error is None:
            self._failures_in_a_row = 0
            self.last_committed_step = pending.step
        elif not isinstance(pending.error, DiscardedError):
            self._failures_in_a_row += 1

    @property
    def last_step(self) -> int | None:
        """The newest step that was saved, is being saved, or was restored."""
        if self._pending is not None and self._pending.error is None:
            return self._pending.step
        return self.last_committed_step

    def wait_staged(self) -> None:
        """Wait until the copy that is written to disk is complete, so that parameters may be changed."""
        self._staging.wait()

    def hurry(self) -> None:
        """Leave everything that a commit does not need to the next incarnation, since the job is to stop.

        That is copies and cleaning up.
        """
        self._hurried.set()

    @doing(SAVE)
    def discard(self) -> None:
        """Give up the save in flight, unless it is already being committed. All ranks call it together."""
        self._discard.set()
        if self._pending is not None:
            self._pending.wait()
            self._count(self._pending)

    def remove_newer(self, step: int) -> None:
        """Remove the checkpoints of later steps than `step`, to which training has gone back. All ranks call it together.

        Copies of them in the mirror are removed, too.
        """
        self._wait_idle()

        def remove() -> int | None:
            check_fence(self.directory, self._identity.incarnation)
            for path in committed(self.directory):
                if step_of(path) > step:
                    remove_checkpoint(path, self._identity.incarnation.order)
            return newest_committed_step(self.directory)

        self.last_committed_step = self._ranks.on_rank_0(remove)
        if self._uploader is not None:
            self._uploader.remove_newer(self._ranks, step)

    def remove_local(self) -> None:
        """Remove the copies on the nodes, since the run has ended or leaves them. All ranks call it together."""
        if self._node_folder is not None:
            self._wait_idle()
            self._ranks.all_do(self._node_folder.remove)

    @doing(SAVE)
    def _wait_idle(self) -> PendingSave | None:
        """Wait until nothing is being written, copied or cleaned up, and return the save that was in flight.

        If it has failed, it is counted, and its state is saved again with the next save.
        """
        self._writer.join()
        ended = self._pending
        if ended is not None:
            self._count(ended)
        return ended

    @doing(SAVE)
    def close(self, grace_s: float | None = None) -> None:
        """Finish the save in flight, and end the thread.

        Args:
            grace_s: None: take as long as it takes, cleaning up included. Otherwise a save that is not
                committed after this many seconds is discarded, and what follows the commit is left to the next
                incarnation.

        Raises:
            CheckpointError: the save in flight failed.
        """
        self._closed = True
        deadline = None if grace_s is None else time.monotonic() + grace_s

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        try:
            if grace_s is not None:
                self.hurry()
                if self._pending is not None and not self._pending.wait(grace_s):
                    self._discard.set()
                    return
            self.wait()
        finally:
            _open.discard(self)
            if self._uploader is not None:
                if grace_s is None:
                    self._writer.join()
                self._uploader.close(self._ranks, left())
            self._writer.join(left())
            if not self._writer.is_alive():
                self._staging.release()
                self._writing.end()

    # The writing thread.

    def _carry_out(self, job: SaveJob) -> None:
        """Write and commit; then do what only the next save waits for."""
        ending: SaveResult | CheckpointError
        try:
            ending = job.write()
        except CheckpointError as error:
            ending = error
        except BaseException as error:  # a bug of ours must not look like a save that never ends
            traceback.print_exc()
            ending = CheckpointError(f"{type(error).__name__}: {error}")
        try:
            if isinstance(ending, CheckpointError) and self._ranks.rank == 0 and not isinstance(ending, DiscardedError):
                what = "the save of step %d failed, older checkpoints are as they were: %s"
                log.warning(what, job.pending.step, ending.message)
            if job.drift and isinstance(ending, SaveResult):
                self._drift_reported = True
                log.warning(job.drift)
            if not isinstance(ending, DiscardedError):
                self._on_ending(ending)  # before anybody who waits for the commit may end the process
        except Exception:  # beside the commit: it must leave nobody waiting
            traceback.print_exc()
        if isinstance(ending, CheckpointError):
            job.pending.set_exception(ending)
            return
        job.pending.set_result(ending)
        self._finish(ending, job)

    def _finish(self, saved: SaveResult, job: SaveJob) -> None:
        """Copy what was committed to the node and to the mirror, and remove what is no longer kept."""
        ranks, in_a_hurry = self._writing, self._hurried.is_set
        unchecked_step = self.unchecked_step  # read first, since it is set last: so the two steps fit
        soundness = Soundness(self.sound_step, unchecked_step)
        if self._node_folder is not None and not in_a_hurry():
            self._copy_to_node(self._node_folder, saved, job)
        try:
            if self._uploader is not None and not any(ranks.sums([in_a_hurry()])):
                self._uploader.offer(ranks, saved.path, soundness)
            if ranks.rank == 0 and not in_a_hurry():
                check_fence(self.directory, self._identity.incarnation)
                found = committed(self.directory)
                for path in retention.unwanted(self.directory, found, self._keep, [saved.step], soundness):
                    remove_checkpoint(path, self._identity.incarnation.order)
        except Exception as error:
            if ranks.rank == 0 and not in_a_hurry():
                log.warning("older checkpoints than %s are kept: %s", saved.path.name, ranks.explain(error).message)

    def _copy_to_node(self, folder: NodeFolder, saved: SaveResult, job: SaveJob) -> None:
        """Copy this rank's file to its node. The first of several errors in a row is reported: training goes on without."""
        assert isinstance(job.image, Image)
        try:
            name, sharers = file_name(self._ranks.rank), self._on_host.size
            # A last save does not wait for it; after an error, which closes, it is what the ranks start again from.
            leaving = lambda: self._hurried.is_set() and not self._closed  # noqa: E731
            folder.write(saved.digest, name, job.image.data, sharers, leaving)
            self._copy_failed = False
        except Exception as error:  # of any kind: what follows is done by all ranks together
            if not self._copy_failed:
                log.warning("step %d was not copied to the node: %s", saved.step, self._ranks.explain(error).message)
            self._copy_failed = True

    # Restoring.

    @doing(RESTORE)
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
            allow: what may differ from the checkpoint, of "keys", "dtypes", "config", "data": tensors that it lacks keep
                their initial values, dtypes are converted.
            as_start: another training starts with `objects` out of the checkpoint `path`, which holds more. Only the
                part of the config that has their names has to agree, and random states stay as they are.

        Returns:
            None when there is no such checkpoint: a fresh start. Never None when `path` is given.

        Raises:
            CheckpointMismatchError: there are checkpoints, but none fits or none is sound.
            CheckpointError: `path` is no checkpoint or is damaged; or tensors are handed in that could not be loaded.
        """
        self._wait_idle()
        restored = Restorer(
            self._ranks,
            self._on_host,
            self._identity,
            self._staging.borrow,
            self._uploader,
            self._node_folder,
            self._changed,
            objects,
            None if as_start else per_rank or {},
            Path(path) if path is not None else None,
            allow,
            as_start,
            at_most,
        ).restore()
        if restored is not None and path is None:
            self.last_committed_step = restored.step
        if restored is None or not as_start:
            self._reserve(objects, per_rank)
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
        return restored

    def _reserve(self, objects: Mapping[str, Any], per_rank: Mapping[str, Any] | None) -> None:
        """Reserve host memory and check the disk space for the first save, before the first step.

        If all state exists already, as after a restore, this is the first save's plan.
        """
        plan = make_plan(self._flatten(objects, per_rank, expect=True), self._ranks, self._plan)
        folder, size, sharers = self._node_folder, plan.data_end, self._on_host.size
        if folder is not None:  # before any rank allocates, while what is left can be seen
            missing = sharers * self._staging.missing_bytes(size)
            self._ranks.all_do(lambda: folder.check_room(size, sharers, missing))
        self._ranks.all_do(lambda: self._staging.prepare(size, sharers=sharers))
        self._plan = plan
        self._ranks.on_rank_0(partial(retention.check_space, self.directory, plan.total_bytes))


def _as_plain(step: object, metrics: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return step and metrics as plain numbers, since numpy's cannot be written into a manifest.

    Raises:
        CheckpointError: one is no number, or the step is below zero, where no reader would find it.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(
            f"step={step!r} is not a number of optimiser steps", hint="give the steps done so far: 0, 1, 2 and so on"
        )
    found = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            raise CheckpointError(f"metrics[{name!r}] is {value!r}, which is no number") from None
    return number, found


_open: set[Checkpointer] = set()  # those that were not closed, even where a script has dropped its own


def _close(checkpointer: Checkpointer, owner: int) -> None:
    """Close the checkpointer at the end of a script that did not wait for its last save."""
    if os.getpid() != owner:
        return  # a forked child inherits this; thread and group are its parent's
    try:
        checkpointer.close()
    except CheckpointError as error:
        checkpointer.lost = error
        show_error(error)
