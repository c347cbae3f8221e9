"""Runs without a job: a run directory as `submit` leaves it, and attempts as a job would have recorded them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmtrain.config.compose import compose
from slurmtrain.launch.submit import preparing
from slurmtrain.runs import attempts
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir


def submitted_run(project: Path, *words: str, job_ids: Sequence[str] = ()) -> RunDir:
    """A run with these overrides, submitted as these jobs."""
    with preparing(compose([*words]), [*words], project) as run_dir:
        run_dir.update_info(job_ids=[*job_ids])
    for job_id in job_ids:
        run_dir.event(Event.SUBMITTED, job_id=job_id)
    return run_dir


def add_attempt(run: RunDir, **fields: Any) -> Attempt:
    """The run's next attempt, with these fields of its record; it has started now, unless they say otherwise."""
    attempt = Attempt(run.new_attempt(), **{"started": time.time(), **fields})
    attempts.write_attempt(run, attempt)
    return attempt
