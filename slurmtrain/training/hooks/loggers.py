"""The hook that takes a run's numbers elsewhere: to its loggers."""

from __future__ import annotations

from slurmtrain.config.schema import Config
from slurmtrain.observe.logger import Ending
from slurmtrain.observe.logger_thread import LoggerThreads
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.state import TrainingState


class ExternalLoggers(TrainingHook):
    """Keeps the threads of the loggers, on rank 0. They read metrics.jsonl: its writer comes before this hook."""

    def __init__(self, run_dir: RunDir, config: Config, attempt: int):
        self._run_dir, self._config, self._attempt = run_dir, config, attempt
        self._loggers: LoggerThreads | None = None

    def before_first_step(self, state: TrainingState) -> None:
        # The workers of the loader are there: a fork while a thread imports W&B leaves the locks of its imports held.
        self._loggers = LoggerThreads(self._run_dir, self._config, self._attempt, state.hooks.message)

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        if self._loggers is not None:
            self._loggers.rewind()

    def close(self, state: TrainingState) -> None:
        if self._loggers is not None:
            ending = Ending.STOPPED if state.stopping else Ending.FAILED
            self._loggers.close(Ending.FINISHED if state.finished else ending)
