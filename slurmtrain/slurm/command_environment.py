"""The environment for SLURM's commands: where SLURM is and who asks, and nothing that changes the answer.

Also whether a slurm.conf that a record names may be used: its plugins run as whoever reads it.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.errors import ClusterError
from slurmtrain.system import files
from slurmtrain.system.node_copies import without_copies

# Variables that the commands read, by the getenv() calls of SLURM's sources (22.05 to 26.05). First those that say
# where SLURM is and who asks: they stay as the person has set them.
REACHED_BY = (
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_CLUSTERS",
    "SLURM_JWT",
    "SLURM_SACK_SOCKET",
    "SLURM_SACK_KEY",
    "SLURM_SACK_JWKS",
)
# Other variables with these prefixes were set by SLURM for a job, or change the form of answers (SLURM_TIME_FORMAT,
# ...).
OF_JOBS = ("SLURM_", "SUBMITIT_", "SLURMTRAIN_", "PMI_", "PMIX_", "SRUN_")
# A person's defaults for the commands that query and control jobs: which jobs they see, and how they print them.
OF_QUERIES = ("SQUEUE_", "SCONTROL_", "SCANCEL_", "SINFO_", "SACCT_")
# What another launcher, around the shell that submits, has told its own ranks: ours must not take it for theirs.
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "NODE_RANK")
# PMIX_MCA_ and OMPI_MCA_ are settings of a site.
OF_LAUNCHERS = (
    "MASTER_",
    "PET_",
    "TORCHELASTIC_",
    "PMI_",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMIX_SERVER_",
    "OMPI_COMM_WORLD_",
)
PREFIX_FILE = "slurm-prefix"  # beside a slurm.conf: the prefix of the SLURM that it is for


def clean_environment(variables: Mapping[str, str], slurm_conf: str | None = None) -> dict[str, str]:
    """Return the environment for SLURM's commands.

    It has the variables that say where SLURM is and who asks, but none that change the answer.

    A leftover SQUEUE_PARTITION would hide jobs that run, and SLURM_MEM_PER_NODE would change the job that is submitted.

    Args:
        slurm_conf: slurm.conf of the cluster to ask; None: the one that the variables name.
    """
    kept = {name: value for name, value in variables.items() if not name.startswith(OF_QUERIES)}
    return submission_environment(kept, slurm_conf)


def submission_environment(variables: Mapping[str, str], slurm_conf: str | None = None) -> dict[str, str]:
    """Return the environment for sbatch, which passes its own on to the job: the person's defaults for queries stay in it."""
    kept = {name: value for name, value in without_copies(variables).items() if not belongs_to_a_job(name)}
    if slurm_conf is not None and slurm_conf != variables.get("SLURM_CONF"):
        # Another cluster than the shell's: its controllers, its tokens and its names of clusters mean nothing there.
        kept = {name: value for name, value in kept.items() if name not in (*REACHED_BY, "SBATCH_CLUSTERS")}
        kept["SLURM_CONF"] = slurm_conf
    programs = programs_beside(kept.get("SLURM_CONF"))
    if programs is not None:
        kept["PATH"] = path_with(programs, kept.get("PATH"))
    if "SBATCH_CLUSTERS" in kept:  # the other commands have to look for jobs where sbatch sends them
        kept.setdefault("SLURM_CLUSTERS", kept["SBATCH_CLUSTERS"])
    return kept


def programs_beside(slurm_conf: str | None) -> str | None:
    """Return the folder of the commands that belong to a slurm.conf, if a file beside it names their prefix.

    A sandbox of another SLURM than the one on PATH has such a file. One that somebody else may have written does not
    count.
    """
    if not slurm_conf:  # also SLURM_CONF=
        return None
    try:
        descriptor = os.open(Path(slurm_conf).with_name(PREFIX_FILE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor) as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.getuid(), 0) or info.st_mode & 0o022:
            return None
        prefix = file.readline(4096).rstrip("\n")
    return f"{prefix}/bin" if prefix.startswith("/") else None


def path_with(folder: str, path: str | None) -> str:
    """Return PATH with this folder before all others."""
    return os.pathsep.join([folder, *(each for each in (path or os.defpath).split(os.pathsep) if each != folder)])


def belongs_to_a_job(name: str) -> bool:
    """Return whether a variable belongs to the surrounding job, so that a job submitted from inside it must not inherit it."""
    return name.startswith(OF_JOBS) and name not in (*REACHED_BY, "SLURMTRAIN_RUNS")


def is_of_ranks(name: str) -> bool:
    """Return whether a variable belongs to the surrounding job, or was set by a launcher for its own ranks."""
    return belongs_to_a_job(name) or name in OF_RANKS or name.startswith(OF_LAUNCHERS)


def trusted_slurm_conf(conf: str | None, *, named_by: Path, known: dict[str, str | None] | None = None) -> str | None:
    """Return the slurm.conf that a record names, if only users whom this user has to trust can have written both.

    Args:
        conf: its path; None: this machine's own.
        named_by: the record.
        known: as for `files.why_distrusted`.

    Raises:
        ClusterError: somebody else can have written one of them.
    """
    if conf is None or conf == os.environ.get("SLURM_CONF"):
        return conf
    why = files.why_distrusted(named_by, known)
    if why is not None and files.only_mine(named_by):
        why = None
    if why is None and os.path.lexists(conf):
        why = files.why_distrusted(conf, known)
    if why is not None:
        raise ClusterError(
            f"{named_by} names {conf}, which is not used, because it may be somebody else's work: {why}",
            hint=f"if you trust it: export SLURM_CONF={shlex.quote(conf)}",
        )
    return conf
