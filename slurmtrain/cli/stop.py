"""cancel, preempt and requeue stop a run, for good or to start again; and what they share with the verbs that start one."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from pathlib import Path

from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.cli.json_output import emit
from slurmtrain.control import stop
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.program_checkpoints import find_checkpoints, newest_complete
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.system.durations import roughly
from slurmtrain.system.paths import runs_root

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    run_dir = open_run(arguments.run)
    if arguments.verb == "cancel":
        said = stop.cancel(run_dir)
    elif arguments.verb == "requeue":
        said = stop.requeue(run_dir)
    else:
        log.info(_what_follows(run_dir))
        said = stop.preempt(run_dir)
    say(run_dir, said, as_json=arguments.json)
    return 0


def _what_follows(run_dir: RunDir) -> str:
    """Say from which checkpoint a run starts again if it cannot save before it is stopped."""
    with contextlib.suppress(OSError):
        names = [path.name for path in committed(run_dir.checkpoints)]
        own = run_dir.info().get("own_checkpoints") or {}
        if not names and isinstance(own.get("pattern"), str):
            newest = newest_complete(find_checkpoints(run_dir.program_folders, own["pattern"], own.get("complete")))
            names = [newest.path.name] if newest is not None else []
        if names:
            return f"run {run_dir.id} saves if it can, and starts again; without a new checkpoint it resumes from {names[-1]}"
    return f"run {run_dir.id} saves if it can, and starts again; now it would start at step 0: no checkpoint is visible"


def open_run(reference: str) -> RunDir:
    """Return the run that a person means by RUN, after a look that it is theirs and can be read whole."""
    run_dir = lookup.find(reference, runs_root())
    ownership.require_own(run_dir)
    run_dir.info(whole=True)
    say_which(reference, run_dir)
    return run_dir


def say_which(reference: str, found: RunDir | Sweep) -> None:
    """Say which run or sweep `last` or a part of a name stands for, before anything is done to it."""
    if reference == found.id or Path(reference).is_dir():
        return
    what = f"sweep {found.id}" if isinstance(found, Sweep) else f"run {found.id} ({found.path.parent.name})"
    try:
        when = f", submitted {roughly(max(0.0, time.time() - found.info()['created']))} ago"
    except (UnreadableRecordError, KeyError):
        when = ""
    log.info("%s is %s%s", reference, what, when)


def say(run_dir: RunDir, said: str, *, as_json: bool) -> None:
    """Print what was done to a run, for a person or for a program."""
    emit({"run": run_dir.id, "said": said, "job_ids": run_dir.info()["job_ids"]}, said, as_json=as_json)
