"""SLURM's words for the state of a job, as scontrol and squeue write them (`man squeue`, JOB STATE CODES).

A state that SLURM has said is text, since another release may have a word that is not here; a `JobState` equals its word.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """What SLURM says of a job where this package acts on it."""

    # It waits, or gets its nodes.
    PENDING = "PENDING"
    REQUEUED = "REQUEUED"
    CONFIGURING = "CONFIGURING"
    # It has its nodes.
    RUNNING = "RUNNING"
    SIGNALING = "SIGNALING"  # in place of RUNNING, while slurmctld hands a signal to the nodes
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    RESIZING = "RESIZING"
    # It leaves them.
    STAGE_OUT = "STAGE_OUT"
    COMPLETING = "COMPLETING"
    # It has ended.
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"


# States of a job that will not run again by itself.
GONE = (
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.NODE_FAIL,
    JobState.PREEMPTED,
    JobState.BOOT_FAIL,
    JobState.DEADLINE,
    JobState.OUT_OF_MEMORY,
)

# States of a job that SLURM requeues only if it is told that the job has ended.
ENDED = (*GONE, JobState.COMPLETING)

# States of a job that has nodes, or leaves them.
LIVE = (
    JobState.RUNNING,
    JobState.COMPLETING,
    JobState.CONFIGURING,
    JobState.SUSPENDED,
    JobState.STOPPED,
    JobState.RESIZING,
    JobState.SIGNALING,
    JobState.STAGE_OUT,
)

# States of a job that scancel has ended, while its batch script still runs and afterwards. Others end in COMPLETING, too.
AFTER_SCANCEL = (JobState.COMPLETING, JobState.CANCELLED)

# States, asked for when the ranks have left, that say that SLURM has ended this start of the job, or started it again.
ENDED_BY_SLURM = (
    *AFTER_SCANCEL,
    JobState.TIMEOUT,
    JobState.NODE_FAIL,
    JobState.PREEMPTED,
    JobState.PENDING,
    JobState.REQUEUED,
)
