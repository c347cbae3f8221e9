"""Runs that share a job (sweep.pack): each is supervised in a process of its own, and those that continue do so together.

In an array, the batch script has given each task its own of all runs.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping, Sequence

from slurmtrain.choices import RequeueMode
from slurmtrain.errors import EXIT_REQUEUE, SlurmtrainError
from slurmtrain.runs.ownership import require_own
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.loop import supervise
from slurmtrain.supervise.platforms.slurm import SlurmJob


def supervise_together(run_dirs: Sequence[RunDir], submitted: Mapping[str, str] | None, failure: str | None) -> int:
    """Supervise runs of one job and requeue it for those that are to continue, when the last one has left.

    Args:
        submitted: as for `SlurmJob`.
        failure: as for `supervise`.

    Returns:
        The exit code of the job: EXIT_REQUEUE, or the highest of the runs.
    """
    sharing, fork = len(run_dirs), multiprocessing.get_context("fork")
    processes = [fork.Process(target=_alone, args=(run_dir, submitted, sharing, failure)) for run_dir in run_dirs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode or 0 for process in processes]
    going_on = [run_dir for run_dir, code in zip(run_dirs, codes, strict=True) if code == EXIT_REQUEUE]
    job = SlurmJob(going_on[0], submitted, sharing=sharing) if going_on else None
    if job is not None and job.config.requeue.mode == RequeueMode.REQUEUE:
        job.let_go_on([(run_dir, run_dir.attempt_numbers()[-1]) for run_dir in going_on])
        return EXIT_REQUEUE
    return max(code if code >= 0 else 128 - code for code in codes)


def _alone(run_dir: RunDir, submitted: Mapping[str, str] | None, sharing: int, failure: str | None) -> None:
    try:  # what is wrong with one of the runs does not touch the others
        require_own(run_dir)
        sys.exit(supervise(run_dir, SlurmJob(run_dir, submitted, sharing=sharing), failure))
    except SlurmtrainError as error:
        print(f"slurmtrain: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
