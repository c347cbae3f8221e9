"""begin and again: for the batch script. See requeue.mode and sweep.pack.

`begin` prints "done" or "end" where a job that starts has nothing left to do for a run; the jobs of its chain after it are
taken out of the queue. `again` lets the run go on: SLURM requeues its job, or the run's next job is submitted.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.config.compose import load_frozen
from slurmtrain.errors import ClusterError
from slurmtrain.rundir import RunDir
from slurmtrain.runtime import begin, chain
from slurmtrain.runtime.settle import own_job_id, own_restart_count
from slurmtrain.runtime.slurm import SlurmClient


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path, nargs="+" if verb == "again" else None)
    if verb == "again":
        parser.add_argument("--attempt", type=int, help="of a single run; default: the last one of each")
    options = parser.parse_args(words)
    job_id = own_job_id()
    if verb == "begin":
        return _begin(RunDir(options.run_dir), job_id)
    runs = [RunDir(path) for path in options.run_dir]
    return _again([(run, options.attempt or run.attempt_numbers()[-1]) for run in runs], job_id or "")


def _begin(run_dir: RunDir, job_id: str | None) -> int:
    restart_count = own_restart_count()
    in_chain = bool(chain.links(run_dir.info()))
    over = chain.ended_before(run_dir) if in_chain else begin.ended_before(run_dir, job_id, restart_count)
    if over is None and not restart_count:
        over = begin.scancelled_before(run_dir, job_id, SlurmClient())
    if over is None and (restart_count or in_chain):
        config = load_frozen(run_dir.config_file, with_secrets=False)
        over = begin.budget_used_up(run_dir, config, SlurmClient())
    if over is not None:
        print(f"slurmtrain: run {run_dir.id} has ended before this start of job {job_id}: {over}", file=sys.stderr)
        if restart_count:
            with contextlib.suppress(OSError):  # a full disk must not start what has ended
                begin.record_leaving(run_dir, job_id)
        cancel_rest(run_dir, job_id)
        print(over)
    return 0


def cancel_rest(run_dir: RunDir, job_id: str | None) -> None:
    """Take the rest of the chain out of the queue; if SLURM refuses, each of its jobs finds out when it starts."""
    try:
        chain.cancel_rest(run_dir, job_id, SlurmClient())
    except ClusterError as error:
        print(f"slurmtrain: cannot cancel the rest of the chain: {error.message}", file=sys.stderr)


def _again(runs: list[tuple[RunDir, int]], job_id: str) -> int:
    from slurmtrain.launch.again import requeue, submit_again

    config = load_frozen(runs[0][0].config_file, with_secrets=False)
    if config.requeue.mode == "requeue":
        delay_s = config.requeue.restart_delay_s
        try:
            said = requeue(runs, job_id, SlurmClient(), restart_count=own_restart_count(), delay_s=delay_s)
        except ClusterError as error:  # 0: all has been tried that the script could try
            resume = ", ".join(f"resume {run_dir.id}" for run_dir, _ in runs)
            said = f"error: job {job_id} is not requeued: {error.message}; continue with: {resume}"
        print(f"slurmtrain: {said}", file=sys.stderr)
        return 0
    for run_dir, number in runs:
        new = submit_again(run_dir, number, job_id, SlurmClient())
        said = "cancelled: not submitted again" if new is None else f"submitted again as job {new}"
        print(f"slurmtrain: {said}", file=sys.stderr)
    return 0
