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


class _Evaluation(TrainingHook):
    """Evaluates when it is due. On all ranks."""

    def __init__(self, evaluator: Evaluator, train: TrainConfig, checkpoint: CheckpointConfig):
        self._evaluator, self._every = evaluator, train.eval_every
        self._best_metric = checkpoint.best_metric if checkpoint.keep_best else None

    def setup(self, state: TrainingState) -> None:
        if self._best_metric is not None:
            self._evaluator.check_best_metric(self._best_metric)

    def before_first_step(self, state: TrainingState) -> None:
        self._evaluate_if_due(state)  # one that a stop has cut short is repeated first

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        self._evaluate_if_due(state)

    def _evaluate_if_due(self, state: TrainingState) -> None:
        step = state.step
        due = step == state.total_steps or (self._every > 0 and step % self._every == 0)
        if self._evaluator.sets and due and step > state.counters.evaluated_at and not state.stopping:
            with state.phases.within(Phase.EVALUATION):
                self._evaluate(state)

    def _evaluate(self, state: TrainingState) -> None:
        raise NotImplementedError


class InlineEvaluation(_Evaluation):
    """Evaluates while training waits (eval.mode=inline).

    Args:
        baseline: (name, nats per token) of a simple model on the same text, shown beside every validation loss.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        train: TrainConfig,
        checkpoint: CheckpointConfig,
        baseline: tuple[str, float] | None = None,
    ):
        super().__init__(evaluator, train, checkpoint)
        self._baseline = baseline

    def before_first_step(self, state: TrainingState) -> None:
        self._evaluator.prepare()
        super().before_first_step(state)

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


class EvaluationByJobs(_Evaluation):
    """Has the step's checkpoint evaluated by another job (eval.mode=job).

    Args:
        jobs: rank 0's; None on the others.
    """

    def __init__(
        self, evaluator: Evaluator, train: TrainConfig, checkpoint: CheckpointConfig, jobs: EvaluationJobs | None
    ):
        super().__init__(evaluator, train, checkpoint)
        self._jobs = jobs

    def close(self, state: TrainingState) -> None:
        if self._jobs is not None:
            self._jobs.close(finished=state.finished)

    def _evaluate(self, state: TrainingState) -> None:
        state.counters.evaluated_at, state.save_requested = state.step, True
        if self._jobs is not None:
            self._jobs.ask(state.step)
