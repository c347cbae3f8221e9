"""Read values as SLURM's commands print them: lines of NAME = VALUE, durations, times and versions; and how versions differ."""

from __future__ import annotations

import re
import time


def parse_show_config(text: str) -> dict[str, str]:
    """Read `scontrol show config`: a line each, NAME = VALUE."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def parse_duration(text: str) -> float | None:
    """Return seconds from a duration as SLURM writes it: "30 sec", "30", "00:00:30", "1-00:00:00"; None if it is none."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):(\d+):)?(\d+)(?: sec)?", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_time(text: str) -> float | None:
    """Return unix seconds from SLURM's time stamps, local or in unix seconds; "Unknown", "None" and "N/A" are None."""
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


# Differences between versions of SLURM that this package has to know: each with the release that began it. Nothing else
# compares versions. Each was seen on the releases that its comment names, or read in SLURM's source.

Version = tuple[int, int]  # (24, 5) is 24.05


def does(version: Version | None, behaviour: Version) -> bool:
    """Return whether a cluster of this version has a behaviour; an unknown version (None) counts as a current one."""
    return version is None or version >= behaviour


# slurmd initialises its cgroup plugin even where nothing uses cgroups, and fails where it may not write to cgroup v2.
# 22.05.8 not; 23.11.11, 25.05.9. It takes CgroupPlugin=disabled in cgroup.conf: 23.11.11 refuses it; 24.11.7, 25.05.9 take it;
# 24.05 by its source.
CGROUP_PLUGIN_DISABLED = (24, 5)

# It marks a job when the grace time of a preemption begins, and takes the job's next end for that preemption. Neither
# `scontrol requeue` nor an exit code takes the mark off, only a requeue that slurmctld makes of such an end. So a job that was
# requeued in its grace time is started once more after its end (PreemptMode=REQUEUE), or ends as PREEMPTED (CANCEL), as does
# one with Requeue=0, whatever its exit code.
# 22.05.8, 23.11.11 not; 24.11.7, 25.05.9; 24.05 by its source (commit a689104d15).
STARTS_PREEMPTED_JOBS_ONCE_MORE = (24, 5)


def parse_version(text: str) -> Version | None:
    """Return the release in "slurm-wlm 22.05.8", "slurm 24.11.0-0rc1" or "25.05.9"; None if there is none."""
    match = re.search(r"\b(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
