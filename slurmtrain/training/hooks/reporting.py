"""What training reports: the numbers of a step, summed over all ranks, and the files and lines that rank 0 makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurmtrain.config.schema import TrainConfig
from slurmtrain.observe import Reporter
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.state import StepResult, TrainingState

WAITING_TOO_LONG = 0.1  # share of a step's time spent waiting for data


class StepReports(TrainingHook):
    """Reports every train.log_every-th step and the last one. On all ranks, since they sum up their losses."""

    def __init__(self, train: TrainConfig):
        self._train = train
        self._said_waiting = False

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        if state.step % self._train.log_every != 0 and state.step != state.total_steps:
            return
        total, throughput = state.ranks.sum(result.loss_sum), state.throughput
        values = {
            "loss": total.item() / result.tokens,
            "grad_norm": float(result.grad_norm),
            "lr": result.learning_rate,
            "tokens_per_s": throughput.tokens_per_s,
            "step_time_s": throughput.step_time_s,
            "data_wait_s": throughput.data_wait_s,
            "data_hash": state.counters.data_hash,
        }
        state.hooks.log(state.step, values)
        share = throughput.data_wait_s / throughput.step_time_s
        if share > WAITING_TOO_LONG and throughput.full and not self._said_waiting:
            self._said_waiting = True
            state.hooks.message(
                f"step {state.step}: {share:.0%} of the time goes into waiting for data; "
                f"more than train.data_workers={self._train.data_workers} may help"
            )


class RunReporter(TrainingHook):
    """Writes the metrics file, the curves and the progress line of a run, on rank 0.

    Args:
        metrics_file: the file to append the numbers of steps and evaluations to.
        tensorboard: folder for the curves; None: there are none.
        heading: what is shown first.
    """

    def __init__(self, metrics_file: Path, tensorboard: Path | None, heading: str = ""):
        self._metrics_file, self._tensorboard, self._heading = metrics_file, tensorboard, heading
        self._reporter: Reporter | None = None

    def start(self, state: TrainingState) -> None:
        self._open(state, state.first_step)
        if self._heading:
            self.message(self._heading)

    def _open(self, state: TrainingState, step: int) -> None:
        """Begin to write after step `step`; what was written of later ones is dropped."""
        self._reporter = Reporter(
            metrics_file=self._metrics_file,
            tensorboard=self._tensorboard,
            total_steps=state.total_steps,
            resume_step=step,
            evaluated_at=state.counters.evaluated_at,
        )

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        self.close(state)
        self._open(state, state.step)

    def log(self, step: int, values: Mapping[str, float | str | None]) -> None:
        if self._reporter is not None:
            self._reporter.log(step, **values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        if self._reporter is not None:
            self._reporter.record(step, **values)

    def message(self, text: str) -> None:
        if self._reporter is not None:
            self._reporter.message(text)

    def close(self, state: TrainingState) -> None:
        if self._reporter is not None:
            self._reporter.close()
