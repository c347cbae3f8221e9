"""What stopping and resuming a run needs: the right to do it alone, its jobs in the queue, and its SLURM."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from slurmtrain.choices import Backend
from slurmtrain.errors import ClusterError
from slurmtrain.report.status.state import RunState
from slurmtrain.runs import lookup
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system.file_claims import claimed
from slurmtrain.system.process_mark import ProcessMark

log = logging.getLogger(__name__)


@contextlib.contextmanager
def claimed_alone(run_dir: RunDir) -> Iterator[None]:
    """Claim the right to resume this run.

    A process that finds it ended must record its next job before another process looks.
    """

    def busy(owner: ProcessMark) -> None:
        who = f"process {owner.pid} on {owner.host}"
        if run_dir.info()["backend"] == Backend.LOCAL:  # it is at it until the run has ended
            raise ClusterError(f"{who} is already running {run_dir.id}", hint=f"status {run_dir.id}")
        log.info("%s is resuming it; waiting for that", who)

    with claimed(claim_folder(run_dir), busy):
        yield


def claim_folder(run_dir: RunDir) -> Path:
    """Return the folder of the claim to resume the run: that of all runs of a sweep, which `sweep retry` resumes together."""
    in_sweep = lookup.is_sweep(run_dir.path.parent) and run_dir.info()["backend"] == Backend.SLURM
    return run_dir.path.parent / "arrays" if in_sweep else run_dir.path


def jobs_in_queue(run_dir: RunDir, now: RunState) -> list[str]:
    """Return all jobs of the run that SLURM still has; none if it has no jobs, or SLURM cannot be asked."""
    if run_dir.info()["backend"] == Backend.LOCAL or now.slurm_error is not None:
        return []
    from slurmtrain.launch.own_jobs import in_queue

    return in_queue([run_dir], client(run_dir))[run_dir.id]


def has_no_job(run_dir: RunDir, now: RunState) -> bool:
    """Return whether the run is not a job of SLURM."""
    return run_dir.info()["backend"] == Backend.LOCAL or now.job_id is None


def client(run_dir: RunDir) -> SlurmClient:
    """Return the client of the SLURM that the run was submitted to."""
    return SlurmClient(run_dir.slurm_conf())
