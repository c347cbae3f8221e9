"""Hooks: a person's command that is run with the facts of how an attempt has ended; see HooksConfig.

It runs last, after the record and the requeue, and in a process of its own, so whatever it does changes nothing:
neither the exit code nor what happens next. It runs once per attempt, and leaves none of its processes behind.

The facts are in its environment (`variables`), and attempt.json is its standard input.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile

from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.reasons import FAILURES, Event, Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import own_job_id
from slurmtrain.system.process import ProcessMark, become_subreaper, below, kill_trees
from slurmtrain.system.redaction import redact

log = logging.getLogger(__name__)

TEXT_LIMIT = 8192  # characters of a variable; the kernel takes 128 KiB
OUTPUT_LIMIT = 1 << 24  # bytes of output that are kept


def start_hook(run_dir: RunDir, number: int, config: Config) -> list[subprocess.Popen[bytes]]:
    """Start the hook for the outcome of attempt `number`, in a process of its own; none where the config has no hooks."""
    if not (config.hooks.on_finish or config.hooks.on_failure or config.hooks.on_preemption):
        return []
    command = [sys.executable, "-m", "slurmtrain", "supervise", str(run_dir.path), "--hook", str(number)]
    return [subprocess.Popen(command)]


def run_hook_of(run_dir: RunDir, number: int, config: Config) -> None:
    """Run the hook for the outcome of attempt `number`, and wait for its end."""
    for hook in start_hook(run_dir, number, config):
        hook.wait()


def run_hook(run_dir: RunDir, number: int) -> None:
    """Run the hook for the outcome of attempt `number`, if there is one and it has not run yet."""
    config = load_frozen(run_dir.config_file, with_secrets=False)
    attempt = attempts.read_attempt(run_dir, number)
    name = hook_of(attempt)
    command = getattr(config.hooks, name) if name is not None else None
    if name is None or command is None:
        return
    try:
        log_file = run_dir.attempt(number).hook_log.open("x")
    except FileExistsError:  # it has run, or is running
        return
    try:
        secrets.take(config.secrets)
        outcome, output = _run(command, config.hooks.timeout_s, run_dir, attempt, name)
    except (ConfigError, OSError) as error:
        outcome, output = f"could not be run: {error}", ""
    with log_file:
        log_file.write(redact(output))
    run_dir.event(Event.HOOK_ENDED, attempt=number, hook=name, outcome=outcome)
    log.info("hooks.%s %s", name, outcome)


def hook_of(attempt: Attempt) -> str | None:
    """Return the name of the hook, or None: no outcome yet, a person or a search has ended the run, or it goes on."""
    if attempt.reason in (None, Reason.CANCELLED, Reason.PRUNED, Reason.SUPERSEDED):
        return None
    if attempt.reason == Reason.FINISHED:
        return "on_finish"
    gave_up = attempt.verdict == Verdict.END and attempt.stalled
    failed = attempt.reason in (*FAILURES, Reason.CONFIG, Reason.DIVERGED) or gave_up
    return "on_failure" if failed else "on_preemption"


def variables(run_dir: RunDir, attempt: Attempt, name: str) -> dict[str, str]:
    """Return the command's environment variables: as much of each text as one can hold. An empty value: not known."""
    facts = {
        "EVENT": name.removeprefix("on_"),  # finish, failure or preemption
        "RUN_ID": run_dir.id,
        "RUN_NAME": run_dir.info()["name"],
        "RUN_DIR": run_dir.path,
        "ATTEMPT": attempt.number,
        "JOB_ID": attempt.job_id or own_job_id(),
        "REASON": attempt.reason,  # see runs.reasons.Reason
        "NEXT": attempt.verdict,  # see runs.reasons.Verdict
        "SENTENCE": attempt.sentence,
        "STEP": attempt.last_step,
        "EXIT_CODE": attempt.exit_code,
    }
    texts = {key: "" if value is None else str(value)[:TEXT_LIMIT] for key, value in facts.items()}
    return {
        f"SLURMTRAIN_{key}": text.replace("\0", " ").encode(errors="replace").decode() for key, text in texts.items()
    }


def _run(command: str, timeout_s: int, run_dir: RunDir, attempt: Attempt, name: str) -> tuple[str, str]:
    """Run the command to its end or its time limit, and return how it has ended and what it has printed."""
    become_subreaper()  # its background processes stay below us
    record = run_dir.attempt(attempt.number).record_file
    with record.open() as facts, tempfile.TemporaryFile() as output:
        shell = subprocess.Popen(
            ["bash", "-c", command],
            cwd=run_dir.workdir,
            env={**os.environ, **variables(run_dir, attempt, name)},
            stdin=facts,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            outcome = f"ended with exit code {shell.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            outcome = f"was killed after hooks.timeout_s={timeout_s}"
        kill_trees(below([ProcessMark.own()]))
        output.seek(0)
        return outcome, output.read(OUTPUT_LIMIT).decode(errors="replace")
