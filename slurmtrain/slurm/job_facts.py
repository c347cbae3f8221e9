"""What SLURM says of a job: its facts by `scontrol show job`, and its line of squeue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmtrain.slurm.job_states import JobState
from slurmtrain.slurm.parse_values import parse_time
from slurmtrain.system import records


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
    restarts: int = 0
    start_time: float | None = None
    end_time: float | None = None
    preempt_time: float | None = None
    excluded: str = ""
    nodes: str = ""
    as_of: float | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> JobFacts | None:
        """Return the facts in a record that this or another version has written; None if it does not tell the state.

        Fields that this version does not know, and values of another kind, are left out.
        """
        known = {name: value for name, value in values.items() if name in _FACTS and _FACTS[name].holds(value)}
        return cls(**known) if "state" in known else None

    @property
    def preempted(self) -> bool:
        """Whether SLURM has announced that it preempts this start of the job."""
        return self.preempt_time is not None and (self.start_time is None or self.preempt_time >= self.start_time)

    @property
    def seconds_left(self) -> float | None:
        """The seconds that it had left when SLURM said so; None if there is no end, or the time of the answer is not known."""
        return None if self.end_time is None or self.as_of is None else self.end_time - self.as_of


_FACTS = {
    "state": records.TEXT,
    "reason": records.TEXT,
    "restarts": records.COUNT,
    "start_time": records.TIME | records.NOTHING,
    "end_time": records.TIME | records.NOTHING,
    "preempt_time": records.TIME | records.NOTHING,
    "excluded": records.TEXT,
    "nodes": records.TEXT,
    "as_of": records.TIME | records.NOTHING,
}


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
