"""Why a job waits, or is held: SLURM's word for it, with an explanation and what to do.

The words are those of SLURM's page "Job Reason Codes" (slurm.schedmd.com/job_reason_codes.html) and, with spaces in
them, of slurmctld itself. Limits come in families: Assoc... of the account, QOS... of the QOS. A word that is in no row
is shown as it is.
"""

from __future__ import annotations

import re

# Pattern of the whole word; what it means; what the person can do, with {run} for the run's id. The first that fits counts.
# {0} is whose limit it is, from the pattern's group.
REASONS = (
    # Held.
    ("JobHeldUser", "its owner has held it", "`requeue {run}` releases it"),
    ("JobHeldAdmin", "an administrator has held it", "only an administrator can release it"),
    ("launch failed requeued held", "a node could not start it", "`requeue {run}` tries again"),
    ("job requeued in held state|RequeueExitHold", "it was requeued and held", "`requeue {run}` releases it"),
    ("JobHoldMaxRequeue", "it has reached the cluster's limit on requeues", "`requeue {run}` releases it"),
    # Its turn has not come.
    ("None|WaitingForScheduling|SchedDefer", "SLURM has not looked at it yet", ""),
    ("Priority", "jobs of higher priority come first", ""),
    ("Resources", "it is next in the queue and waits for free resources", ""),
    ("BeginTime", "its begin time has not been reached", "`requeue {run}` starts it now"),
    ("JobArrayTaskLimit", "its sweep has reached its limit of parallel points", ""),
    ("Reservation", "its reservation has not begun, or is full", ""),
    # Other jobs.
    ("Dependency", "a job that it waits for has not ended", ""),
    ("DependencyNeverSatisfied", "a run that it waits for has failed, so it will never start", "`cancel {run}`"),
    # Nodes and partitions.
    (
        "ReqNodeNotAvail.*[Mm]aintenance.*",
        "its nodes are reserved for maintenance before it would end",
        "a shorter cluster.time_limit_min may fit in before the maintenance; otherwise it starts afterwards",
    ),
    ("ReqNodeNotAvail.*|NodeDown", "a node that it needs is down, drained or reserved", "`sinfo -R` says why"),
    (
        "Nodes required for job are DOWN, DRAINED.*",
        "its nodes are down, drained or reserved for higher partitions",
        "`sinfo -R` says why",
    ),
    (
        "PartitionNodeLimit|Partition(?:Min|Max)Nodes|PartitionConfig",
        "its partition does not offer that number or kind of nodes",
        "`cancel {run}`; submit with other cluster.nodes, cluster.spare_nodes or cluster.partition",
    ),
    (
        "PartitionTimeLimit",
        "its time limit exceeds that of its partition",
        "`cancel {run}`; submit with a shorter cluster.time_limit_min",
    ),
    ("PartitionDown|PartitionInactive", "its partition starts no jobs at present", "`sinfo` shows those that do"),
    (
        "BadConstraints",
        "no node meets its requirements",
        "`cancel {run}`; submit with another cluster.constraint (`sinfo -o '%N %f %G'` shows what there is)",
    ),
    # Limits on who may run, and how much. Counted time is resources times minutes.
    ("InvalidAccount|AccountNotAllowed", "its account may not run there", "`cancel {run}`; set cluster.account"),
    ("InvalidQOS|QOSNotAllowed", "its QOS may not run there", "`cancel {run}`; set cluster.qos"),
    (
        "(Assoc|QOS)Grp.*RunMinutes.*",
        "the running jobs of its {0} have reached its limit on remaining time",
        "it starts when they have ended",
    ),
    ("(Assoc|QOS)Grp.*(?:Minutes|Wall).*", "the time of its {0} is used up", "ask your admins for more"),
    ("(Assoc|QOS)Grp.*", "all jobs of its {0} together have reached the limit", "it starts when some have ended"),
    (
        "(Assoc|QOS)Max(?:(?:Submit)?Jobs?(?:PerUser)?Limit|.*PerUser(?:Limit)?)",
        "your jobs have reached the limit of its {0}",
        "it starts when some have ended",
    ),
    (
        "(Assoc|QOS)Max.*",
        "it requests more than its {0} allows for a single job",
        "`cancel {run}`; ask for less",
    ),
    # Faults.
    ("JobLaunchFailure|SystemFailure|BootFail", "it could not be started", "ask who runs the cluster"),
)
OF_WHOM = {"Assoc": "account", "QOS": "QOS"}


def is_held(reason: str) -> bool:
    """Return whether the job starts only when somebody releases it."""
    return re.search("[Hh]eld|Hold", reason) is not None  # QOSUsageThreshold is none of them


def in_words(reason: str, run_id: str) -> str:
    """Explain a reason: "its begin time has not been reached (BeginTime); `requeue ID` starts it now"."""
    plain = reason.replace("_", " ")  # scontrol has no spaces in it
    for pattern, meaning, advice in REASONS:
        match = re.fullmatch(pattern, plain)
        if match is not None:
            words = meaning.format(*(OF_WHOM.get(group, "") for group in match.groups()))
            words += f" ({reason})" if reason != "None" else ""
            return f"{words}; {advice.format(run=run_id)}" if advice else words
    return reason
