"""Hooks that take a run's numbers elsewhere: to its loggers, and to a text file of each node."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.config.schema import Config
from slurmtrain.observe.logger import Ending
from slurmtrain.observe.logger_thread import LoggerThreads
from slurmtrain.observe.textfile import TextFile
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


class NodeTextFile(TrainingHook):
    """Writes the text file of this node, on its first rank."""

    def __init__(self, folder: Path, name: str, labels: Mapping[str, str], attempt: int):
        self._folder, self._name, self._labels, self._attempt = folder, name, labels, attempt
        self._file: TextFile | None = None

    def start(self, state: TrainingState) -> None:
        self._file = TextFile(self._folder, self._name, self._labels)
        self._file.update({"step": state.step, "steps": state.total_steps, "attempt": self._attempt})

    def log(self, step: int, values: Mapping[str, float | str | None]) -> None:
        self._show(step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._show(step, values)

    def _show(self, step: int, values: Mapping[str, float | str | None]) -> None:
        if self._file is not None:
            numbers = {
                name: float(value)
                for name, value in values.items()
                if isinstance(value, (int, float)) and "/" not in name  # not those of each layer
            }
            self._file.update({**numbers, "step": step, "logged_timestamp_seconds": round(time.time(), 3)})

    def close(self, state: TrainingState) -> None:
        if self._file is not None:
            self._file.close()
