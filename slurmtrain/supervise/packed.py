"""Runs that share a job (sweep.pack): each is supervised in a process of its own, and those that continue do so together."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from slurmtrain.choices import RequeueMode
from slurmtrain.errors import EXIT_REQUEUE, SlurmtrainError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.loop import supervise
from slurmtrain.supervise.platforms.slurm import SlurmJob

log = logging.getLogger(__name__)


def supervise_together(run_dirs: Sequence[RunDir], submitted: Mapping[str, str] | None, failure: str | None) -> int:
    """Supervise runs of one job and requeue it for those that are to continue, when the last one has left.

    Args:
        submitted: as for `SlurmJob`.
        failure: as for `supervise`.

    Returns:
        The exit code of the job: EXIT_REQUEUE, or the highest of the runs.
    """
    jobs = [SlurmJob(run_dir, submitted, sharing=len(run_dirs)) for run_dir in run_dirs]
    processes = []
    for run_dir, job in zip(run_dirs, jobs, strict=True):
        pid = os.fork()
        if pid == 0:
            _alone(run_dir, job, failure)
        processes.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]
    going_on = [run_dir for run_dir, code in zip(run_dirs, codes, strict=True) if code == EXIT_REQUEUE]
    if going_on and jobs[0].config.requeue.mode == RequeueMode.REQUEUE:
        jobs[0].let_go_on([(run_dir, run_dir.attempt_numbers()[-1]) for run_dir in going_on])
        return EXIT_REQUEUE
    return max(code if code >= 0 else 128 - code for code in codes)


def _alone(run_dir: RunDir, job: SlurmJob, failure: str | None) -> None:
    code = 1
    try:
        code = supervise(run_dir, job, failure)
    except SlurmtrainError as error:
        print(f"slurmtrain: error: {error}", file=sys.stderr)
        code = error.exit_code
    except Exception:
        log.exception("run %s cannot be supervised", run_dir.id)
    finally:
        sys.stderr.flush()
        os._exit(code)
