"""The jobs of a run that SLURM still has: all that it was submitted as, not only the latest.

A run can have several: one that a requeue by hand has revived, one that continues after a stop and was never noted, the
rest of a chain. A command that ends a run, or starts it once more, has to know all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurmtrain.runs.job_tokens import is_anothers, named_in, names_of
from slurmtrain.runs.lookup import is_sweep
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_states import GONE


def in_queue(run_dirs: Sequence[RunDir], client: SlurmClient) -> dict[str, list[str]]:
    """Return the jobs of each run that have not ended, by the run's id, in the order of their submission; two squeue calls.

    A job that other runs share (sweep.pack) is left out: it does not end with one run. So is a job that has the id of
    an earlier job of the run, but names another run or sweep in its comment.

    Raises:
        ClusterError: squeue is missing, or the controller does not answer.
    """
    shared = _shared_jobs(run_dirs)
    noted = {
        run_dir.id: [job for job in map(str, run_dir.info()["job_ids"]) if job.partition("_")[0] not in shared]
        for run_dir in run_dirs
    }
    comments = client.comments() if run_dirs else {}
    by_run = _by_run(comments)
    queue = client.queue({job for jobs in noted.values() for job in jobs})
    found = {}
    for run_dir in run_dirs:
        jobs, names = noted[run_dir.id], names_of(run_dir)
        left = [job for job in jobs if job in queue and queue[job].state not in GONE]
        own = [job for job in left if not is_anothers(comments.get(job.partition("_")[0], ()), names)]
        found[run_dir.id] = [*own, *(job for job in by_run.get(run_dir.id, []) if job not in jobs)]
    return found


def _by_run(comments: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the jobs that have a token in their comment, by the id of the run that it names."""
    found: dict[str, list[str]] = {}
    for job, words in comments.items():
        for run_id in named_in(words):
            found.setdefault(run_id, []).append(job)
    return found


def _shared_jobs(run_dirs: Sequence[RunDir]) -> set[str]:
    folders = {run_dir.path.parent for run_dir in run_dirs}
    sweeps = [Sweep(folder) for folder in folders if is_sweep(folder)]
    jobs = [sweep.job_id(number) for sweep in sweeps if sweep.pack > 1 for number in sweep.array_numbers()]
    return {job for job in jobs if job is not None}
