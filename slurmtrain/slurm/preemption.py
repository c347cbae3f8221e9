"""How a job is preempted here, and how long it lives on then: pure functions of a cluster's facts."""

from __future__ import annotations

from dataclasses import dataclass

from slurmtrain.slurm.facts import ClusterFacts, Partition
from slurmtrain.slurm.job_limits import association_of, qos_of
from slurmtrain.slurm.parse_values import parse_duration

NOT_AT_ALL = ("", "preempt/none", "(null)")  # of PreemptType


@dataclass(frozen=True)
class Preemption:
    """How jobs of a partition and a QOS are preempted.

    Attributes:
        mode: in SLURM's words: "OFF", "REQUEUE", "CANCEL" or "SUSPEND,GANG"; "": not known.
        grace_s: seconds from the announcement to the end; None: not known.
        of: whose settings these are: "partition low", "QOS cheap".
    """

    mode: str
    grace_s: float | None
    of: str

    @property
    def ends_jobs(self) -> bool:
        """Whether a preempted job ends, rather than being suspended, or left alone."""
        return self.mode in ("REQUEUE", "CANCEL")


@dataclass(frozen=True)
class PreemptionTimes:
    """The times for which a job lives on when it is preempted, in seconds; None when it is not, or when they are not known.

    Attributes:
        kill_wait_s: seconds from SIGTERM at the end to SIGKILL, also at the time limit.
        grace_s: seconds from the announcement to that SIGTERM.
        grace_of: origin of that setting: "partition low", "QOS cheap".
    """

    kill_wait_s: float | None = None
    grace_s: float | None = None
    grace_of: str = ""


def preemption_of(
    facts: ClusterFacts, partition: Partition, *, account: str | None = None, qos: str | None = None
) -> Preemption:
    """Return how a job of this partition, account and QOS is preempted; None: the default ones."""
    cluster = facts.config.get("PreemptMode", "").upper()
    if facts.config.get("PreemptType", "") != "preempt/qos":
        return Preemption(partition.preempt_mode.upper() or cluster, partition.grace_s, f"partition {partition.name}")
    its = qos_of(facts, association_of(facts, account, partition.name), qos)
    if its is None:
        return Preemption(cluster, None, f"QOS {qos}" if qos else "its QOS")
    mode = its.preempt_mode.upper()
    return Preemption(cluster if mode in ("", "CLUSTER") else mode, its.grace_s, f"QOS {its.name}")


def preemption_times(
    facts: ClusterFacts, partition: str | None, *, account: str | None = None, qos: str | None = None
) -> PreemptionTimes | None:
    """Return the times of a job in this partition, account and QOS; None when SLURM has said nothing.

    Args:
        partition: of several names, separated by commas, the first counts: where the job will run is not known yet. None: the
            default one.
        account, qos: None: the default ones.
    """
    if not facts.config:
        return None
    kill_wait_s = parse_duration(facts.config.get("KillWait", ""))
    its = facts.partition(first_partition(partition))
    if its is None or facts.config.get("PreemptType", "") in NOT_AT_ALL:
        return PreemptionTimes(kill_wait_s)
    found = preemption_of(facts, its, account=account, qos=qos)
    if not found.ends_jobs or (found.grace_s is None and qos is None):
        return PreemptionTimes(kill_wait_s)
    return PreemptionTimes(kill_wait_s, found.grace_s, found.of)


def first_partition(names: str | None) -> str | None:
    """Return the first of several partitions that a job may run in, as a person writes them: "high,low"."""
    return names.partition(",")[0] if names else None
