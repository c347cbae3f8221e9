"""evaluate: measure the checkpoint of a run, here or by a job of its own."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from pathlib import Path

from slurmtrain.checkpoint.format.directory import step_of
from slurmtrain.cli.arguments import RUN_HELP, Parser
from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import UsageError
from slurmtrain.launch.evaluations import checkpoint_of, prepare, submit_due, submit_evaluation
from slurmtrain.report.status.look import state
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.platforms.local import run_local

log = logging.getLogger(__name__)


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser.of(verb)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--step", type=int, metavar="N", help="the step of the checkpoint (default: the newest)")
    parser.add_argument("--submit", action="store_true", help="submit it as a job, with the changes in eval.cluster")
    parser.add_argument("--due", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--again",
        action="store_true",
        help="evaluate again although there is a result, for instance because the data changed",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, for a program")
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in words if word not in overrides])
    run_dir = lookup.find(options.run, lookup.runs_root())
    ownership.require_own(run_dir)
    if options.due:
        submit_due(run_dir)
        return 0
    checkpoint = checkpoint_of(run_dir, options.step)
    evaluation = prepare(run_dir, checkpoint, overrides, here=not options.submit, again=options.again)
    measured_before = evaluation.result_file.exists()
    code = _start(evaluation, submit=options.submit)
    if options.json:
        print_json(_object(run_dir, evaluation, checkpoint))
    elif evaluation.result_file.exists():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(evaluation.measured_at()))
        kept = f", measured on {when}; --again measures anew" if measured_before else ""
        print(f"run {run_dir.id}, step {step_of(checkpoint)}{kept}")
        print_table(("metric", "value"), [[name, f"{value:.6g}"] for name, value in evaluation.measured().items()])
    return code


def _start(evaluation: RunDir, *, submit: bool) -> int:
    """Evaluate or submit, unless that is done already or under way, and return the exit code."""
    if evaluation.result_file.exists():
        return 0
    now = state(evaluation)
    if now.alive and not submit:
        raise UsageError(
            f"{evaluation.path.name} of this run is {now.status}: {now.explanation}", hint=f"status {evaluation.path}"
        )
    if submit:
        submit_evaluation(evaluation)
        job_ids = evaluation.info()["job_ids"]  # a full disk may not let it be noted, which has been told
        if job_ids:
            log.info("%s is job %s; status %s", evaluation.path.name, job_ids[-1], evaluation.path)
        return 0
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the final answer
        return run_local(evaluation)


def _object(run_dir: RunDir, evaluation: RunDir, checkpoint: Path) -> dict[str, object]:
    """Return the JSON of an evaluation.

    Its keys: run, step, path; job_ids that it was submitted as; metrics by name, {} before it is done, and measured_at,
    then null.
    """
    return {
        "run": run_dir.id,
        "step": step_of(checkpoint),
        "path": str(evaluation.path),
        "job_ids": evaluation.info()["job_ids"],
        "measured_at": evaluation.measured_at(),
        "metrics": evaluation.measured(),
    }
