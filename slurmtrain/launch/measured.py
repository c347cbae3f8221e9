"""What an earlier run of the same experiment has measured, and whether the early warning leaves a job time to save."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Collection
from pathlib import Path

from slurmtrain.config.frozen import config_hash
from slurmtrain.config.parallel_dims import usable_sizes
from slurmtrain.config.schema import Config
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.launch.queue_check import Finding
from slurmtrain.runs import attempts, lookup, reached_step
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.records import finite

RUNS_LOOKED_AT = 200  # the newest; reading so many run.json takes about 10 ms
SAVES_REMEMBERED = 3  # the slowest of the last counts: a shared file system has slow days
ROOM = 1.25  # factor of the advice over the measurement, since steps and saves vary


def check_measured(config: Config) -> list[Finding]:
    """Compare the early warning with the newest run of this experiment on as many ranks: a step and a save have to fit.

    The warning may come at the beginning of a step.
    """
    wanted, lead_s = config_hash(config), config.cluster.signal_lead_s
    sizes = {nodes * config.cluster.tasks_per_node for nodes in usable_sizes(config)}
    for run_dir in reversed(lookup.all_runs(Path(config.job.runs_dir).expanduser())[-RUNS_LOOKED_AT:]):
        found = None
        with contextlib.suppress(UnreadableRecordError):
            found = _measured(run_dir, sizes) if run_dir.info().get("config_hash") == wanted else None
        if found is None:
            continue
        step_s, save_s = found
        if not 0 < lead_s < step_s + save_s:
            return []
        message = (
            f"cluster.signal_lead_s={lead_s} is shorter than one step ({_seconds(step_s)}) plus a save "
            f"({_seconds(save_s)}), as measured in run {run_dir.id}"
        )
        hint = f"set at least cluster.signal_lead_s={math.ceil((step_s + save_s) * ROOM / 10) * 10}"
        return [Finding(message, hint)]
    return []


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def _measured(run_dir: RunDir, world_sizes: Collection[int]) -> tuple[float, float] | None:
    """Return the seconds of a step and of a save of one run: steps from its metrics, saves from its events.

    Args:
        world_sizes: the numbers of ranks that the job may have. A run with others tells nothing about it.
    """
    tries = [attempt for attempt in attempts.all_attempts(run_dir) if attempt.stepping is not None]
    if not tries or any(attempt.world_size not in world_sizes for attempt in tries):
        return None
    logged = reached_step.records_with("step_time_s", reached_step.tail(run_dir.metrics_file))
    steps = [value for each in logged if (value := finite(each["step_time_s"]))]
    saved = [finite(each.get("seconds")) for each in run_dir.events() if each["event"] == Event.CHECKPOINT]
    saves = [value for value in saved if value is not None][-SAVES_REMEMBERED:]
    return (statistics.median(steps), max(saves)) if steps and saves else None
