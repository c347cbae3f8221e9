"""Evaluation every train.eval_every steps and after the last one: while training waits, or by other jobs."""

from __future__ import annotations

from typing import Protocol

from slurmtrain.config.schema import CheckpointConfig, TrainConfig
from slurmtrain.observe.phases import Phase
from slurmtrain.training.evaluation import Evaluator, not_measured
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.state import StepResult, TrainingState


class EvaluationJobs(Protocol):
    """The jobs that evaluate checkpoints (eval.mode=job), so that training goes on."""

    def ask(self, step: int) -> None:
        """Have the checkpoint of this step evaluated once it is committed."""

    def close(self, *, finished: bool) -> None:
        """End with training: if all steps are done (`finished`), wait until every evaluation is submitted."""


class Evaluation(TrainingHook):
    """Evaluates when it is due: while training waits, or by another job, from the step's checkpoint. On all ranks.

    Args:
        by_jobs: by another job (eval.mode=job).
        jobs: rank 0's, which ask for that; None on the others.
        baseline: (name, nats per token) of a simple model on the same text, shown beside every validation loss.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        train: TrainConfig,
        checkpoint: CheckpointConfig,
        *,
        by_jobs: bool = False,
        jobs: EvaluationJobs | None = None,
        baseline: tuple[str, float] | None = None,
    ):
        self._evaluator, self._every = evaluator, train.eval_every
        self._by_jobs, self._jobs, self._baseline = by_jobs, jobs, baseline
        self._best_metric = checkpoint.best_metric if checkpoint.keep_best else None

        if self._best_metric is not None:
            evaluator.check_best_metric(self._best_metric)

    def start(self, state: TrainingState) -> None:
        if not self._by_jobs:
            self._evaluator.prepare()

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        self.evaluate_if_due(state)

    def close(self, state: TrainingState) -> None:
        if self._jobs is not None:
            self._jobs.close(finished=state.finished)

    def evaluate_if_due(self, state: TrainingState) -> None:
        """Evaluate if it is due at `state.step` and was not done."""
        step = state.step
        due = step == state.total_steps or (self._every > 0 and step % self._every == 0)
        if not (self._evaluator.sets and due and step > state.counters.evaluated_at) or state.stopping:
            return
        if self._by_jobs:
            state.counters.evaluated_at, state.save_requested = step, True
            if self._jobs is not None:
                self._jobs.ask(step)
        else:
            with state.phases.within(Phase.EVALUATION):
                self._evaluate(state)

    def _evaluate(self, state: TrainingState) -> None:
        """Measure every held-out sample; a stop that is requested before it is done ends training."""
        measured = self._evaluator.evaluate()
        if measured is None:
            state.stopping = True
            return
        if self._best_metric is not None and self._best_metric not in measured:
            raise not_measured(self._best_metric, measured)
        step = state.step
        state.metrics, state.counters.evaluated_at = measured, step
        state.hooks.evaluated(step, measured)
        for name in self._evaluator.sets:
            what = "validation" if name == "valid" else name
            beside = f" ({self._baseline[0]}: {self._baseline[1]:.4f})" if self._baseline and name == "valid" else ""
            state.hooks.message(f"step {step}: {what} loss {measured[f'{name}_loss']:.4f} nats per token{beside}")
        state.throughput.start()
