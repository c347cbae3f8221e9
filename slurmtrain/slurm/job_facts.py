"""What SLURM says of jobs: `scontrol show job` and squeue. Parsing only: `SlurmClient` asks.

States are SLURM's words (`man squeue`, JOB STATE CODES). One that SLURM has said is text, since another release may have a
word that is not here; a `JobState` equals its word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from slurmtrain.slurm.parse_values import parse_time
from slurmtrain.system.records import Count, Time


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


@dataclass(frozen=True)
class JobFacts:
    """The output of `scontrol show job` for one job. Times are unix seconds, or None.

    Attributes:
        state: SLURM's word, mostly a `JobState`.
        excluded: nodes that it must not get, as SLURM writes a list of them: "n[1-3,7]".
        nodes: the nodes that it has, as SLURM writes them.
        as_of: when SLURM said so, by the controller's clock; None if that was not asked for.
    """

    state: str
    reason: str = ""
    restarts: Count = 0
    start_time: Time | None = None
    end_time: Time | None = None
    preempt_time: Time | None = None
    excluded: str = ""
    nodes: str = ""
    as_of: Time | None = None

    @property
    def preempted(self) -> bool:
        """Whether SLURM has announced that it preempts this start of the job."""
        return self.preempt_time is not None and (self.start_time is None or self.preempt_time >= self.start_time)

    @property
    def seconds_left(self) -> float | None:
        """The seconds that it had left when SLURM said so; None: not known.

        SLURM ends a job that is COMPLETING: its EndTime has passed, and KillWait is left, which nothing here tells.
        """
        if self.end_time is None or self.as_of is None or self.state == JobState.COMPLETING:
            return None
        return self.end_time - self.as_of


@dataclass(frozen=True)
class QueuedJob:
    """A line of squeue: SLURM's words for state and reason, and when it began or is expected to, as SLURM writes it.

    Attributes:
        comment: words of the job's comment.
    """

    state: str = ""
    reason: str = ""
    start: str = ""
    comment: tuple[str, ...] = ()


def parse_show_job(text: str) -> JobFacts | None:
    """Read the first line of `scontrol show job -o`.

    Fields are NAME=VALUE with spaces in between, and values with spaces cannot be told from the next field. The ones
    used here have none; names and comments, which may, are not used.
    """
    fields: dict[str, str] = {}
    for word in text.partition("\n")[0].split():
        name, equals, value = word.partition("=")
        if equals:
            fields.setdefault(name, value)
    if "JobState" not in fields:
        return None
    return JobFacts(
        # While slurmctld hands a signal to the nodes it prints that in place of the state, for some milliseconds.
        state=fields["JobState"].replace(JobState.SIGNALING, JobState.RUNNING),
        reason=fields.get("Reason", ""),
        restarts=int(fields.get("Restarts", "0")),
        start_time=parse_time(fields.get("StartTime", "")),
        end_time=parse_time(fields.get("EndTime", "")),
        preempt_time=parse_time(fields.get("PreemptTime", "")),
        excluded=fields.get("ExcNodeList", "").replace("(null)", ""),
        nodes=fields.get("NodeList", "").replace("(null)", ""),
    )


def changed_dependency(text: str, job_id: str, successor: str | None) -> str | None:
    """Replace the job's success in a dependency as squeue prints it; return None if it does not have it.

    As in "afterok:12(unfulfilled),afterany:13(unfulfilled)": SLURM does not accept the parts in brackets as input.

    Args:
        successor: the job whose success counts instead; None: that of this one is certain. Then the result may be empty:
            nothing is waited for.
    """
    words, own = [re.sub(r"\(\w+\)", "", word) for word in re.split(r"([,?])", text)], f"afterok:{job_id}"
    if own not in words:
        return None
    if successor is not None:
        return "".join(f"afterok:{successor}" if word == own else word for word in words)
    return "" if "?" in words else ",".join(word for word in words[::2] if word != own)  # "?": one of them is enough
