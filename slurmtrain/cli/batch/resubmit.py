"""resubmit: for the batch script. Let a run go on: SLURM requeues its job, or the run's next job is submitted.

See requeue.mode and sweep.pack.
"""

from __future__ import annotations

import logging
from pathlib import Path

from slurmtrain.choices import RequeueMode
from slurmtrain.cli.arguments import Parser
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import ClusterError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id, own_restart_count

log = logging.getLogger(__name__)


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path, nargs="+")
    parser.add_argument("--attempt", type=int, help="of a single run; default: the last one of each")
    options = parser.parse_args(words)
    job_id = own_job_id()
    runs = [RunDir(path) for path in options.run_dir]
    return _resubmit([(run, options.attempt or run.attempt_numbers()[-1]) for run in runs], job_id or "")


def _resubmit(runs: list[tuple[RunDir, int]], job_id: str) -> int:
    from slurmtrain.launch.resubmit import requeue, submit_each_again

    config = load_frozen(runs[0][0].config_file, with_secrets=False)
    in_new_job = False
    if len(runs) == 1 and runs[0][0].next_change_file.exists():
        from slurmtrain.launch.next_change import apply_next_change

        in_new_job = apply_next_change(runs[0][0])  # this job has the script of before
    if not in_new_job and config.requeue.mode == RequeueMode.REQUEUE:
        delay_s = config.requeue.restart_delay_s
        try:
            log.info(requeue(runs, job_id, SlurmClient(), restart_count=own_restart_count(), delay_s=delay_s))
        except ClusterError as error:  # 0: all has been tried that the script could try
            resume = ", ".join(f"resume {run_dir.id}" for run_dir, _ in runs)
            named = (error.hint or "").startswith("continue with: ")  # of a pack: only those runs that have no job
            hint = error.hint if named else f"continue with: {resume}"
            log.error("job %s is not requeued: %s; %s", job_id, error.message, hint)
        return 0
    log.info(submit_each_again(runs, job_id, SlurmClient()))
    return 0
