"""`preempt RUN`: compare how long the run took to stop with the time that SLURM gives a job that is really preempted."""

from __future__ import annotations

import time

from slurmtrain.runs.attempts import Attempt, read_attempt
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.facts import PreemptionTimes

POLL_S = 0.2  # seconds between looks at a file on a shared file system


def time_to_leave(times: PreemptionTimes | None) -> float | None:
    """Return the seconds from the announcement of a preemption to SIGKILL; None if SLURM does not say."""
    if times is None or times.kill_wait_s is None:
        return None
    return (times.grace_s or 0.0) + times.kill_wait_s


def wait_until_left(run_dir: RunDir, number: int, within_s: float) -> Attempt | None:
    """Wait until all ranks of an attempt have exited and its outcome is recorded; return its record, or None."""
    deadline = time.monotonic() + within_s
    while (attempt := read_attempt(run_dir, number)).ended is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    return attempt


def leaving_sentence(attempt: Attempt | None, asked: float, within_s: float, times: PreemptionTimes) -> str:
    """Say how long the run took to stop, or that it did not stop in time.

    Args:
        attempt: its record; None when it has not stopped.
        asked: when it was told to stop, in unix seconds.
        within_s: the result of `time_to_leave`.
    """
    whose = f"{times.grace_of} gives" if times.grace_s is not None else "SLURM's KillWait gives"
    if attempt is None or attempt.ended is None:
        return (
            f"it has not stopped within the {within_s:.0f} s that {whose}: a preemption would have killed it, and it would "
            "go on from its last checkpoint"
        )
    saved = f" after step {attempt.last_step}" if attempt.last_step is not None else ""
    return f"it stopped{saved}, {max(0.0, attempt.ended - asked):.1f} s after it was told to stop; {whose} {within_s:.0f} s"
