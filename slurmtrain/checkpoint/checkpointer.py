"""Save and restore of a whole training state by all ranks, under the commit protocol. It knows nothing of the trainer.

To save: objects -> tensors by name and plain JSON (`state`) -> which rank writes what (`save_plan`) -> a copy in host memory
(`staging`) -> training goes on, while a thread (`saving`) does the rest (`writing`): write and digest (`blocks`), check
that nothing is missing (`tensor_index`), commit (`commit`), read back, and remove checkpoints that are no longer kept
(`retention`). To restore: differences are refused (`compatibility`), and everything is verified before it is loaded
(`restore`).
"""

from __future__ import annotations

import atexit
import json
import operator
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from slurmtrain.checkpoint import blocks, commit, compatibility, retention, state
from slurmtrain.checkpoint.commit import Incarnation, Manifest
from slurmtrain.checkpoint.finite import not_finite
from slurmtrain.checkpoint.index_file import check_whole, read_index
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.restore import read_tensors
from slurmtrain.checkpoint.retention import Keep
from slurmtrain.checkpoint.save_plan import OWN, SavePlan, check_types, file_name, make_plan
from slurmtrain.checkpoint.saving import PendingSave, SaveResult, Writer
from slurmtrain.checkpoint.staging import Image, Staging
from slurmtrain.checkpoint.tensor_index import Index
from slurmtrain.checkpoint.writing import CheckpointIdentity, SaveJob
from slurmtrain.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DiscardedError,
    LostPeersError,
    NonFiniteError,
    SupersededError,
    UnreadableError,
    nearest,
)

if TYPE_CHECKING:
    from slurmtrain.checkpoint.mirror_upload import MirrorUploader

VERIFY = ("full", "sampled", "off")
ON_REPLICA_DRIFT = ("refuse", "warn")


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was restored, and why it was chosen.

    Attributes:
        path: folder of the checkpoint.
        step: optimiser steps done.
        incarnation_label: the incarnation that saved it.
        set_aside: what was wrong with newer checkpoints that were set aside.
        asked_for: the caller named this checkpoint.
        left_out: names in the checkpoint that were not restored.
        as_start: another training starts with these weights.
    """

    path: Path
    step: int
    incarnation_label: str
    set_aside: tuple[str, ...] = ()
    asked_for: bool = False
    left_out: tuple[str, ...] = ()  # objects that the checkpoint has and that nobody asked for
    as_start: bool = False  # some of its objects, as the start of another training

    @property
    def sentence(self) -> str:
        if self.as_start:
            return f"beginning at step 0 with a part of {self.path}, of its step {self.step}"
        skipped = f" ({len(self.set_aside)} newer set aside: {'; '.join(self.set_aside)})" if self.set_aside else ""
        why = "as asked for" if self.asked_for else "the newest complete checkpoint"
        left_out = f"; it has more that was not asked for: {', '.join(self.left_out)}" if self.left_out else ""
        return f"resuming at step {self.step} from {self.path.name}, {why}{skipped}{left_out}"


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
        say: prints one line about a restore, a damaged checkpoint or a failed save (rank 0 only).
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
        say: Callable[[str], None] | None = None,
        on_ending: Callable[[SaveResult | CheckpointError], None] = lambda ending: None,
    ):
        if verify not in VERIFY:
            raise CheckpointError(f"verify={verify!r} is not known", hint=nearest(str(verify), VERIFY))
        if on_replica_drift not in ON_REPLICA_DRIFT:
            raise CheckpointError(
                f"on_replica_drift={on_replica_drift!r} is not known",
                hint=nearest(str(on_replica_drift), ON_REPLICA_DRIFT),
            )
        _check_ranks_of_job(group)
        self.directory = Path(directory)
        self._changed = frozenset(changed)
        self._ranks = RankGroup(group)
        values = _as_json(config or {})
        self._keep, self._verify = keep, verify
        self._asynchronous, self._max_failures = asynchronous, max_failures
        self._on_replica_drift = on_replica_drift
        self._say = say or (lambda text: print(f"slurmtrain: {text}", file=sys.stderr, flush=True))
        self._on_ending = on_ending
        self._random = state.RandomState()
        self._staging, self._writer = Staging(), Writer()
        self._plan: SavePlan | None = None
        self._saving: PendingSave | None = None
        self._failures = 0
        self._turn = 0  # saves so far, the same on all ranks
        self._checked: tuple[Any, ...] | None = None  # the objects that were last found restorable
        self._meant: set[str] = set()  # parameters that are not finite and have been so from the beginning
        self._told = False  # that something differs between ranks
        self._last_size = 0
        self.lost: CheckpointError | None = None  # why a save that a script had begun when it ended was lost
        self._last_step: int | None = None
        self._discard, self._hurried, self._closed = threading.Event(), threading.Event(), False

        hosts = self._agree_on_directory()
        # The writing thread's own group: its messages must not meet those of the thread that trains.
        self._writers = self._ranks.own_group()
        self._on_this_host = self._ranks_of_this_host(hosts)
        label = f"pid {os.getpid()} on {socket.gethostname()}"
        claimed = Incarnation.from_json(
            self._ranks.on_rank_0(lambda: commit.claim(self.directory, incarnation, label=label).to_json())
        )
        self._ranks.all_do(lambda: _refuse_a_second(self, incarnation))
        self._bound = CheckpointIdentity(self.directory, claimed, run_id, values)
        self._copying: MirrorUploader | None = None
        if mirror:
            from slurmtrain.checkpoint.mirror_upload import MirrorUploader

            self._copying = MirrorUploader(mirror, self._ranks, self._bound, keep, self._say)
        self._ranks.all_do(self._check_directory_is_shared)
        # Registered to run before Python's own thread pools end, which the writing needs; `atexit` comes after that.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_close, weakref.ref(self), os.getpid())

    # Saving.

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

        Parameters that are trained have to be finite, else the save fails (NonFiniteError) and the older checkpoints stay.
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
        begun = time.monotonic()
        if self._closed:
            raise CheckpointError(f"step {step} cannot be saved: the Checkpointer is closed", hint="make a new one")
        self._end_of_last()
        tensors: dict[str, Tensor] | CheckpointError
        plain: dict[str, Any] = {}
        own = b""
        try:
            step = _step(step)
            measured = _numbers(metrics or {})
            mine = self._own(per_rank)
            tensors, plain = state.flatten(objects)
            own_tensors, own_plain = state.flatten(mine)
            tensors.update(own_tensors)
            self._check_restorable(objects, mine, tensors)
            own = json.dumps(own_plain).encode()
        except Exception as error:  # it may be of somebody's state_dict; the others must hear of it
            tensors = self._ranks.explain(error)
        plan = self._make_plan(tensors, objects)
        assert not isinstance(tensors, CheckpointError)
        if plan is not self._plan:
            self._ranks.all_do(lambda: self._staging.prepare(plan.data_end, sharers=self._on_this_host.size))
            self._plan = plan
        optimizers = {key for key, value in objects.items() if isinstance(value, Optimizer)}
        waiting = state.waiting_optimizers(objects)
        guarded = state.changed_by_optimizers(objects) if self._asynchronous else frozenset[str]()
        image: Image | CheckpointError
        try:
            image = self._staging.stage(plan, tensors, own, guarded=guarded, optimizers=waiting, turn=self._turn)
        except Exception as error:  # handed in like an error of the writing, so that nobody waits for this rank
            image = self._ranks.explain(error)

        self._turn += 1
        saving = self._saving = PendingSave(step, begun)
        self._discard.clear()
        write = SaveJob(
            self._writers,
            self._bound,
            step,
            plan,
            image,
            plain,
            optimizers,
            measured,
            self._discard,
            finite=state.trained_parameters(objects).keys() - self._meant,
            refuse_drift=self._on_replica_drift == "refuse",
            tell=not self._told,
        )
        saving.stall_s = time.monotonic() - begun
        self._writer.submit(
            saving,
            partial(self._write, saving, write),
            partial(self._ended, step=step),
            partial(self._afterwards, saving, write),
        )
        if not self._asynchronous:
            saved = self.wait()
            saving.stall_s = saved.stall_s if saved is not None else 0.0
        return saving

    def wait(self, timeout_s: float | None = None) -> SaveResult | None:
        """Wait for the commit of the save in flight, if there is one.

        Raises:
            CheckpointError: the save failed, on every rank; the older checkpoints are as they were.
        """
        saving = self._saving
        if saving is None:
            return None
        try:
            saved = saving.result(timeout_s)
        finally:
            if saving.done():
                self._count(saving)
        return saved

    def wait_staged(self) -> None:
        """Wait until the copy that is written to disk is complete, so that parameters may be changed."""
        self._staging.wait()

    def hurry(self) -> None:
        """Leave everything that a commit does not need to the next incarnation, since the job is to stop.

        That is reading back and cleaning up.
        """
        self._hurried.set()

    def discard(self) -> None:
        """Give up the save in flight, unless it is already being committed. All ranks call it together."""
        self._discard.set()
        saving = self._saving
        if saving is not None:
            saving.wait()
            self._count(saving)

    @property
    def in_flight(self) -> int | None:
        """The step whose save is neither committed nor failed yet. Ranks may differ for a moment."""
        return self._saving.step if self._saving is not None and not self._saving.done() else None

    @property
    def last_step(self) -> int | None:
        """The newest step that was saved, is being saved, or was restored."""
        if self._saving is not None and self._saving.error is None:
            return self._saving.step
        return self._last_step

    def close(self, grace_s: float | None = None) -> None:
        """Finish the save in flight, and end the thread.

        Args:
            grace_s: None: take as long as it takes, reading back and cleaning up included. Otherwise a save that is not
                committed after this many seconds is discarded, and what follows the commit is left to the next
                incarnation.

        Raises:
            CheckpointError: the save in flight failed.
        """
        self._closed = True
        deadline = None if grace_s is None else time.monotonic() + grace_s

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        if grace_s is not None:
            self.hurry()
        try:
            if self._saving is not None:
                if grace_s is not None and not self._saving.wait(grace_s):
                    self._discard.set()
                else:
                    self.wait()
        finally:
            if self._copying is not None:
                if grace_s is None:
                    self._writer.wait_idle()
                self._copying.close(self._ranks, left())
            if self._writer.stop(left()):
                self._staging.release()
                self._writers.end()
                if self._on_this_host is not self._ranks:
                    self._on_this_host.end()
            _open.pop((str(self.directory.absolute()), self._bound.incarnation.order), None)

    def _end_of_last(self) -> None:
        """Wait for the save in flight, and count it if it failed: its state is saved again with the next save."""
        self._writer.wait_idle()
        if self._saving is None:
            return
        step = self._saving.step
        try:
            self.wait()
        except LostPeersError:
            raise  # their group cannot be used any more; another attempt has a new one
        except SupersededError:
            raise  # no later save can be committed either
        except CheckpointError as error:
            if self._max_failures and self._failures >= self._max_failures:
                kind = NonFiniteError if isinstance(error, NonFiniteError) else CheckpointError
                raise kind(
                    f"{self._failures} saves in a row have failed, the last of step {step}: {error.message}",
                    hint=error.hint or "checkpoint.max_failures says how many are put up with",
                ) from None

    def _count(self, saving: PendingSave) -> None:
        """Count a save that has ended, once, as a success or as one more failure."""
        self._saving = None
        if saving.error is None:
            self._failures = 0
            self._last_step = saving.step
        elif not isinstance(saving.error, DiscardedError):
            self._failures += 1

    def _check_restorable(self, objects: Mapping[str, Any], own: Mapping[str, Any], tensors: Collection[str]) -> None:
        """Check that the objects can be restored, once for the same objects with the same names.

        The check takes longer than listing the objects.
        """
        found = (tuple((key, id(value)) for key, value in {**objects, **own}.items()), tuple(tensors))
        if found != self._checked:
            state.check(objects, own)
            self._checked = found

    def _make_plan(self, tensors: dict[str, Tensor] | CheckpointError, objects: Mapping[str, Any]) -> SavePlan:
        return make_plan(
            tensors,
            self._ranks,
            self._plan,
            of_first=lambda: state.buffers(objects),
            not_compared=lambda: state.broadcast_buffers(objects),
            lowest_writes=self._on_replica_drift == "warn",
        )

    def _own(self, per_rank: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return this rank's own objects, by names that mark them as such."""
        if per_rank and "random" in per_rank:
            raise CheckpointError("per_rank has an object 'random', a name that is taken", hint="choose another")
        return {OWN + key: value for key, value in {"random": self._random, **(per_rank or {})}.items()}

    # Called by the writing thread.

    def _write(self, saving: PendingSave, write: SaveJob) -> SaveResult:
        path, size = write.write(self._last_size)
        if write.told and not self._told:
            self._told = True
            self._say(write.told)
        self._last_size = size
        seconds = time.monotonic() - saving.begun
        return SaveResult(
            path, saving.step, seconds, saving.stall_s + write.waited_s if self._asynchronous else seconds, size
        )

    def _afterwards(self, saving: PendingSave, write: SaveJob) -> None:
        """Read back what was committed; if it is sound, remove checkpoints that are no longer kept."""
        path = saving.result().path
        try:
            contents = self._verify != "off"
            damage = write.read_back(path, contents=contents, in_a_hurry=self._hurried.is_set)
            if damage and self._writers.rank == 0:
                self._say(f"{path.name} is not what was written and was set aside: {'; '.join(damage)}")
            if damage == []:
                if self._copying is not None and not self._writers.maximum(int(self._hurried.is_set())):
                    self._copying.offer(self._writers, path, write.names)
                self._writers.on_rank_0(lambda: self._prune(saving.step))
        except CheckpointError as error:
            if self._writers.rank == 0 and not self._hurried.is_set():
                self._say(f"older checkpoints than {path.name} are kept: {error.message}")

    def _prune(self, saved: int) -> None:
        if not self._hurried.is_set():
            commit.check_fence(self.directory, self._bound.incarnation)
            retention.prune(self.directory, self._keep, self._bound.incarnation.order, spare=[saved])

    def _ended(self, ending: SaveResult | CheckpointError, step: int) -> None:
        if isinstance(ending, DiscardedError):
            return
        if isinstance(ending, CheckpointError) and self._asynchronous and self._ranks.rank == 0:
            self._say(f"the save of step {step} failed, older checkpoints are as they were: {ending.message}")
        self._on_ending(ending)

    # Restoring.

    def restore(
        self,
        *,
        path: Path | str | None = None,
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
            allow: what may differ from the checkpoint, of "keys", "shapes", "dtypes", "config": tensors that do not fit
                keep their initial values, dtypes are converted.
            as_start: another training starts with `objects` out of the checkpoint `path`, which holds more. Only the
                part of the config that has their names has to agree, and random states stay as they are.

        Returns:
            None when there is no checkpoint: a fresh start. Never None when `path` is given.

        Raises:
            CheckpointMismatchError: there are checkpoints, but none fits or none is sound.
            CheckpointError: `path` is no checkpoint or is damaged.
        """
        compatibility.check_allowed(allow)
        if self._saving is not None:
            with suppress(CheckpointError):  # the error has been reported
                self.wait()
        self._writer.wait_idle()
        begins = self._ranks.all_do(lambda: not_finite(state.trained_parameters(objects)))
        restored = self._restore(path, allow, objects, per_rank, as_start=as_start)
        # What was not finite before anything was trained is meant to be so, unless only the restore has filled it.
        if self._ranks.maximum(int(bool(begins))):
            self._meant |= begins & self._ranks.all_do(lambda: not_finite(state.trained_parameters(objects)))
        return restored

    def _restore(
        self,
        path: Path | str | None,
        allow: Collection[str],
        objects: Mapping[str, Any],
        per_rank: Mapping[str, Any] | None,
        *,
        as_start: bool,
    ) -> Restored | None:
        own = {} if as_start else self._own(per_rank)
        set_aside: list[str] = []
        fetched: dict[Path, str] = {}
        while True:
            told = self._ranks.on_rank_0(partial(self._told_choice, path))
            if told is None:
                copy = self._copying.fetch(self._ranks) if self._copying is not None else None
                if copy is not None:
                    fetched[copy[0]] = copy[1]
                    continue
                # An attempt before this one may have set them aside and failed; this one must not start afresh either.
                set_aside = set_aside or self._ranks.on_rank_0(self._damaged)
                if set_aside:
                    raise CheckpointMismatchError(
                        f"every checkpoint in {self.directory} is damaged: {'; '.join(set_aside)}",
                        hint="look at the *.damaged-* folders; delete them to start afresh",
                    )
                self._reserve(objects, per_rank)
                return None
            chosen, text, digest, damage = Path(told[0]), *told[1:]
            manifest = None
            if not damage:
                manifest = commit.parse_manifest(chosen, text, digest)
                with retention.reading(chosen):
                    damage = self._load(
                        chosen, manifest, objects, own, allow, asked_for=path is not None, as_start=as_start
                    )
            if not damage:
                break
            if path is not None:
                raise CheckpointError(
                    f"{chosen} was asked for and is damaged: {'; '.join(damage)}", hint="name another checkpoint"
                )
            self._ranks.on_rank_0(partial(self._set_aside, chosen, fetched.get(chosen), damage))
            set_aside.append(f"{chosen.name}: {damage[0]}")
            if self._ranks.rank == 0:
                self._say(f"{chosen.name} is damaged and was set aside: {'; '.join(damage)}")
        assert manifest is not None
        if path is None:
            self._last_step = manifest.step
        if not as_start:
            self._last_size = manifest.size
            self._reserve(objects, per_rank)
        left_out = sorted(state.object_names(manifest.tensors, manifest.state) - objects.keys())
        restored = Restored(
            chosen,
            manifest.step,
            manifest.incarnation_label,
            tuple(set_aside),
            path is not None,
            tuple(left_out),
            as_start,
        )
        if self._ranks.rank == 0:
            self._say(restored.sentence)
        return restored

    def _set_aside(self, path: Path, copy: str | None, damage: list[str]) -> None:
        commit.set_aside(path)
        if copy is not None and self._copying is not None:  # it would be fetched again
            self._copying.set_aside(copy, "; ".join(damage))

    def _damaged(self) -> list[str]:
        return commit.damaged(self.directory) + (self._copying.damaged() if self._copying is not None else [])

    def _told_choice(self, asked: Path | str | None) -> list[Any] | None:
        """Return what `_choose` says, on rank 0, as plain values: path, manifest, its digest, damage."""
        found = self._choose(asked)
        return None if found is None else [str(found[0]), *found[1], found[2]]

    def _choose(self, asked: Path | str | None) -> tuple[Path, tuple[bytes, str], list[str]] | None:
        """Choose, on rank 0, the checkpoint to read.

        Return its path, its manifest so that all ranks see the same, and what is wrong with it.
        """
        if asked is not None:
            path = Path(asked)
            if not path.is_dir():
                raise CheckpointError(
                    f"{path} was asked for and is not there", hint="`checkpoints RUN list` shows what is"
                )
        else:
            with suppress(OSError):
                commit.refresh(self.directory)
            for unseen in blocks.patiently(partial(commit.late, self.directory), self.directory):
                with suppress(OSError):
                    commit.refresh(unseen)
            candidates = blocks.patiently(partial(commit.committed, self.directory), self.directory)
            if not candidates:
                return None
            path = candidates[-1]
        try:
            texts = commit.read_manifest_bytes(path, patient=True)
            manifest = commit.parse_manifest(path, *texts)
        except (CheckpointMismatchError, UnreadableError):
            raise
        except CheckpointError as error:
            return path, (b"", ""), [error.message]
        with blocks.threads() as pool:
            damage = blocks.find_damage(path, manifest.files.items(), pool, contents=False, patient=True)
        if not damage:
            try:
                check_whole(path, manifest, read_index(path, manifest, patient=True))
            except UnreadableError:
                raise
            except CheckpointError as error:
                damage = [error.message]
        return path, texts, damage

    def _load(
        self,
        path: Path,
        manifest: Manifest,
        objects: Mapping[str, Any],
        own: Mapping[str, Any],
        allow: Collection[str],
        *,
        asked_for: bool,
        as_start: bool,
    ) -> list[str]:
        """Fill `objects`, unless the checkpoint is damaged: then return what is wrong, and touch nothing."""
        if not asked_for:
            hint = f"move it away, or start from it on purpose: checkpoint.restore_from={path}"
            self._bound.check_run(path, manifest, hint=hint)
        index = self._ranks.all_do(lambda: self._read_index(path, manifest))
        own_file = file_name(self._ranks.rank)
        own_there = own_file in index.tables and not as_start
        wanted = self._ranks.all_do(lambda: compatibility.names_of(objects))
        everywhere = wanted
        if self._ranks.maximum(int(bool(compatibility.of_modules(objects, index.facts) - wanted))):
            everywhere = set().union(*self._ranks.gather(lambda: sorted(wanted)))

        def fitting() -> dict[str, Tensor]:
            saved, here = manifest.config, self._bound.config
            if as_start:
                saved, here = ({key: config[key] for key in objects if key in config} for config in (saved, here))
            compatibility.check_config(path, saved, here, allow, changed=self._changed, asked_for=asked_for)
            facts = index.facts
            alone = compatibility.check_names(path, objects, wanted, everywhere, facts, manifest.state, allow)
            useful = {name: fact for name, fact in facts.items() if name not in alone}
            found = compatibility.check_tensors(path, objects, state.templates(objects, useful), facts, allow)
            if own_there:
                mine = index.own_facts(own_file)
                names = compatibility.names_of(own)
                compatibility.check_names(path, own, names, names, mine, None, allow)
                found.update(compatibility.check_tensors(path, own, state.templates(own, mine), mine, allow))
            return found

        targets = self._ranks.all_do(fitting)
        damage, own_plain = read_tensors(
            path,
            index,
            manifest.files,
            targets,
            own_file if own_there else None,
            live=wanted | compatibility.names_of(own),
            ranks=self._ranks,
            on_this_host=self._on_this_host,
            mode=self._verify,
            buffer=self._staging.borrow,
        )
        if damage:
            return damage

        def put_back() -> None:
            state.put_back(objects, targets, manifest.state, lenient="keys" in allow, convert="dtypes" in allow)
            state.put_back(own, targets, own_plain, lenient=True)

        self._ranks.all_do(put_back)
        return []

    def _read_index(self, path: Path, manifest: Manifest) -> Index:
        if self._ranks.rank != 0:
            commit.wait_until_visible(path / commit.INDEX)
        index = read_index(path, manifest, patient=True)
        check_types(index.catalogues)
        return index

    def _reserve(self, objects: Mapping[str, Any], per_rank: Mapping[str, Any] | None) -> None:
        """Reserve host memory and check the disk space for the first save, before the first step."""

        def expect() -> dict[str, Tensor]:
            own = self._own(per_rank)
            tensors, _ = state.flatten({**objects, **own})
            self._check_restorable(objects, own, tensors)
            return {**tensors, **state.expected_optimizer_state(objects)}

        expected = self._ranks.all_do(expect)
        # If all state exists already, as after a restore, this is the first save's plan.
        plan = self._plan = self._make_plan(expected, objects)
        self._ranks.all_do(lambda: self._staging.prepare(plan.data_end, sharers=self._on_this_host.size))
        size = max(self._last_size, plan.total_bytes)
        self._ranks.on_rank_0(lambda: commit.check_space(self.directory, size))

    # The hosts of the ranks.

    def _agree_on_directory(self) -> list[str]:
        """Check that all ranks were given the same directory, and return the host of every rank."""
        answers = self._ranks.gather(lambda: [str(self.directory.absolute()), socket.gethostname()])
        first = answers[0][0]
        for rank, (directory, _) in enumerate(answers):
            if directory != first:
                raise CheckpointError(
                    f"rank {rank} was told to save in {directory}, rank 0 in {first}",
                    hint="derive the directory once, on rank 0, and tell the others (a time stamp differs between ranks)",
                )
        return [host for _, host in answers]

    def _check_directory_is_shared(self) -> None:
        path = commit.claim_of(self.directory, self._bound.incarnation)
        commit.wait_until_visible(path)
        if not path.exists():
            raise CheckpointError(
                f"rank {self._ranks.rank} on {socket.gethostname()} does not see what rank 0 has written in {self.directory}",
                hint="checkpoints need a directory that all nodes share",
            )

    def _ranks_of_this_host(self, hosts: list[str]) -> RankGroup:
        own = socket.gethostname()
        if len(set(hosts)) == 1:
            return self._ranks
        members = [rank for rank, host in enumerate(hosts) if host == own]
        return self._ranks.subgroup(members)


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
            f"step={step!r} is no number of optimiser steps", hint="give the steps done so far: 0, 1, 2 and so on"
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


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the form that a checkpoint will give it back: tuples as lists, keys as text."""
    try:
        values: dict[str, Any] = json.loads(json.dumps(config))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"config= cannot be written into a checkpoint: {error}", hint="give plain values"
        ) from None
    return values


def _check_ranks_of_job(group: dist.ProcessGroup | None) -> None:
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
            f"this job has {stated} ranks, but the process group that saves has {have}",
            hint="initialise torch.distributed in every rank before the Checkpointer is made (slurmtrain.init() does)",
        )


# Open checkpointers by directory and incarnation: two of one incarnation would delete each other's files.
_open: weakref.WeakValueDictionary[tuple[str, int], Checkpointer] = weakref.WeakValueDictionary()


def _refuse_a_second(checkpointer: Checkpointer, incarnation: Incarnation | None) -> None:
    if incarnation is None:
        return
    key = (str(checkpointer.directory.absolute()), incarnation.order)
    if key in _open:
        raise CheckpointError(
            f"{checkpointer.directory} has a Checkpointer in this process already",
            hint="save everything through one: save(step, model=..., other=...); or close() the first",
        )
    _open[key] = checkpointer


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
            print(f"slurmtrain: error: {error}", file=sys.stderr, flush=True)
