"""progress: how a program of the user's own says how far it is. For scripts in any language; imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.errors import UsageError
from slurmtrain.runs import attempts, reached_step
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from slurmtrain.slurm.environment import rank_or_zero
from slurmtrain.system.records import append_line


def main(verb: str, words: list[str]) -> int:
    """Append a line {"step": STEP} to the run's metrics.jsonl; on other ranks than 0 do nothing.

    Raises:
        UsageError: this process is not part of a run, or STEP is no number of steps.
    """
    parser = Parser.of(verb)
    parser.add_argument(
        "step", metavar="STEP", type=_steps, help="the step that it has reached, a whole number that grows"
    )
    parser.add_argument("--of", metavar="STEPS", type=_steps, help="the last step; status then shows the time left")
    options = parser.parse_args(words)
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
    _tell_events(run_dir, options.step)
    append_line(run_dir.metrics_file, json.dumps({"step": options.step, **_pace(run_dir, options.step)}) + "\n")
    return 0


def _tell_events(run_dir: RunDir, step: int) -> None:
    """Record when this attempt reports for the first time, and when it is where an earlier one had been: for goodput."""
    number = os.environ.get(ATTEMPT_VARIABLE, "")
    if not number.isdigit():
        return
    attempt = attempts.read_attempt(run_dir, int(number))
    before = reached_step.last_logged_step(run_dir)
    with contextlib.suppress(FileNotFoundError):
        if before is not None and run_dir.metrics_file.stat().st_mtime < attempt.started:
            before = None
    furthest = attempt.reported_before
    if before is None:
        run_dir.event(Event.FIRST_REPORT, attempt=attempt.number, step=step)
    if furthest is not None and step >= furthest and before is not None and before < furthest:
        run_dir.event(Event.CAUGHT_UP, attempt=attempt.number, step=step)


def _steps(text: str) -> int:
    if not text.isdigit():
        raise UsageError(f"{text!r} is not a number of steps", hint="progress 500, or progress 500 --of 10000")
    return int(text)


def _pace(run_dir: RunDir, step: int) -> dict[str, float]:
    """Return the seconds per step since the line before, if this attempt has written that line."""
    number = os.environ.get(ATTEMPT_VARIABLE, "")
    began = attempts.read_attempt(run_dir, int(number)).started if number.isdigit() else 0.0
    before = reached_step.last_logged_step(run_dir)
    if before is None or step <= before:
        return {}
    logged = run_dir.metrics_file.stat().st_mtime
    return {"step_time_s": (time.time() - logged) / (step - before)} if logged >= began > 0 else {}
