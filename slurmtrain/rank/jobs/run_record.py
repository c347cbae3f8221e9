"""The record that rank 0 writes of a training: what it began from, when it began to step, and each checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.save.job import SaveResult
from slurmtrain.rank.attempt_context import AttemptContext, Timeline, update_attempt
from slurmtrain.rank.evaluation_jobs import EvaluationJobs
from slurmtrain.runs import attempts
from slurmtrain.runs.reasons import Event
from slurmtrain.system.patience import BestEffort
from slurmtrain.training.hooks.base import RecordingHook, TrainingState

log = logging.getLogger(__name__)


class RunRecord(RecordingHook):
    """Writes the events of a run and the record of its attempt, on rank 0.

    Events that cannot be written are left out: a full disk must not end a training for them.

    Args:
        context: the run and its attempt.
        timeline: how long the start took.
        jobs: evaluates checkpoints; None: no other job does.
        utilisation: what the model's training takes, and the most that a device can do, for the run's events.
    """

    def __init__(
        self,
        context: AttemptContext,
        timeline: Timeline,
        jobs: EvaluationJobs | None = None,
        *,
        utilisation: Mapping[str, Any] | None = None,
    ):
        self._context, self._timeline, self._jobs = context, timeline, jobs
        self._utilisation = utilisation
        self._storage = BestEffort(f"events of the run {context.run_dir.id}")

    def start(self, state: TrainingState) -> None:
        restored = state.restored
        if restored is not None and restored.as_start:
            of_step = {"weights_of_step": restored.step} if restored.incarnation_label else {}
            self._event(Event.FRESH_START, step=0, weights_from=str(restored.path), **of_step)
        else:
            self._event(
                Event.RESTORED if restored else Event.FRESH_START,
                step=restored.step if restored else 0,
                checkpoint=restored.path.name if restored else None,
                set_aside=list(restored.set_aside) if restored else [],
                **({"origin": restored.origin} if restored is not None and restored.origin else {}),
            )
        self._timeline.mark("restore")
        seconds = self._timeline.seconds
        update_attempt(self._context, first_step=state.first_step, stepping=time.time(), start_up_s=seconds)
        self._event(Event.TRAINING_STARTED, step=state.first_step, start_up_s=seconds)
        if self._utilisation is not None:
            self._event(Event.FLOPS_COUNTED, **self._utilisation)
        earlier = attempts.all_attempts(self._context.run_dir)
        steps = [each.last_step or 0 for each in earlier if each.number < self._context.number]
        state.furthest = max(steps, default=0)

    def event(self, event: Event, values: Mapping[str, Any]) -> None:
        self._event(event, **values)

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        health = state.health
        self._event(Event.ROLLED_BACK, step=state.step, from_step=from_step, in_a_row=health.rollbacks)

    def on_ending(self, ending: SaveResult | CheckpointError) -> None:
        """Record the end of a save. Called by the thread that writes checkpoints."""
        if isinstance(ending, CheckpointError):
            self._event(Event.CHECKPOINT_FAILED, error=ending.message)
            return
        self._event(
            Event.CHECKPOINT,
            step=ending.step,
            seconds=round(ending.seconds, 3),
            stall_s=round(ending.stall_s, 3),
            size=ending.size,
        )
        if self._jobs is not None:
            self._jobs.committed(ending.step)

    def _event(self, event: Event, **values: Any) -> None:
        run_dir, number = self._context.run_dir, self._context.number
        self._storage.attempt(lambda: run_dir.event(event, attempt=number, **values))
