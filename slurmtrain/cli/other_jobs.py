"""preflight and evaluate: jobs beside the runs, one that only checks its nodes, and one that measures a checkpoint of a run."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import time

from slurmtrain.checkpoint.format.directory import step_of
from slurmtrain.choices import Backend, JobKind
from slurmtrain.cli.checkpoints import Target
from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import evaluation_object, print_json
from slurmtrain.cli.stop import open_run
from slurmtrain.cli.submit import compose_and_validate, next_steps
from slurmtrain.cli.units import with_unit
from slurmtrain.config.evaluation import preflight_config
from slurmtrain.control.submitting import submit_run
from slurmtrain.errors import EXIT_CONFIG, UsageError
from slurmtrain.launch.checks import check
from slurmtrain.launch.evaluations import prepare, submit_due, submit_evaluation
from slurmtrain.launch.submit import preparing
from slurmtrain.report.findings import PreflightRecord, Rates, read_preflight
from slurmtrain.report.page.units import plural
from slurmtrain.report.status.state import state
from slurmtrain.report.status.waiting import as_they_end
from slurmtrain.runs import attempts
from slurmtrain.runs.reasons import Reason
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.platforms.local import run_local
from slurmtrain.system.paths import current_folder
from slurmtrain.system.records import printable, read_json

log = logging.getLogger(__name__)


def preflight(arguments: argparse.Namespace) -> int:
    """Start a job that checks its nodes, and wait for it.

    Returns:
        The exit code: 0 nothing that ends a training, 78 something does, 1 it could not be done.
    """
    cwd = current_folder()
    asked, dims = compose_and_validate(arguments)
    if asked.job.kind == JobKind.PREPARE:
        raise UsageError(
            "the ranks of job=prepare do not communicate, so there is nothing to compare",
            hint="job=train, or leave job= out",
        )
    check(asked, dims, cwd)
    config = preflight_config(asked, full=arguments.full)
    if config.cluster.backend == Backend.LOCAL:
        with preparing(config, arguments.overrides, cwd) as run_dir:
            pass
        with contextlib.redirect_stdout(io.StringIO() if arguments.json else sys.stdout):
            run_local(run_dir)
        return _report(run_dir, as_json=arguments.json)
    run_dir, jobs = submit_run(config, arguments.overrides, cwd)
    run = run_dir.id
    log.info("run %s, job %s: waiting; status %s shows for what, cancel %s ends it", run, jobs, run, run)
    try:
        list(as_they_end([run_dir]))
    except KeyboardInterrupt:
        log.info("the job continues: logs %s -f shows its findings, cancel %s ends it", run, run)
        raise
    return _report(run_dir, as_json=arguments.json)


def _report(run_dir: RunDir, *, as_json: bool) -> int:
    tries = attempts.all_attempts(run_dir)
    found = read_preflight(run_dir.attempt(tries[-1].number)) if tries else None
    now = state(run_dir)
    if as_json:
        path = run_dir.attempt(tries[-1].number).preflight_file if found is not None else None
        values = read_json(path) if path is not None else None
        print_json({"run": run_dir.id, "path": str(run_dir.path), "said": now.explanation, "preflight": values})
    elif found is None:
        print(f"the checks were not completed: {now.status}: {printable(now.explanation)}")
        print(next_steps(f"logs {run_dir.id} --rank all"))
    else:
        print_record(found)
        print(f"  for programs: {run_dir.attempt(tries[-1].number).preflight_file}")
    if found is None:
        return EXIT_CONFIG if tries and tries[-1].reason in (Reason.CONFIG, Reason.BAD_NODE) else 1
    return EXIT_CONFIG if found.fatal else 0


def print_record(found: PreflightRecord) -> None:
    """Print what was measured, and each finding with what to do."""
    measured = found.measured or Rates()
    for text, values in (
        ("all-reduce {} GB/s", [measured.all_reduce] if measured.all_reduce is not None else []),
        ("{} TFLOP/s on a rank", list(measured.tflops.values())),
        ("{} GB/s between two nodes", [rate for _, _, rate in measured.links]),
    ):
        if values:
            low, high = with_unit(min(values)), with_unit(max(values))
            print(f"measured: {text.format(low if low == high else f'{low} to {high}')}")
    findings = plural(len(found.findings), "finding") if found.findings else "nothing found"
    where = f"{plural(found.ranks, 'rank')} on {plural(len(found.nodes), 'node')}"
    print(printable(f"preflight, {found.mode}: {where} compared in {found.seconds:.2f} s: {findings}"))
    for each in found.findings:
        how = "ends a training" if each.fatal else "warning"
        print(printable(f"  {how}, {each.kind}: {each.sentence}\n    -> {each.advice}"))


def evaluate(options: argparse.Namespace) -> int:
    """Measure the checkpoint of a run, here or by a job of its own, and return the exit code."""
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
