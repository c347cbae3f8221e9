"""`requeue RUN key=value`: change a running run for its next attempt.

The change is kept in the run directory, and made when all ranks have exited: by the supervisor, which then submits a new job
with the changed script, or by cluster=local. If SLURM itself has started the job again meanwhile, the job makes the change,
unless it needs another script: then it leaves to a new job.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import SlurmtrainError, UsageError
from slurmtrain.launch import changes
from slurmtrain.launch.change_rules import describe
from slurmtrain.launch.script import render_script
from slurmtrain.launch.submit import job_paths
from slurmtrain.runs import reached_step
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system.files import read_json, write_json

log = logging.getLogger(__name__)


@contextlib.contextmanager
def record_next_change(
    run_dir: RunDir, overrides: Sequence[str], cwd: Path, client: SlurmClient | None
) -> Iterator[list[str]]:
    """Keep a change for the run's next attempt, after all checks, and yield sentences that say what will be different.

    It is added to one that is kept already. If the block fails, only the latter is kept.

    Args:
        client: asked whether SLURM accepts the changed script; None: there is none.

    Raises as `changes.change`.
    """
    kept = _read_next_change(run_dir)
    earlier = list(kept["set"]) if kept is not None else []
    present = load_frozen(run_dir.config_file, with_secrets=False)
    if kept is not None and kept["cwd"] != str(cwd):  # to which paths are relative
        raise UsageError(
            f"{' '.join(earlier)} already waits for the next attempt of run {run_dir.id}, typed in {kept['cwd']}",
            hint="type this command there, too",
        )
    before = changes.plan(run_dir, present, earlier, cwd)[0] if earlier else present
    after, words = changes.plan(run_dir, before, overrides, cwd)
    if client is not None:
        changes.check_accepted(run_dir, _script(run_dir, after), client)
    lines = describe(before, after, reached_step.newest_checkpoint_step(run_dir))
    write_json(run_dir.next_change_file, {"set": [*earlier, *words], "cwd": str(cwd)})
    try:
        yield lines
    except BaseException:
        if kept is not None:
            write_json(run_dir.next_change_file, kept)
        else:
            run_dir.next_change_file.unlink(missing_ok=True)
        raise
    run_dir.event(Event.CHANGE_ASKED, set=words)


def apply_next_change(run_dir: RunDir) -> bool:
    """Make the change that is kept for the next attempt, and return whether there was one.

    Called when no rank is at work, by whoever starts the next attempt. A change that cannot be made any more is recorded, and
    the run continues without it.
    """
    kept = _read_next_change(run_dir)
    if kept is None:
        return False
    try:
        changes.undo_unfinished(run_dir)
        for line in changes.change(run_dir, kept["set"], Path(kept["cwd"])):
            log.info(line)
    except Exception as error:  # the next try would fail in the same way, and requeue the job again and again
        why = error.message if isinstance(error, SlurmtrainError) else f"{type(error).__name__}: {error}"
        log.warning("the run continues without %s: %s", " ".join(kept["set"]), why)
        run_dir.event(Event.NOT_CHANGED, set=kept["set"], why=why)
        run_dir.next_change_file.unlink(missing_ok=True)
        with contextlib.suppress(Exception):  # so that no half of it stays
            changes.undo_unfinished(run_dir)
        return False
    run_dir.next_change_file.unlink(missing_ok=True)
    return True


def make_in_this_job(run_dir: RunDir) -> bool:
    """Make the change that is kept for the next attempt, unless a job with another script is needed; return False then.

    Called by a job that SLURM has started again, before its ranks start. A change that cannot be made any more is dropped, as
    `apply_next_change` does.
    """
    kept = _read_next_change(run_dir)
    if kept is None:
        return True
    try:
        present = load_frozen(run_dir.config_file, with_secrets=False)
        after, _ = changes.plan(run_dir, present, kept["set"], Path(kept["cwd"]))
        same = _script(run_dir, after) == run_dir.script.read_text()
    except Exception:  # apply_next_change reports it
        same = True
    if same:
        apply_next_change(run_dir)
    return same


def _script(run_dir: RunDir, config: Config) -> str:
    return render_script(config, job_paths([run_dir.path], run_dir.info()))


def kept_for_next_attempt(run_dir: RunDir) -> list[str]:
    """Return what will be set before the run's next attempt, as KEY=VALUE; nothing if no change is kept."""
    kept = _read_next_change(run_dir)
    return list(kept["set"]) if kept is not None else []


def _read_next_change(run_dir: RunDir) -> dict[str, Any] | None:
    """Return the change that is kept for the next attempt, if it can be read."""
    kept = read_json(run_dir.next_change_file)
    if kept is None or not isinstance(kept.get("set"), list) or not isinstance(kept.get("cwd"), str):
        return None
    return kept if all(isinstance(word, str) for word in kept["set"]) else None
