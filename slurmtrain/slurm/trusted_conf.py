"""Decide whether a slurm.conf that a record names may be used: its plugins run as whoever reads it."""

from __future__ import annotations

import os
import pwd
import shlex
from pathlib import Path

from slurmtrain.errors import ClusterError
from slurmtrain.system import trust


def trusted_slurm_conf(conf: str | None, *, named_by: Path, known: dict[str, str | None] | None = None) -> str | None:
    """Return the slurm.conf that a record names, if only users whom this user has to trust can have written both.

    The account `slurm`, as which slurmctld runs on most clusters, decides what root's slurmd starts. So it may own the
    file, in a folder that root has given it.

    Args:
        conf: its path; None: this machine's own.
        named_by: the record.
        known: as for `trust.why_distrusted`.

    Raises:
        ClusterError: somebody else can have written one of them.
    """
    if conf is None or conf == os.environ.get("SLURM_CONF"):
        return conf
    why = trust.why_distrusted(named_by, known)
    if why is not None and trust.only_mine(named_by):
        why = None
    if why is None and os.path.lexists(conf):
        why = trust.why_distrusted(conf, known)
        if why is not None and _is_of_slurm(conf):
            why = None
    if why is not None:
        raise ClusterError(
            f"{named_by} names {conf}, which is not used, because it may be somebody else's work: {why}",
            hint=f"if you trust it: export SLURM_CONF={shlex.quote(conf)}",
        )
    return conf


def _is_of_slurm(path: str) -> bool:
    account = _slurm_account()
    return account is not None and trust.only_of_account(path, account)


def _slurm_account() -> int | None:
    try:
        return pwd.getpwnam("slurm").pw_uid
    except KeyError:
        return None
