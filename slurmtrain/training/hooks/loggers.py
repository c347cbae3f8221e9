"""The hook that takes a run's numbers elsewhere: to its loggers."""

from __future__ import annotations

import time

from slurmtrain.config.schema import Config
from slurmtrain.observe.logger import Ending
from slurmtrain.observe.logger_thread import CLOSE_S, LoggerThread, follow, loggers_of
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.training.hooks.base import TrainingHook
from slurmtrain.training.state import TrainingState


class ExternalLoggers(TrainingHook):
    """Keeps the threads of the loggers, on rank 0. They read metrics.jsonl: its writer comes before this hook."""

    def __init__(self, run_dir: RunDir, config: Config, attempt: int):
        self._run_dir, self._config, self._attempt = run_dir, config, attempt
        self._threads: list[LoggerThread] = []

    def before_first_step(self, state: TrainingState) -> None:
        # The workers of the loader are there: a fork while a thread imports W&B leaves the locks of its imports held.
        names, say = loggers_of(self._config.observe), state.hooks.message
        self._threads = [follow(name, self._run_dir, self._config, self._attempt, say) for name in names]

    def rolled_back(self, state: TrainingState, from_step: int) -> None:
        for each in self._threads:
            each.rewind()

    def close(self, state: TrainingState) -> None:
        ending = Ending.FINISHED if state.finished else Ending.STOPPED if state.stopping else Ending.FAILED
        deadline = time.monotonic() + CLOSE_S[ending]
        for each in self._threads:  # all at the same time, and not for long
            each.close(ending, deadline)
        for each in self._threads:
            each.wait()
