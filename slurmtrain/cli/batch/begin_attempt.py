"""begin-attempt: for the batch script. Print "done" or "end" where a job that starts has nothing left to do for a run.

The jobs of its chain after it are taken out of the queue then. See requeue.mode. Print "change" where a job that SLURM has
started again by itself has another script than the run is to go on with (requeue RUN KEY=VALUE).
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import ClusterError
from slurmtrain.runs import chain
from slurmtrain.runs.reasons import Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime import begin_attempt
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id, own_restart_count
from slurmtrain.system.patience import RESTORE, patiently

log = logging.getLogger(__name__)

CHANGE = "change"


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    return _begin(RunDir(parser.parse_args(words).run_dir), own_job_id())


def _begin(run_dir: RunDir, job_id: str | None) -> int:
    restart_count = own_restart_count()

    def look() -> tuple[bool, Verdict | None]:
        in_chain = bool(chain.links(run_dir.info()))
        ended = chain.ended_before(run_dir) if in_chain else begin_attempt.ended_before(run_dir, job_id, restart_count)
        return in_chain, ended

    # A node that has just come up may not have its file systems right. Without an answer, the job trains what has ended.
    in_chain, over = patiently(look, RESTORE)
    if over is None and not restart_count:
        over = begin_attempt.scancelled_before(run_dir, job_id, SlurmClient())
    if over is None and (restart_count or in_chain):
        config = load_frozen(run_dir.config_file, with_secrets=False)
        over = begin_attempt.budget_used_up(run_dir, config, SlurmClient())
    if over is not None:
        log.info("run %s has ended before this start of job %s: %s", run_dir.id, job_id, over)
        if restart_count:
            with contextlib.suppress(OSError):  # a full disk must not start what has ended
                begin_attempt.record_leaving(run_dir, job_id)
        cancel_rest(run_dir, job_id)
        print(over)
    elif restart_count and run_dir.next_change_file.exists() and run_dir.attempt_numbers():
        from slurmtrain.launch.next_change import make_in_this_job

        if not make_in_this_job(run_dir):
            print(CHANGE)
    return 0


def cancel_rest(run_dir: RunDir, job_id: str | None) -> None:
    """Take the rest of the chain out of the queue; if SLURM refuses, each of its jobs finds out when it starts."""
    try:
        chain.cancel_rest(run_dir, job_id, SlurmClient())
    except ClusterError as error:
        log.warning("cannot cancel the rest of the chain: %s", error.message)
