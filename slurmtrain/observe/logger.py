"""The protocol of loggers: what is given the numbers of a run, outside of its directory, such as W&B, MLflow or your own.

A logger lives in a thread of rank 0 (`observe.logger_thread`), which reads metrics.jsonl and hands on what the logger does
not have yet. So training never waits for it, and nothing is lost while it fails: it is in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol


class Ending(StrEnum):
    """How an attempt has ended, as far as its loggers are concerned."""

    FINISHED = "finished"  # all steps are done
    STOPPED = "stopped"  # it was told to stop, and the run may go on in another attempt
    FAILED = "failed"


@dataclass(frozen=True, order=True)
class Held:
    """The last steps whose numbers a logger has. They are never given to it again.

    Attributes:
        step: of training; -1: none.
        evaluated: of an evaluation; -1: none.
    """

    step: int = -1
    evaluated: int = -1


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is opened for.

    Attributes:
        id: the run's id; the same in all its attempts.
        name: job.name.
        user: who submitted it.
        directory: the run directory.
        attempt: number of the attempt that opens the logger, from 1.
        config: the frozen config, without secrets.
        sweep: id of the sweep that the run is a point of; None for others.
        held: what the logger had when it was last heard of.
    """

    id: str
    name: str
    user: str
    directory: Path
    attempt: int
    config: Mapping[str, Any] = field(default_factory=dict)
    sweep: str | None = None
    held: Held = field(default_factory=Held)


class Logger(Protocol):
    """The methods of a logger. A class of your own that is derived from this one needs `log` only.

    It is built from its config in `observe.loggers` for each attempt, in a thread of rank 0, and sees numbers only. Whatever a
    method raises is said once; after a pause the logger is closed, built and opened again, and goes on after what it has.
    """

    def open(self, run: LoggedRun) -> Held | None:
        """Begin, or go on with, the run of this id. Called first, and again after an error.

        Returns:
            What it has of this run already; None: it cannot tell, and what was noted here counts (`run.held`).
        """
        return None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step of training, every train.log_every steps. Steps only grow, over all attempts."""
        ...

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation after `step`, which may come after those of later steps."""
        self.log(step, values)

    def flush(self) -> None:
        """Hand on what is buffered. Called after each group of records; what was given before counts as held after it."""
        return None

    def close(self, ending: Ending) -> str | None:
        """End this attempt's part, within seconds where it was stopped.

        Returns:
            A sentence for the person who reads the log, such as where the numbers are to be seen; None: nothing to say.
        """
        return None
