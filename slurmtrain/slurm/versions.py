"""Differences between versions of SLURM that this package has to know: one row each, with the release that began it.

Nothing else compares versions. Each row was seen on the releases that it names, or read in SLURM's source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int]  # (24, 5) is 24.05


def release(version: Version) -> str:
    """Return the name of a release, such as "24.05"."""
    return f"{version[0]}.{version[1]:02d}"


@dataclass(frozen=True)
class Difference:
    """A behaviour of SLURM since a release.

    Attributes:
        since: the first release with it.
        what: description of the behaviour.
        seen: releases on which it was seen, and older ones on which it was seen to be absent.
        until: the first release without it again; None: it is still there.
    """

    since: Version
    what: str
    seen: str
    until: Version | None = None

    def applies_to(self, version: Version | None) -> bool:
        """Return whether a cluster of this version has the behaviour.

        An unknown version (None) counts as a current one.
        """
        if version is None:
            return self.until is None
        return version >= self.since and (self.until is None or version < self.until)


PREEMPT_PARAMETERS = Difference(
    (23, 2),
    "documents PreemptParameters=send_user_signal for SlurmctldParameters=preempt_send_user_signal, which it still takes",
    "22.05.8 knows the old one alone; 23.11.11, 24.11.7, 25.05.9 the new; 23.02 to 25.11 both by their source",
)
SLURMD_NEEDS_CGROUP = Difference(
    (23, 11),
    "slurmd initialises its cgroup plugin even where nothing uses cgroups, and fails where it may not write to cgroup v2",
    "22.05.8 not; 23.11.11, 25.05.9",
)
CGROUP_PLUGIN_DISABLED = Difference(
    (24, 5),
    "takes CgroupPlugin=disabled in cgroup.conf",
    "23.11.11 refuses it; 24.11.7, 25.05.9 take it; 24.05 by its source",
)
STARTS_PREEMPTED_JOBS_ONCE_MORE = Difference(
    (24, 5),
    "marks a job when the grace time of a preemption begins, and takes the job's next end for that preemption. Neither "
    "`scontrol requeue` nor an exit code takes the mark off, only a requeue that slurmctld makes of such an end. So a job that "
    "was requeued in its grace time is started once more after its end (PreemptMode=REQUEUE), or ends as PREEMPTED (CANCEL), "
    "as does one with Requeue=0, whatever its exit code",
    "22.05.8, 23.11.11 not; 24.11.7, 25.05.9; 24.05 by its source (commit a689104d15)",
)
TIME_BEFORE_STEP_ERRORS = Difference(
    (25, 5),
    "slurmstepd's lines in a job's log begin with a time: '[2026-11-22T14:00:00.123] error: *** JOB 3 ON n0 ...'",
    "22.05.8, 24.11.7 not: 'slurmstepd-n0: error: *** JOB 3 ON n0 ...'; 25.05.9",
)
SRUN_FORGETS_CPUS_PER_TASK = Difference(
    (22, 5),
    "srun ignores --cpus-per-task of sbatch (SLURM_CPUS_PER_TASK): without an option of its own, each rank gets one CPU",
    "22.05.8; CHANGELOG of 22.05 and 23.11",
    until=(23, 11),
)
SRUN_COMPARES_CPUS_PER_TASK = Difference(
    (23, 11),
    "sbatch also sets SLURM_TRES_PER_TASK=cpu=N, and srun fails with 'set by two different environment variables' if "
    "only SLURM_CPUS_PER_TASK was changed; an option of srun overrides both",
    "25.05's source (slurm_opt.c); CHANGELOG of 23.11",
)
STEPS_MANAGED_ON_THE_NODE = Difference(
    (24, 5),
    "SlurmctldParameters=enable_stepmgr (or --stepmgr) lets the job's first node manage its steps, and slurmctld does not know "
    "them: `scontrol show step` asks that node. It saves the controller jobs of many steps; a run has one to three",
    "not run here; 24.05 to 25.11 by their source (job_step_info.c)",
)
SEGMENTS = Difference(
    (24, 5),
    "sbatch takes --segment, for topology/block",
    "22.05.8 not; 24.11.7; 24.05 by its CHANGELOG",
)
TOPOLOGIES_IN_YAML = Difference(
    (25, 5),
    "topology.yaml gives partitions topologies of their own, and goes before TopologyPlugin, which then says nothing",
    "not run here; 25.05 and 25.11 by their manual page and source (interfaces/topology.c)",
)
PERCENT_SIGNS_READ_TWICE = Difference(
    (25, 11),
    "srun replaces patterns in the name of an output file, and slurmstepd does so once more: %% becomes % and then begins a "
    "pattern, so that a % in a folder has to be written four times. sbatch's own files are read once, as ever",
    "22.05.8 not; 25.11.8; 26.05 by its source (srun/fname.c)",
)
EXPEDITED_REQUEUE = Difference(
    (25, 11),
    "--requeue=expedite (with SlurmctldParameters=enable_expedited_requeue) starts a job again at once and before all others "
    "when a node has failed. But every other requeue of such a job, by `scontrol requeue` too, is held unless an epilog has "
    "failed, and an exit code other than 0 is such a requeue: a run that is told to stop would wait for ever",
    "not run here; 25.11 by its source (job_mgr.c, batch_requeue_fini and _set_job_requeue_exit_value)",
)
REQUEUE_DELAY = Difference(
    (25, 11),
    "SchedulerParameters=requeue_delay=SECONDS says how long a requeued job waits, instead of the 121 s of cred_expire",
    "not run here; 25.11 by its manual page",
)


def parse_version(text: str) -> Version | None:
    """Return the release in "slurm-wlm 22.05.8", "slurm 24.11.0-0rc1" or "25.05.9"; None if there is none."""
    match = re.search(r"\b(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
