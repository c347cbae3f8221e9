"""begin and again: for the batch script. See requeue.mode and sweep.pack.

`begin` prints "done" or "end" where a job that starts has nothing left to do for a run; the jobs of its chain after it are
taken out of the queue. `again` submits the run's next job.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.errors import ClusterError
from slurmtrain.rundir import RunDir
from slurmtrain.runtime import begin, chain
from slurmtrain.runtime.settle import own_job_id, own_restart_count
from slurmtrain.runtime.slurm import SlurmClient


def main(verb: str, words: list[str]) -> int:
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    if verb == "again":
        parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args(words)
    run_dir, job_id = RunDir(options.run_dir), own_job_id()
    return _begin(run_dir, job_id) if verb == "begin" else _again(run_dir, options.attempt, job_id)


def _begin(run_dir: RunDir, job_id: str | None) -> int:
    restart_count = own_restart_count()
    in_chain = bool(chain.links(run_dir.info()))
    over = chain.ended_before(run_dir) if in_chain else begin.ended_before(run_dir, job_id, restart_count)
    if over is not None:
        print(f"slurmtrain: run {run_dir.id} has ended before this start of job {job_id}: {over}", file=sys.stderr)
        if restart_count:
            with contextlib.suppress(OSError):  # a full disk must not start what has ended
                begin.record_leaving(run_dir, job_id)
        cancel_rest(run_dir, job_id)
        print(over)
    return 0


def cancel_rest(run_dir: RunDir, job_id: str | None) -> None:
    """Take the rest of the chain out of the queue; where SLURM refuses, each job finds out when it starts."""
    try:
        chain.cancel_rest(run_dir, job_id, SlurmClient())
    except ClusterError as error:
        print(f"slurmtrain: cannot cancel the rest of the chain: {error.message}", file=sys.stderr)


def _again(run_dir: RunDir, number: int, job_id: str | None) -> int:
    from slurmtrain.launch.again import submit_again

    new = submit_again(run_dir, number, job_id or "", SlurmClient())
    if new is None:
        print("slurmtrain: cancelled: not submitted again", file=sys.stderr)
    else:
        print(f"slurmtrain: submitted again as job {new}", file=sys.stderr)
    return 0
