"""finish-attempt: for the batch script. Prints the verdict on stdout, one word; a sentence for the log on stderr.

Where the ranks are to start again in the same job, options for srun follow that word: the nodes on which they do.
"""

from __future__ import annotations

import logging
from pathlib import Path

from slurmtrain.choices import RequeueMode
from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.batch.begin_attempt import cancel_rest
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.launched_program import as_started
from slurmtrain.launch.srun import srun_node_options
from slurmtrain.runs import chain
from slurmtrain.runs.attempts import read_attempt
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.finish_attempt import finish_attempt, free_dependents
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id

log = logging.getLogger(__name__)


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--exit-code", type=int, required=True)
    # The script says whether it can: the config may have been changed since it was written.
    parser.add_argument("--in-place", action="store_true", help="the ranks can be started again in this job")
    options = parser.parse_args(words)
    run_dir = RunDir(options.run_dir)
    config = load_frozen(run_dir.config_file, with_secrets=False)
    outcome = finish_attempt(
        run_dir, options.attempt, options.exit_code, config, SlurmClient(), can_start_again=options.in_place
    )
    log.info("run %s, attempt %d: %s", run_dir.id, options.attempt, outcome.sentence)
    print(outcome.verdict, *srun_node_options(as_started(config).cluster, outcome.nodes) if outcome.nodes else ())
    if outcome.verdict is Verdict.DONE:
        free_dependents(run_dir, read_attempt(run_dir, options.attempt), SlurmClient())
    over = outcome.verdict in (Verdict.DONE, Verdict.END) and outcome.reason is not Reason.SUPERSEDED
    if outcome.verdict is Verdict.NEXT:
        from slurmtrain.launch.node_exclusion import leave_out

        for link in chain.waiting_after(run_dir, own_job_id(), SlurmClient())[:1]:
            leave_out([run_dir], link, SlurmClient())
    if config.requeue.mode == RequeueMode.CHAIN and over:
        cancel_rest(run_dir, own_job_id())
    return 0
