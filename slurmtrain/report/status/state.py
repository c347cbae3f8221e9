"""The state of a run: one word, why, and what comes next."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.progress import Progress
from slurmtrain.runs.attempts import Attempt
from slurmtrain.system.durations import roughly


class RunStatus(StrEnum):
    """The status of a run."""

    PREPARED = "prepared"  # nothing has been submitted or started yet
    WAITING = "waiting"  # for its first start, in the queue
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    STOPPING = "stopping"  # its ranks are leaving
    REQUEUED = "requeued"  # it waits to start again
    HELD = "held"
    UNKNOWN = "unknown"  # SLURM, or the host of a local run, cannot be asked
    FINISHED = "finished"
    STOPPED = "stopped"  # somebody or something ended it before it had finished; it can be resumed
    PRUNED = "pruned"  # its search has ended it early, by the values that it had logged
    FAILED = "failed"
    LOST = "lost"  # its job is gone, and the run has not ended
    UNREADABLE = "unreadable"  # its files cannot be used
    REMOVED = "removed"  # only a sweep's point: its run directory is gone


WAITING = (RunStatus.WAITING, RunStatus.REQUEUED, RunStatus.HELD)  # words for a run whose job is pending
AT_WORK = (RunStatus.STARTING, RunStatus.RUNNING, RunStatus.SUSPENDED, RunStatus.STOPPING)
ALIVE = frozenset({*WAITING, *AT_WORK, RunStatus.UNKNOWN})
ATTEMPT_HEADER = ("attempt", "job", "started", "took", "nodes", "steps", "reason", "then")


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Attributes:
        status: what a person reads of it first.
        explanation: why, and what comes next.
        own_job: it was submitted as this job; False if somebody started the run inside of an allocation.
        progress: its progress.
        packed: the job is that of other runs, too (sweep.pack).
        slurm_error: why SLURM could not be asked, if it should have been.
        following: jobs of its chain that wait for this one.
        queued_again: it has ended, and SLURM has queued its job once more; when that starts, it exits at once.
        reason: SLURM's word for why its job waits or is held.
        copied_from: path of the original, if it is a copy that nobody has resumed.
        expected_start: when SLURM expects to start it, in unix seconds; None while SLURM has not worked that out.
    """

    status: RunStatus
    explanation: str
    attempts: list[Attempt]
    job_id: str | None
    progress: Progress = field(default_factory=Progress)
    own_job: bool = True
    packed: bool = False
    slurm_error: str | None = None
    following: tuple[str, ...] = ()
    queued_again: bool = False
    reason: str | None = None
    expected_start: float | None = None
    copied_from: str | None = None

    @property
    def step(self) -> int | None:
        """The number of steps done, as far as is known."""
        return self.progress.step

    @property
    def alive(self) -> bool:
        """Whether SLURM or a local launcher still has it, or may have it as far as can be known here."""
        return self.status in ALIVE

    @property
    def waits(self) -> bool:
        """Whether its job is pending."""
        return self.status in WAITING

    @property
    def readable(self) -> bool:
        """Whether its files can be used."""
        return self.status != RunStatus.UNREADABLE

    def facts(self) -> dict[str, Any]:
        """Return what a program gets to know of it, by the names of `Run.status()` and of `status --json`."""
        progress = ("step", "steps", "loss", "valid_loss", "logged", "tokens_per_s", "step_time_s", "eta_s")
        return {
            "state": self.status,
            "sentence": self.explanation,
            "job_id": self.job_id,
            **{name: getattr(self.progress, name) for name in progress},
            "reason": self.reason,
            "expected_start": self.expected_start,
        }

    def attempt_cells(self, attempt: Attempt, now: float) -> list[str]:
        """Return the cells below ATTEMPT_HEADER for one of its attempts, at this time in unix seconds."""
        current = attempt is self.attempts[-1] and self.alive and not self.waits and attempt.ended is None
        # Before it has begun, the run's step is that of an earlier one.
        last = self.step if current and attempt.started else attempt.last_step
        end = attempt.ended or (now if current else None)
        more = f" +{len(attempt.nodes) - 4}" if len(attempt.nodes) > 4 else ""
        return [
            str(attempt.number),
            attempt.job_id or "-",
            time.strftime("%m-%d %H:%M:%S", time.localtime(attempt.started)) if attempt.started else "-",
            roughly(end - attempt.started) if end and attempt.started else "-",
            ",".join(attempt.nodes[:4]) + more or "-",
            "-".join("?" if step is None else str(step) for step in (attempt.first_step, last)),
            attempt.reason or (self.status if current else "?"),
            attempt.sentence or "",
        ]


def unreadable(error: UnreadableRecordError) -> RunState:
    """Return the state of a run whose files cannot be used."""
    return RunState(RunStatus.UNREADABLE, error.message, [], None)
