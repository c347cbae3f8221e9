"""The way of a save: objects -> tensors by name and plain JSON -> plan -> copy in host memory -> the writing thread.

At most one save is in flight. How each ends is counted: it is an error to train on when several in a row have failed.
"""

from __future__ import annotations

import json
import logging
import operator
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from slurmtrain.checkpoint import module_state, optimizer_state, state
from slurmtrain.checkpoint.format.directory import committed, newest_committed_step, step_of
from slurmtrain.checkpoint.format.directory import remove as remove_checkpoint
from slurmtrain.checkpoint.node_copies.copies import NodeCopies
from slurmtrain.checkpoint.node_copies.save import NodesDestination
from slurmtrain.checkpoint.ranks import RankGroups
from slurmtrain.checkpoint.save.background_thread import BackgroundThread
from slurmtrain.checkpoint.save.destination import Destination, SharedDestination
from slurmtrain.checkpoint.save.job import SaveJob, StagedState
from slurmtrain.checkpoint.save.pending_save import PendingSave, SaveResult
from slurmtrain.checkpoint.save.plan import SavePlan, make_plan
from slurmtrain.checkpoint.save.staging import Image, Staging
from slurmtrain.checkpoint.store import commit, retention
from slurmtrain.checkpoint.store.fencing import check_fence
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.checkpoint.store.shared_directory import CheckpointIdentity
from slurmtrain.errors import CheckpointError, DiscardedError, LostPeersError, NonFiniteError, SupersededError

if TYPE_CHECKING:
    from slurmtrain.checkpoint.store.mirror_upload import MirrorUploader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveSettings:
    """The rules for saving; see `Checkpointer`.

    Attributes:
        read_back: compare the contents of a new checkpoint with their digests before older ones are removed.
        refuse_drift: fail when ranks differ that should hold the same; else report it.
    """

    keep: Keep
    read_back: bool
    asynchronous: bool
    max_failures: int
    refuse_drift: bool
    on_ending: Callable[[SaveResult | CheckpointError], None]


@dataclass(frozen=True)
class FlatState:
    """A state after `step` optimiser steps, flattened.

    Attributes:
        tensors: by name, those that each rank has for itself included.
        plain: JSON of everything else that is the same on all ranks, by object.
        own: JSON of what this rank has for itself and is no tensor.
        metrics: metrics of this step.
    """

    step: int
    tensors: dict[str, Tensor]
    plain: dict[str, Any]
    own: bytes
    metrics: dict[str, float]


class SavePipeline:
    """The saves of one Checkpointer, one after another. All ranks call `save`, `discard` and `reserve` together.

    Attributes:
        last_committed_step: step of the last checkpoint that was committed or restored.
        non_finite_from_start: parameters that were not finite before anything was trained: they may stay so.
        soundness: set by the training thread, read by the one that writes: as a whole, so that its two steps fit.
    """

    def __init__(
        self,
        groups: RankGroups,
        identity: CheckpointIdentity,
        staging: Staging,
        mirror_uploader: MirrorUploader | None,
        node_copies: NodeCopies | None,
        settings: SaveSettings,
    ):
        self._node_copies = node_copies
        self._node_failure = ""  # why the last copy on the nodes failed, so that it is reported once
        self._groups, self._ranks, self._identity = groups, groups.training, identity
        self._staging, self._mirror_uploader, self._settings = staging, mirror_uploader, settings
        self._thread = BackgroundThread("checkpoint-writer")
        self._discard, self._hurried, self._closed = threading.Event(), threading.Event(), False
        self._pending: PendingSave | None = None
        self._plan: SavePlan | None = None
        self._checked_objects: tuple[Any, ...] | None = None  # those that were last found restorable
        self._saves_begun = 0  # the same on all ranks
        self._failures_in_a_row = 0
        self._drift_reported = False
        self._last_size = 0  # bytes of the newest checkpoint
        self.last_committed_step: int | None = None
        self.non_finite_from_start: set[str] = set()
        self.soundness = retention.UNKNOWN_SOUNDNESS

    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        per_rank: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        *,
        on_nodes_only: bool = False,
    ) -> PendingSave:
        """Begin a save; see `Checkpointer.save` and `Checkpointer.save_local`."""
        begun = time.monotonic()
        if self._closed:
            raise CheckpointError(f"step {step} cannot be saved: the Checkpointer is closed", hint="create a new one")
        self._end_previous()
        flat: FlatState | CheckpointError
        try:
            flat = self._flatten(step, objects, per_rank, metrics)
        except Exception as error:  # it may be of somebody's state_dict; the others must hear of it
            flat = self._ranks.explain(error)
        plan = self._make_plan(flat if isinstance(flat, CheckpointError) else flat.tensors, objects)
        assert not isinstance(flat, CheckpointError)
        if plan is not self._plan:
            self._prepare_buffer(plan, training=True)
            self._plan = plan
        image = self._stage(plan, flat, objects)
        self._saves_begun += 1
        pending = self._pending = PendingSave(flat.step, begun, on_nodes_only=on_nodes_only)
        self._discard.clear()
        staged = StagedState(
            flat.step,
            plan,
            image,
            flat.plain,
            optimizers={key for key, value in objects.items() if isinstance(value, Optimizer)},
            metrics=flat.metrics,
            finite=(module_state.trained_parameters(objects).keys() | optimizer_state.optimizer_tensors(objects))
            - self.non_finite_from_start,
        )
        pending.stall_s = time.monotonic() - begun
        self._thread.run(lambda: self._carry_out(staged, pending))
        if not self._settings.asynchronous:
            saved = self.wait()
            pending.stall_s = saved.stall_s if saved is not None else time.monotonic() - begun
        return pending

    def reserve(
        self, objects: Mapping[str, Any], per_rank: Mapping[str, Any] | None, *, restored_size: int | None
    ) -> None:
        """Reserve host memory and check the disk space for the first save, before the first step.

        Args:
            restored_size: bytes of the checkpoint that was restored, if any.
        """

        def expect() -> dict[str, Tensor]:
            own_objects = state.per_rank_objects(per_rank)
            tensors, _ = state.flatten({**objects, **own_objects})
            self._check_restorable(objects, own_objects, tensors)
            return {**tensors, **optimizer_state.expected_optimizer_state(objects)}

        if restored_size is not None:
            self._last_size = restored_size
        expected = self._ranks.all_do(expect)
        # If all state exists already, as after a restore, this is the first save's plan.
        plan = self._plan = self._make_plan(expected, objects)
        self._prepare_buffer(plan, training=False)
        size = max(self._last_size, plan.total_bytes)
        self._ranks.on_rank_0(lambda: commit.check_space(self._identity.directory, size))

    # How a save ends.

    def wait(self, timeout_s: float | None = None) -> SaveResult | None:
        """Wait for the commit of the save in flight, if there is one; see `Checkpointer.wait`."""
        pending = self._pending
        if pending is None:
            return None
        if pending.on_nodes_only:
            if pending.wait(timeout_s):
                self._pending = None
            if isinstance(pending.error, (LostPeersError, SupersededError)):
                raise pending.error
            return None  # whatever else has become of it: it has been reported, and is no checkpoint of the directory
        try:
            saved = pending.result(timeout_s)
        finally:
            if pending.done():
                self._count(pending)
        return saved

    def wait_idle(self) -> None:
        """Wait until nothing is being written, read back or cleaned up; how the save in flight ends has been reported."""
        if self._pending is not None:
            with suppress(CheckpointError):
                self.wait()
        self._thread.wait_idle()

    def wait_staged(self) -> None:
        """Wait until the copy that is written to disk is complete."""
        self._staging.wait()

    def remove_newer(self, step: int) -> None:
        """Remove the checkpoints of later steps than `step`, here and in the mirror; see `Checkpointer.remove_newer`."""
        self.wait_idle()

        def remove() -> int | None:
            identity = self._identity
            check_fence(identity.directory, identity.incarnation)
            for path in committed(identity.directory):
                if step_of(path) > step:
                    remove_checkpoint(path, identity.incarnation.order)
            return newest_committed_step(identity.directory)

        self.last_committed_step = self._ranks.on_rank_0(remove)  # not that of a copy on the nodes
        if self._mirror_uploader is not None:
            self._mirror_uploader.remove_newer(self._ranks, step)

    def hurry(self) -> None:
        """Leave everything that a commit does not need to the next incarnation."""
        self._hurried.set()

    def discard(self) -> None:
        """Give up the save in flight, unless it is already being committed."""
        self._discard.set()
        pending = self._pending
        if pending is not None:
            pending.wait()
            self._count(pending)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, read back or cleaned up. Ranks may differ for a moment."""
        return self._thread.idle

    @property
    def in_flight(self) -> int | None:
        """The step whose save is neither committed nor failed yet."""
        return self._pending.step if self._pending is not None and not self._pending.done() else None

    @property
    def last_step(self) -> int | None:
        """The newest step that was saved, is being saved, or was restored."""
        if self._pending is not None and self._pending.error is None and not self._pending.on_nodes_only:
            return self._pending.step
        return self.last_committed_step

    def close(self, grace_s: float | None) -> None:
        """Finish the save in flight, and end the thread; see `Checkpointer.close`."""
        self._closed = True
        deadline = None if grace_s is None else time.monotonic() + grace_s

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        if grace_s is not None:
            self.hurry()
        try:
            if self._pending is not None:
                if grace_s is not None and not self._pending.wait(grace_s):
                    self._discard.set()
                else:
                    self.wait()
        finally:
            if self._mirror_uploader is not None:
                if grace_s is None:
                    self._thread.wait_idle()
                self._mirror_uploader.close(self._ranks, left())
            if self._thread.stop(left()):
                self._staging.release()
                self._groups.end()

    def _end_previous(self) -> None:
        """Wait for the save in flight, and count it if it failed: its state is saved again with the next save."""
        self._thread.wait_idle()
        if self._pending is None:
            return
        if self._pending.on_nodes_only:
            self.wait()
            return
        step, most = self._pending.step, self._settings.max_failures
        try:
            self.wait()
        except LostPeersError:
            raise  # their group cannot be used any more; another attempt has a new one
        except SupersededError:
            raise  # no later save can be committed either
        except CheckpointError as error:
            if most and self._failures_in_a_row >= most:
                kind = NonFiniteError if isinstance(error, NonFiniteError) else CheckpointError
                raise kind(
                    f"{self._failures_in_a_row} saves in a row have failed, the last of step {step}: {error.message}",
                    hint=error.hint or "checkpoint.max_failures says how many are put up with",
                ) from None

    def _count(self, pending: PendingSave) -> None:
        """Count a save that has ended, once, as a success or as one more failure."""
        self._pending = None
        if pending.on_nodes_only:
            return
        if pending.error is None:
            self._failures_in_a_row = 0
            self.last_committed_step = pending.step
        elif not isinstance(pending.error, DiscardedError):
            self._failures_in_a_row += 1

    # From objects to the copy in host memory.

    def _flatten(
        self,
        step: int,
        objects: Mapping[str, Any],
        per_rank: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
    ) -> FlatState:
        step, numbers = _step(step), _numbers(metrics or {})
        own_objects = state.per_rank_objects(per_rank)
        tensors, plain = state.flatten(objects)
        own_tensors, own_plain = state.flatten(own_objects)
        tensors.update(own_tensors)
        self._check_restorable(objects, own_objects, tensors)
        return FlatState(step, tensors, plain, json.dumps(own_plain).encode(), numbers)

    def _check_restorable(
        self, objects: Mapping[str, Any], own_objects: Mapping[str, Any], tensors: Collection[str]
    ) -> None:
        """Check that the objects can be restored, once for the same objects with the same names.

        The check takes longer than listing the objects.
        """
        found = (tuple((key, id(value)) for key, value in {**objects, **own_objects}.items()), tuple(tensors))
        if found != self._checked_objects:
            state.check(objects, own_objects)
            self._checked_objects = found

    def _make_plan(self, tensors: dict[str, Tensor] | CheckpointError, objects: Mapping[str, Any]) -> SavePlan:
        return make_plan(
            tensors,
            self._ranks,
            self._plan,
            of_first=lambda: module_state.buffers(objects),
            not_compared=lambda: module_state.broadcast_buffers(objects),
            lowest_writes=not self._settings.refuse_drift,
        )

    def _prepare_buffer(self, plan: SavePlan, *, training: bool) -> None:
        if self._node_copies is not None:  # before the buffer is allocated, while what is left can be seen
            staging_bytes = None if training else self._staging.missing_bytes(plan.data_end)
            self._node_copies.expect(self._ranks, plan.data_end, staging_bytes)
        self._ranks.all_do(lambda: self._staging.prepare(plan.data_end, sharers=self._groups.on_host.size))

    def _stage(self, plan: SavePlan, flat: FlatState, objects: Mapping[str, Any]) -> Image | CheckpointError:
        """Begin the copy. An error is handed in like one of the writing, so that nobody waits for this rank."""
        optimizers = optimizer_state.waiting_optimizers(objects)
        guarded = optimizer_state.changed_by_optimizers(objects) if self._settings.asynchronous else frozenset[str]()
        try:
            return self._staging.stage(
                plan, flat.tensors, flat.own, guarded=guarded, optimizers=optimizers, turn=self._saves_begun
            )
        except Exception as error:
            return self._ranks.explain(error)

    # Called by the writing thread.

    def _job(self, staged: StagedState, destination: Destination) -> SaveJob:
        return SaveJob(
            self._groups.writing,
            self._identity,
            staged,
            destination,
            self._discard,
            refuse_drift=self._settings.refuse_drift,
            report_drift=not self._drift_reported,
        )

    def _carry_out(self, staged: StagedState, pending: PendingSave) -> None:
        """Write and commit; then do what only the next save waits for."""
        if pending.on_nodes_only:
            assert self._node_copies is not None
            pending.decide(self._copy_to_nodes(self._node_copies, staged, pending))
            return
        job = self._job(staged, SharedDestination(self._identity))
        ending: SaveResult | CheckpointError
        try:
            ending = self._write(job, pending)
        except CheckpointError as error:
            ending = error
        except BaseException as error:  # a bug of ours must not look like a save that never ends
            traceback.print_exc()
            ending = CheckpointError(f"{type(error).__name__}: {error}")
        # What fails after the commit must not end the thread, or the next save would never end.
        try:
            self._report(ending, pending.step)  # before anybody who waits for the commit may end the process
        except Exception:
            traceback.print_exc()
        pending.decide(ending)
        if self._node_copies is not None and not isinstance(ending, (LostPeersError, SupersededError, DiscardedError)):
            self._copy_to_nodes_too(self._node_copies, staged, pending)
        if isinstance(ending, SaveResult):
            try:
                self._finish(job, ending)
            except Exception:
                traceback.print_exc()

    def _copy_to_nodes_too(self, copies: NodeCopies, staged: StagedState, pending: PendingSave) -> None:
        """Make a copy on the nodes of what was just saved, unless the ranks are about to leave them."""
        try:
            if self._groups.writing.maximum(int(self._hurried.is_set())):
                return
        except CheckpointError:  # the ranks have lost each other: the next save says so
            return
        self._copy_to_nodes(copies, staged, pending)

    def _copy_to_nodes(
        self, copies: NodeCopies, staged: StagedState, pending: PendingSave
    ) -> SaveResult | CheckpointError:
        """Make a copy on the nodes, and report an error: training goes on without."""
        try:
            job = self._job(staged, NodesDestination(copies))
            path, size = job.write(0)
            seconds = time.monotonic() - pending.begun
            stall_s = pending.stall_s + job.waited_s if self._settings.asynchronous else seconds
            self._node_failure = ""
            return SaveResult(path, pending.step, seconds, stall_s, size)
        except CheckpointError as error:
            if self._ranks.rank == 0 and error.message != self._node_failure and not isinstance(error, DiscardedError):
                self._node_failure = error.message
                log.warning("step %d was not copied to the nodes: %s", pending.step, error.message)
            return error
        except BaseException as error:  # a bug of ours must not look like a save that never ends
            traceback.print_exc()
            return CheckpointError(f"{type(error).__name__}: {error}")

    def _write(self, job: SaveJob, pending: PendingSave) -> SaveResult:
        path, self._last_size = job.write(self._last_size)
        if job.drift and not self._drift_reported:
            self._drift_reported = True
            log.warning(job.drift)
        seconds = time.monotonic() - pending.begun
        stall_s = pending.stall_s + job.waited_s if self._settings.asynchronous else seconds
        return SaveResult(path, pending.step, seconds, stall_s, self._last_size)

    def _report(self, ending: SaveResult | CheckpointError, step: int) -> None:
        if isinstance(ending, DiscardedError):
            return
        if isinstance(ending, CheckpointError) and self._settings.asynchronous and self._ranks.rank == 0:
            log.warning("the save of step %d failed, older checkpoints are as they were: %s", step, ending.message)
        self._settings.on_ending(ending)

    def _finish(self, job: SaveJob, saved: SaveResult) -> None:
        """Read back what was committed; if it is sound, copy it to the mirror and remove what is no longer kept."""
        ranks, path = self._groups.writing, saved.path
        try:
            damage = job.read_back(path, contents=self._settings.read_back, in_a_hurry=self._hurried.is_set)
            if damage and ranks.rank == 0:
                log.warning("%s is not what was written and was set aside: %s", path.name, "; ".join(damage))
            if damage == []:
                if self._mirror_uploader is not None:
                    self._mirror_uploader.soundness = self.soundness
                if self._mirror_uploader is not None and not ranks.maximum(int(self._hurried.is_set())):
                    self._mirror_uploader.offer(ranks, path, job.names)
                ranks.on_rank_0(lambda: self._prune(saved.step))
        except CheckpointError as error:
            if ranks.rank == 0 and not self._hurried.is_set():
                log.warning("older checkpoints than %s are kept: %s", path.name, error.message)

    def _prune(self, saved_step: int) -> None:
        if not self._hurried.is_set():
            check_fence(self._identity.directory, self._identity.incarnation)
            order = self._identity.incarnation.order
            directory, keep = self._identity.directory, self._settings.keep
            retention.prune(directory, keep, order, spare=[saved_step], soundness=self.soundness)


def _step(step: object) -> int:
    """Return `step` as a plain int, since numpy's numbers cannot be written into a manifest.

    Raises:
        CheckpointError: it is no number, or below zero, where no reader would find it.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(
            f"step={step!r} is not a number of optimiser steps", hint="give the steps done so far: 0, 1, 2 and so on"
        )
    return number


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            raise CheckpointError(f"metrics[{name!r}] is {value!r}, which is no number") from None
    return found
