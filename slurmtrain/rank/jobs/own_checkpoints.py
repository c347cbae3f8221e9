"""What rank 0 does about the program's own checkpoints before the program starts again, while the other ranks wait.

What is incomplete is moved aside: it may be all that a program looks at. And a program that seems to have no checkpoint
at all is reported, since hours of work may be about to be done again.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from slurmtrain.checkpoint.format.directory import newest_committed_step
from slurmtrain.config.schema import Config
from slurmtrain.rank import attempt_context
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.runs import attempts
from slurmtrain.runs.program_checkpoints import (
    UNREADABLE,
    ProgramCheckpoint,
    find_checkpoints,
    move_aside,
    newest_complete,
)
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)

CLOCKS_S = 60.0  # by how much the clocks of a node and of a file server may differ


def look_before_start(config: Config, context: AttemptContext, stop_requested: Callable[[], bool]) -> None:
    """Move incomplete checkpoints aside if this is not the run's first attempt, and say which one is the newest.

    Rank 0 calls it before it publishes the address that the other ranks wait for.
    """
    run_dir, job = context.run_dir, config.job
    before = [each for each in attempts.all_attempts(run_dir) if each.number < context.number and each.started]
    pattern = job.checkpoints or _pattern_of_saved(before)
    found = find_checkpoints(run_dir.program_folders, pattern, job.checkpoint_complete)
    if before and job.checkpoints is not None and not stop_requested():
        since = min(each.started for each in before)
        incomplete = to_move(found, job.checkpoint_complete, since=since, own_folder=run_dir.path)
        for each in incomplete:
            _move_aside(each, context)
    newest = newest_complete(found)
    if newest is not None:
        log.info("the newest checkpoint of the program is %s", _shown(newest, run_dir))
        with contextlib.suppress(OSError):
            run_dir.event(Event.CHECKPOINT_FOUND, attempt=context.number, step=newest.step, path=str(newest.path))
            if newest.step is not None and job.checkpoints is not None:
                attempt_context.update_attempt(context, first_step=newest.step)
    elif before and newest_committed_step(run_dir.checkpoints) is None:
        rule = f"job.checkpoints={job.checkpoints}" if job.checkpoints else None
        log.warning(
            "attempt %d starts with NO VISIBLE CHECKPOINT%s: it may repeat the work of earlier attempts%s",
            context.number,
            f" ({rule})" if rule else "",
            "" if rule else ". Where the program has some, job.checkpoints='out/checkpoint-*' shows them",
        )
        with contextlib.suppress(OSError):  # a full disk must not make a crash of it
            run_dir.event(Event.NO_CHECKPOINT_SEEN, attempt=context.number, pattern=job.checkpoints)


def _pattern_of_saved(before: Sequence[attempts.Attempt]) -> str | None:
    """Return where attempts have reported checkpoints; the newest may have another number by now."""
    saved = next((Path(each.saved) for each in reversed(before) if each.saved is not None), None)
    return None if saved is None else glob.escape(f"{saved.parent}/") + re.sub(r"\d+", "*", saved.name)


def to_move(
    found: Sequence[ProgramCheckpoint], rule: str | None, *, since: float, own_folder: Path
) -> list[ProgramCheckpoint]:
    """Return the incomplete checkpoints that are this run's.

    A folder counts only by job.checkpoint_complete. What cannot be read now may be whole. What lies outside of the run's own
    folder may be another run's, unless it was changed after this run had begun.

    Args:
        since: when the run's first attempt began, in unix seconds.
    """
    return [
        each
        for each in found
        if each.problem is not None
        and not each.problem.startswith(UNREADABLE)
        and (rule is not None or not each.path.is_dir())
        and (each.changed >= since - CLOCKS_S or each.path.is_relative_to(own_folder))
    ]


def _move_aside(checkpoint: ProgramCheckpoint, context: AttemptContext) -> None:
    try:
        aside = move_aside(checkpoint.path, context.number)
    except OSError as error:
        log.warning("%s is incomplete (%s), and cannot be moved aside: %s", checkpoint.path, checkpoint.problem, error)
        return
    log.warning("%s is incomplete (%s), and was moved aside, to %s", checkpoint.path, checkpoint.problem, aside.name)
    with contextlib.suppress(OSError):
        path, to = str(checkpoint.path), str(aside)
        context.run_dir.event(
            Event.INCOMPLETE_CHECKPOINT, attempt=context.number, path=path, problem=checkpoint.problem, moved_to=to
        )


def _shown(checkpoint: ProgramCheckpoint, run_dir: RunDir) -> str:
    path = checkpoint.path
    name = path.relative_to(run_dir.path) if path.is_relative_to(run_dir.path) else path
    return f"{name} (step {checkpoint.step})" if checkpoint.step is not None else str(name)
