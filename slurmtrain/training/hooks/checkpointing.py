"""Checkpoints of a training: what it begins from, when it saves, and the last save before the process ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.restore.restorer import Restored
from slurmtrain.checkpoint.save.job import DRAIN_S, PendingSave, SaveResult
from slurmtrain.checkpoint.save.schedule import Interval, SaveSchedule, is_better_discarded
from slurmtrain.choices import RestoreOnly
from slurmtrain.config.schema import CheckpointConfig
from slurmtrain.errors import ConfigError
from slurmtrain.observe.phases import Phase
from slurmtrain.training.agreement import StopPlanner
from slurmtrain.training.hooks.base import TrainingHook, TrainingState


class Checkpointing(TrainingHook):
    """Restores before the first step, saves when it is due, and a last time before the process ends. On all ranks.

    It comes after the hooks that may ask for a save, and after evaluation, whose metrics a checkpoint has.

    Attributes:
        schedule: when this rank wants the next checkpoint.
        pending_save: the save in flight, until its end is noted; None: none is.

    Args:
        checkpointer: writes and reads the checkpoints of the run.
        config: when to save, and what to begin from.
        mtbf_s: for checkpoint.auto, mean seconds between failures of the whole job.
        planner: rank 0's, who knows when the job is killed; None: nobody knows.
        pretrained: fills a model with weights of other programs, when there is no checkpoint; None: there are none.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        *,
        mtbf_s: float = math.inf,
        planner: StopPlanner | None = None,
        pretrained: Callable[[nn.Module], Restored] | None = None,
    ):
        self._checkpointer, self._config, self._planner = checkpointer, config, planner
        self._pretrained = pretrained
        self._interval, self._mtbf_s = Interval(config.every_steps, config.every_minutes, config.auto), mtbf_s
        self.pending_save: PendingSave | None = None
        self._longest_save_s: float | None = None  # of this attempt
        self.schedule: SaveSchedule

    def load(self, state: TrainingState) -> None:
        """Load what this attempt begins from into `state.objects()`, and set `state.restored`."""
        with _settings_kept(state.optimizer):
            state.restored = self._checkpointer.restore(allow=self._config.allow, **state.objects())
            if state.restored is None and self._config.restore_from:
                state.restored = self._begin_from(self._config.restore_from, state)
            elif state.restored is None and self._pretrained is not None:
                state.restored = self._pretrained(state.distributed_model.model)

    def start(self, state: TrainingState) -> None:
        self.schedule = SaveSchedule(self._interval, now=time.monotonic(), step=state.step, mtbf_s=self._mtbf_s)

    def save_if_due(self, state: TrainingState) -> None:
        """Begin to save after step `state.step` if it is to be saved, and note how long the save before has taken.

        It need not be called while nothing is to be saved and no save is in flight.
        """
        self._say_what_is_sound(state)
        if state.save_requested and not state.stopping and not state.is_last_step:
            with state.phases.within(Phase.CHECKPOINT):
                self._save(state)
        self._measure(state)

    def roll_back(self, state: TrainingState, at_most: int) -> bool:
        """Load the newest checkpoint of at most step `at_most` into `state.objects_but_loader()`, and forget newer ones.

        Returns:
            False, and nothing is changed, if there is none.
        """
        with _settings_kept(state.optimizer):
            if self._checkpointer.restore(at_most=at_most, **state.objects_but_loader()) is None:
                return False
        self._checkpointer.remove_newer(state.step)
        self.pending_save = None
        self.schedule.saved(state.step, time.monotonic())
        return True

    def _say_what_is_sound(self, state: TrainingState) -> None:
        health = state.health
        self._checkpointer.sound_step, self._checkpointer.unchecked_step = health.sound_step, health.checked_step

    def finish(self, state: TrainingState) -> None:
        """Save a last time: all steps are done, or training stops early (`state.stopping`)."""
        self._say_what_is_sound(state)
        if state.step > state.first_step or not state.stopping:
            state.saved = self._save_last(state)
        if state.saved is not None or self._checkpointer.last_step == state.step:
            self._checkpointer.remove_local()  # the newest state is in the run directory, and the nodes are left
        self._checkpointer.close(0 if state.stopping else None)

    def wait_for_save_in_flight(self) -> None:
        """Wait, after an error, for the save in flight, without which the next attempt would have to repeat more steps."""
        with suppress(CheckpointError):
            self._checkpointer.close(DRAIN_S)

    def _begin_from(self, path: str, state: TrainingState) -> Restored | None:
        """Continue from another run's checkpoint, or start with its weights.

        Raises:
            ConfigError: that run has done all the steps that this run is to do.
        """
        if self._config.restore_only == RestoreOnly.MODEL:
            return self._restore_from(path, {"model": state.distributed_model.model}, as_start=True)
        restored = self._restore_from(path, state.objects())
        if state.is_last_step:
            raise ConfigError(
                f"checkpoint.restore_from={path} is at step {state.step} already, and "
                f"train.steps={state.total_steps}: there is nothing left to train",
                hint="to restart with its weights: checkpoint.restore_only=model; to continue from its step: more train.steps",
            )
        return restored

    def _restore_from(self, path: str, objects: Mapping[str, Any], *, as_start: bool = False) -> Restored | None:
        return self._checkpointer.restore(path=path, allow=self._config.allow, as_start=as_start, **objects)

    def _save(self, state: TrainingState) -> None:
        """Begin to save, and let training go on."""
        if self._checkpointer.last_step == state.step:
            return
        if not state.is_finite():
            state.hooks.message(f"step {state.step} is not saved: its parameters are not finite")
            self.schedule.saved(state.step, time.monotonic())
            return
        state.read_numbers()
        metrics = state.metrics if state.evaluated_at == state.step else None
        pending = self._checkpointer.save(state.step, metrics=metrics, **state.objects())
        self._measure(state)  # the one before is decided by now
        self.pending_save = pending
        self.schedule.saved(state.step, time.monotonic())
        state.throughput.start()

    def _measure(self, state: TrainingState) -> None:
        """Note the duration of a save that has been committed meanwhile, which decides how early a last save has to begin."""
        pending = self.pending_save
        if pending is None or not pending.done():
            return
        self.pending_save = None
        if pending.error is None:
            saved = pending.result()
            self.schedule.measured(saved.stall_s)
            self._longest_save_s = max(self._longest_save_s or 0.0, saved.seconds)
            if self._planner is not None:
                self._planner.plan_stop(state.longest_step_s, self._longest_save_s)

    def _save_last(self, state: TrainingState) -> SaveResult | None:
        """Save before the process ends, and wait for the commit; what is in flight, and then the present step if there is time.

        Clocks and the state of the save differ between ranks: rank 0 decides.
        """
        saved = None
        if state.stopping:
            self._checkpointer.hurry()
        pending = self.pending_save
        in_flight = pending is not None and not pending.done()
        if state.stopping and state.is_finite() and state.ranks.of_rank_0(int(in_flight)):
            if state.ranks.of_rank_0(int(self._is_better_discarded(state))):
                self._checkpointer.discard()
            else:
                with suppress(CheckpointError):  # it has been reported
                    saved = self._checkpointer.wait()
                self._measure(state)
                if saved is not None and not state.ranks.of_rank_0(int(self._has_time_to_save())):
                    return saved
        self._save(state)
        return self._checkpointer.wait() or saved

    def _is_better_discarded(self, state: TrainingState) -> bool:
        pending = self.pending_save
        return pending is not None and is_better_discarded(
            grace_s=self._grace_s(),
            running_s=time.monotonic() - pending.begun,
            save_s=self._longest_save_s,
            steps_behind=state.step - pending.step,
        )

    def _has_time_to_save(self) -> bool:
        grace_s, save_s = self._grace_s(), self._longest_save_s
        return grace_s is None or save_s is None or save_s <= grace_s

    def _grace_s(self) -> float | None:
        return self._planner.seconds_left() if self._planner is not None else None


@contextmanager
def _settings_kept(optimizer: Optimizer) -> Iterator[None]:
    """Give the optimiser the settings that the config of this run has: a restore brings those that it was saved with."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    yield
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
