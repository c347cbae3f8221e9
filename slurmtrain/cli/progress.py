"""progress: how a program of the user's own says how far it is. For scripts in any language; imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from slurmtrain.errors import UsageError
from slurmtrain.runs import attempts, reached_step
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from slurmtrain.slurm.environment import rank_or_zero
from slurmtrain.system.records import append_line


def main(options: argparse.Namespace) -> int:
    """Append a line {"step": STEP} to the run's metrics.jsonl; on other ranks than 0 do nothing.

    Raises:
        UsageError: this process is not part of a run, or STEP is no number of steps.
    """
    directory = os.environ.get(RUN_DIR_VARIABLE)
    if not directory:
        raise UsageError(
            "`progress` works only inside a run: SLURMTRAIN_RUN_DIR is not set",
            hint="it is for a program that was submitted: submit -- bash my_script.sh",
        )
    run_dir = RunDir(Path(directory))
    info = run_dir.info()
    if rank_or_zero() != 0:
        return 0
    if options.of is not None and info.get("steps") != options.of:
        run_dir.update_info(steps=options.of)
    step, number = options.step, os.environ.get(ATTEMPT_VARIABLE, "")
    attempt = attempts.read_attempt(run_dir, int(number)) if number.isdigit() else None
    record: dict[str, float] = {"step": step}
    if attempt is not None:
        # For goodput: the first report of this attempt, and the one that is where an earlier attempt had been.
        logged = run_dir.metrics_file.stat().st_mtime if run_dir.metrics_file.exists() else 0.0
        before = reached_step.last_logged_step(run_dir) if logged >= attempt.started else None
        furthest = attempt.reported_before
        if before is None:
            run_dir.event(Event.FIRST_REPORT, attempt=attempt.number, step=step)
        elif furthest is not None and before < furthest <= step:
            run_dir.event(Event.CAUGHT_UP, attempt=attempt.number, step=step)
        if before is not None and before < step and attempt.started > 0:
            record["step_time_s"] = (time.time() - logged) / (step - before)
    append_line(run_dir.metrics_file, json.dumps(record) + "\n")
    return 0
