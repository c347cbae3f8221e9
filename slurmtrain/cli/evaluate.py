"""evaluate: measure the checkpoint of a run, here or by a job of its own."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time

from slurmtrain.checkpoint.format.directory import step_of
from slurmtrain.cli.checkpoints import Target
from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import evaluation_object, print_json
from slurmtrain.cli.stop import open_run
from slurmtrain.errors import UsageError
from slurmtrain.launch.evaluations import prepare, submit_due, submit_evaluation
from slurmtrain.report.status.look import state
from slurmtrain.supervise.platforms.local import run_local

log = logging.getLogger(__name__)


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    run_dir = open_run(options.run)
    if options.due:
        submit_due(run_dir)
        return 0
    checkpoint = Target(run_dir.checkpoints, f"run {run_dir.id}", run=run_dir).of_step(options.step)[-1]
    step = step_of(checkpoint)
    evaluation = prepare(run_dir, checkpoint, options.overrides, here=not options.submit, again=options.again)
    measured_before, code = evaluation.result_file.exists(), 0
    if not measured_before and options.submit:
        submit_evaluation(evaluation)
        job_ids = evaluation.info()["job_ids"]  # a full disk may not let it be noted, which has been told
        if job_ids:
            log.info("%s is job %s; status %s", evaluation.path.name, job_ids[-1], evaluation.path)
    elif not measured_before:
        now = state(evaluation)
        if now.alive:
            raise UsageError(
                f"{evaluation.path.name} of this run is {now.status}: {now.explanation}",
                hint=f"status {evaluation.path}",
            )
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the final answer
            code = run_local(evaluation)
    if options.json:
        found = evaluation_object(evaluation, state(evaluation))
        about = {"run": run_dir.id, "step": step, "path": str(evaluation.path)}
        print_json(about | found | {"measured_at": evaluation.measured_at()})
    elif evaluation.result_file.exists():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(evaluation.measured_at()))
        kept = f", measured on {when}; --again measures anew" if measured_before else ""
        print(f"run {run_dir.id}, step {step}{kept}")
        print_table(("metric", "value"), [[name, f"{value:.6g}"] for name, value in evaluation.measured().items()])
    return code
