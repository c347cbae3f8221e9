"""settle: for the batch script. Prints one word on stdout, the verdict; a sentence for the log on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

from slurmtrain.cli.again import cancel_rest
from slurmtrain.cli.arguments import Parser
from slurmtrain.config.compose import load_frozen
from slurmtrain.rundir import RunDir
from slurmtrain.runtime import chain
from slurmtrain.runtime.attempts import read_attempt
from slurmtrain.runtime.judge import Reason, Verdict
from slurmtrain.runtime.settle import free_dependents, own_job_id, settle
from slurmtrain.runtime.slurm import SlurmClient


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--exit-code", type=int, required=True)
    options = parser.parse_args(words)
    run_dir = RunDir(options.run_dir)
    config = load_frozen(run_dir.config_file, with_secrets=False)
    judgement = settle(run_dir, options.attempt, options.exit_code, config, SlurmClient())
    print(f"slurmtrain: run {run_dir.id}, attempt {options.attempt}: {judgement.sentence}", file=sys.stderr)
    print(judgement.verdict)
    if judgement.verdict is Verdict.DONE:
        free_dependents(run_dir, read_attempt(run_dir, options.attempt), SlurmClient())
    over = judgement.verdict in (Verdict.DONE, Verdict.END) and judgement.reason is not Reason.SUPERSEDED
    if judgement.bad_node is not None and judgement.verdict is Verdict.NEXT:
        from slurmtrain.launch.again import leave_out

        for link in chain.waiting_after(run_dir, own_job_id(), SlurmClient())[:1]:
            leave_out([(run_dir, options.attempt)], link, SlurmClient())
    if config.requeue.mode == "chain" and over:
        cancel_rest(run_dir, own_job_id())
    return 0
