"""take-run: for the batch script. Print "taken" if this job is the first that starts of a run with cluster.choices.

The jobs of the other choices are taken out of the queue then. Otherwise it prints "leave".
"""

from __future__ import annotations

import socket
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.errors import ClusterError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.take_run import take_or_leave
from slurmtrain.slurm.environment import own_job_id


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("choice")
    options = parser.parse_args(words)
    job_id = own_job_id()
    if job_id is None:
        raise ClusterError("take-run is for the batch script of a job", hint="sbatch starts it")
    try:
        taken = take_or_leave(RunDir(options.run_dir), options.choice, job_id)
    except OSError as error:
        raise ClusterError(
            f"{options.run_dir} cannot be taken from {socket.gethostname()}: {error.strerror}",
            hint="is its file system mounted and writable here? the next job of the run that starts tries it",
        ) from None
    print("taken" if taken else "leave")
    return 0
