"""How a program of the user's own is told to stop, and ended when that takes too long.

What SLURM sends reaches every process of a step, those of the program too. What else tells a run to stop (the clock,
Ctrl-C, another rank) reaches this package alone, and so does a signal that the program does not want: both are passed
on as job.stop_signal.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import psutil

from slurmtrain.config.schema import JobConfig
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.reasons import Event
from slurmtrain.slurm.job_facts import JobFacts, JobState
from slurmtrain.system import process
from slurmtrain.system.records import read_json, typed_or_none
from slurmtrain.system.signals import StopCause, StopFlag

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5  # whether the grace time is over, whose end rank 0 finds out a little after the signal
KILL_EVERY_S = 0.2
MARGIN_S, MARGIN_SHARE = 2.0, 0.1  # kept of the time that SLURM leaves, for the way out: so long, and a tenth of it,
LONGEST_MARGIN_S = 10.0  # but no more than this
# Processes that a library has started for the program: they end with it, and it fails if they are gone when it saves.
HELPERS = frozenset({"wandb-core"})


@dataclass(frozen=True)
class ProgramProcess:
    """A process below this one.

    Attributes:
        group: its process group.
        catches: numbers of the signals for which it has handlers.
    """

    pid: int
    group: int
    catches: frozenset[int] = frozenset()


class ProgramStopper:
    """Tells the program to stop as soon as this rank is told to, and ends it at the end of its grace time, until `close`.

    Make it when the program has just been started.

    Args:
        source: where the ranks come from, see `Environment`.
    """

    def __init__(self, job: JobConfig, source: str, context: AttemptContext, stop_flag: StopFlag, rank: int):
        self._job, self._source, self._context, self._stop_flag = job, source, context, stop_flag
        self._rank, self._began = rank, time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="stop-program", daemon=True).start()

    def close(self) -> None:
        """Leave alone what runs from now on: the program has ended."""
        self._closed.set()

    def _run(self) -> None:
        self._stop_flag.wait()
        first = self._stop_flag.first
        assert first is not None
        stop_signal = signal.Signals[self._job.stop_signal]
        processes, missed = _processes(), first.moment < self._began
        pids = to_tell(processes, stop_signal, first.cause, source=self._source, own_group=os.getpgrp(), missed=missed)
        process.send(stop_signal, pids)
        facts = None
        while not self._closed.wait(LOOK_EVERY_S):
            facts = told_facts(self._context.attempt_dir) or facts
            if time.monotonic() >= end_of_grace(first.moment, self._job.stop_grace_s, facts):
                self._end(time.monotonic() - first.moment)
                return

    def _end(self, took_s: float) -> None:
        left = process.living_descendants(os.getpid())
        if not left or self._closed.is_set():
            return
        rule = (
            f"job.stop_grace_s={self._job.stop_grace_s}" if self._job.stop_grace_s else "SLURM is about to end the job"
        )
        log.warning("the program has not exited within %.0f s of being told to stop, and is killed (%s)", took_s, rule)
        with contextlib.suppress(OSError):  # a full disk must not make a crash of it
            self._context.run_dir.event(
                Event.KILLED_AFTER_GRACE, attempt=self._context.number, rank=self._rank, seconds=round(took_s, 1)
            )
        while left and not self._closed.wait(KILL_EVERY_S):
            process.send(signal.SIGKILL, left)
            left = process.living_descendants(os.getpid())


def _processes() -> list[ProgramProcess]:
    found = []
    for pid in process.living_descendants(os.getpid()):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if psutil.Process(pid).name() not in HELPERS:
                found.append(ProgramProcess(pid, os.getpgid(pid), process.caught_signals(pid)))
    return found


def to_tell(
    processes: Sequence[ProgramProcess],
    stop_signal: int,
    cause: StopCause,
    *,
    source: str,
    own_group: int,
    missed: bool = False,
) -> list[int]:
    """Return the pids of the processes that are to get `stop_signal`.

    srun signals all processes of the step, and cluster=local all of the rank's process group: a second SIGTERM would mean
    "now, at once" to some programs. A program that handles the early warning (SIGUSR2) needs no other signal; one that
    does not has ignored it. A signal other than SIGTERM goes to those that handle it, since it would kill their helpers,
    such as the workers of a DataLoader; if nobody does, it goes to all.

    Args:
        missed: the signal came before they were started.
    """
    everybody = [each.pid for each in processes]
    if missed or (cause.is_signal and signal.Signals[cause.name] != stop_signal):
        heard_by: Collection[int] = ()
    elif source == "slurm" and cause.is_signal:
        heard_by = everybody
    elif source in ("local", "pods") and cause.is_signal and cause != StopCause.SIGINT:
        heard_by = [each.pid for each in processes if each.group == own_group]
    else:
        heard_by = ()
    if stop_signal == signal.SIGTERM:
        if cause == StopCause.SIGUSR2 and any(signal.SIGUSR2 in each.catches for each in processes):
            return []
        return [pid for pid in everybody if pid not in heard_by]
    handle = [each.pid for each in processes if stop_signal in each.catches]
    return [pid for pid in (handle or everybody) if pid not in heard_by]


def told_facts(attempt_dir: AttemptDir) -> JobFacts | None:
    """Return what SLURM has said of the job when it was told to stop; None as long as rank 0 has not written it.

    A storage that fails just now has None, too: whoever asks goes on by what is known, and asks again.
    """
    try:
        facts = (read_json(attempt_dir.stop_file) or {}).get("facts")
    except (OSError, UnreadableRecordError) as error:
        log.debug("what SLURM has said of this job cannot be read now: %s", error)
        return None
    return typed_or_none(JobFacts, facts)


def end_of_grace(told: float, grace_s: float | None, facts: JobFacts | None) -> float:
    """Return when a program that was told to stop is ended, by the clock of `told`; infinity: it may take as long as it likes.

    That is shortly before SLURM ends the job: a job that SLURM has killed at its time limit is not started again.

    Args:
        told: when it was told, in seconds of any clock.
        grace_s: job.stop_grace_s.
        facts: what SLURM said of the job soon after; None: nothing, or not yet.
    """
    own = told + grace_s if grace_s is not None else math.inf
    # A job that was cancelled has ended for SLURM.
    if facts is None or facts.seconds_left is None or facts.state != JobState.RUNNING:
        return own
    margin = min(MARGIN_S + MARGIN_SHARE * max(0.0, facts.seconds_left), LONGEST_MARGIN_S)
    return min(own, told + facts.seconds_left - margin)
