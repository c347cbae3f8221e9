"""Which jobs of a run SLURM still has: all that it was submitted as, not only the latest.

A run can have several: the one that a requeue by hand has revived, the one that carries on after a stop and was never noted,
the rest of a chain. Whoever ends a run, or starts it once more, has to know of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurmtrain.launch.handover import TOKEN_PREFIX
from slurmtrain.launch.sweep import Sweep
from slurmtrain.rundir import RunDir, is_sweep
from slurmtrain.runtime.slurm import GONE, SlurmClient


def in_queue(run_dirs: Sequence[RunDir], client: SlurmClient) -> dict[str, list[str]]:
    """Find the jobs of each run that have not ended, by the run's id, in the order of their submission; two squeue calls.

    A job that other runs share (sweep.pack) is none of them: it does not end with one run.

    Raises:
        ClusterError: squeue is missing, or the controller does not answer.
    """
    shared = _shared_jobs(run_dirs)
    noted = {
        run_dir.id: [job for job in map(str, run_dir.info()["job_ids"]) if job.partition("_")[0] not in shared]
        for run_dir in run_dirs
    }
    unnoted = _by_token(client) if run_dirs else {}
    queue = client.queue({job for jobs in noted.values() for job in jobs})
    found = {}
    for run_id, jobs in noted.items():
        left = [job for job in jobs if job in queue and queue[job].state not in GONE]
        found[run_id] = [*left, *(job for job in unnoted.get(run_id, []) if job not in jobs)]
    return found


def _by_token(client: SlurmClient) -> dict[str, list[str]]:
    """The user's jobs that have a token in their comment, by the id of the run that it names."""
    found: dict[str, list[str]] = {}
    for job, words in client.comments().items():
        for word in words:
            run_id, colon, _ = word.removeprefix(TOKEN_PREFIX).rpartition(":")
            if word.startswith(TOKEN_PREFIX) and colon:
                found.setdefault(run_id, []).append(job)
    return found


def _shared_jobs(run_dirs: Sequence[RunDir]) -> set[str]:
    folders = {run_dir.path.parent for run_dir in run_dirs}
    sweeps = [Sweep(folder) for folder in folders if is_sweep(folder)]
    jobs = [sweep.job_id(number) for sweep in sweeps if sweep.pack > 1 for number in sweep.array_numbers()]
    return {job for job in jobs if job is not None}
