"""Hooks: a person's command that is run with the facts of how an attempt has ended; see HooksConfig.

It runs last, after the record and the requeue, and in a process of its own, so whatever it does changes nothing:
neither the exit code nor what happens next. It runs once per attempt, and leaves none of its processes behind.

The facts are in its environment (`variables`), and attempt.json is its standard input.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import HooksConfig
from slurmtrain.errors import EXIT_CONFIG, ConfigError
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import FAILURES, Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import own_job_id
from slurmtrain.system.process_tree import Process, become_subreaper, descendants, kill_trees
from slurmtrain.system.redaction import redact

log = logging.getLogger(__name__)

TEXT_LIMIT = 8192  # characters of a variable; the kernel takes 128 KiB
LINE_LIMIT = 1 << 20  # characters of output without a line's end


def run_hook(run_dir: RunDir, number: int) -> None:
    """Run the hook for the outcome of attempt `number`, if there is one and it has not run yet."""
    config = load_frozen(run_dir.config_file, with_secrets=False)
    attempt = _finished_record(run_dir, number)
    name = hook_of(attempt)
    command = getattr(config.hooks, name) if name is not None else None
    if command is None:
        return
    try:
        log_file = run_dir.attempt(number).hook_log.open("x")
    except FileExistsError:  # it has run, or is running
        return
    run_dir.event(Event.HOOK_STARTED, attempt=number, hook=name)
    with log_file:
        try:
            secrets.take(config.secrets)
            outcome = _run(command, config.hooks, run_dir, attempt, log_file)
        except (ConfigError, OSError) as error:
            outcome = f"could not be run: {error}"
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
    """Return the command's environment variables. An empty value: not known."""
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
    return {f"SLURMTRAIN_{key}": "" if value is None else _plain(str(value)) for key, value in facts.items()}


def _plain(text: str) -> str:
    """Return as much of a text as a variable can hold."""
    return text[:TEXT_LIMIT].replace("\0", " ").encode(errors="replace").decode()


def _finished_record(run_dir: RunDir, number: int) -> Attempt:
    """Return the attempt's record, completed here for an attempt whose set-up has failed, which nobody finishes."""
    attempt = attempts.read_attempt(run_dir, number)
    set_up = run_dir.attempt(number).setup_failure_file
    if attempt.reason is None and set_up.exists():
        attempt.reason, attempt.verdict, attempt.exit_code = Reason.CONFIG, Verdict.END, EXIT_CONFIG
        attempt.say(set_up.read_text(errors="replace").strip())
    return attempt


def _run(command: str, hooks: HooksConfig, run_dir: RunDir, attempt: Attempt, log: IO[str]) -> str:
    """Run the command to its end or its time limit, redact secrets in its output, and return how it ended."""
    become_subreaper()  # its background processes stay below us
    began = time.monotonic()
    name = hook_of(attempt) or ""
    record = run_dir.attempt(attempt.number).record_file
    with (record if record.exists() else Path(os.devnull)).open() as facts:
        shell = subprocess.Popen(
            ["bash", "-c", command],
            cwd=run_dir.path / run_dir.info()["workdir"],
            env={**os.environ, **variables(run_dir, attempt, name)},
            stdin=facts,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    copier = threading.Thread(target=_copy, args=(shell.stdout, log), daemon=True)
    copier.start()
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = shell.wait(hooks.timeout_s)
    kill_trees(descendants([Process.mine()]))
    copier.join(10.0)  # no writer is left, so it reaches the end
    if code is None:
        return f"was killed after hooks.timeout_s={hooks.timeout_s}"
    return f"ended with exit code {code} after {time.monotonic() - began:.1f} s"


def _copy(output: IO[str], log: IO[str]) -> None:
    for line in iter(lambda: output.readline(LINE_LIMIT), ""):
        log.write(redact(line))
        log.flush()
