"""What an earlier run of the same experiment has measured, and plans whose jobs would have too little time to save."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.config.frozen import config_hash
from slurmtrain.config.parallel_dims import usable_sizes
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import SLURM_EARLY_S
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.launch.queue_check import Finding
from slurmtrain.runs import attempts, lookup, reached_step
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.records import finite

RUNS_LOOKED_AT = 200  # the newest; reading so many run.json takes about 10 ms
SAVES_REMEMBERED = 3  # the slowest of the last counts: a shared file system has slow days
ROOM = 1.25  # factor of the advice over the measurement, since steps and saves vary


@dataclass(frozen=True)
class Measured:
    """The times of a run, in seconds.

    Attributes:
        step_s: seconds of a step: the median of means over a window.
        save_s: seconds of a save, from its beginning to its commit: the slowest of the last ones.
        start_s: seconds from the start of the ranks to the first step.
        run_id: the run.
    """

    step_s: float
    save_s: float
    start_s: float
    run_id: str


def check_measured(config: Config) -> list[Finding]:
    """Compare the early warning and the time limit with the newest run of this experiment on as many ranks.

    A run has to be saved before its job ends.
    """
    wanted = config_hash(config)
    sizes = {nodes * config.cluster.tasks_per_node for nodes in usable_sizes(config)}
    for run_dir in reversed(lookup.all_runs(Path(config.job.runs_dir).expanduser())[-RUNS_LOOKED_AT:]):
        with contextlib.suppress(UnreadableRecordError):
            if run_dir.info().get("config_hash") == wanted and (found := _measured(run_dir, sizes)) is not None:
                return _compare(config, found)
    return []


def _compare(config: Config, measured: Measured) -> list[Finding]:
    lead_s, limit_min = config.cluster.signal_lead_s, config.cluster.time_limit_min
    findings = []
    stop_s = measured.step_s + measured.save_s  # the warning may come at the beginning of a step
    if 0 < lead_s < stop_s:
        message = (
            f"cluster.signal_lead_s={lead_s} is shorter than one step ({_seconds(measured.step_s)}) plus a save "
            f"({_seconds(measured.save_s)}), as measured in run {measured.run_id}"
        )
        hint = f"set at least cluster.signal_lead_s={math.ceil(stop_s * ROOM / 10) * 10}"
        findings.append(Finding("cluster.signal_lead_s", message, hint))
    first_s = measured.start_s + measured.step_s
    before_end_s = lead_s + (SLURM_EARLY_S if lead_s else 0)
    if limit_min * 60 - before_end_s <= first_s:
        message = (
            f"cluster.time_limit_min={limit_min} is too short for cluster.signal_lead_s={lead_s}, the {SLURM_EARLY_S} s "
            f"that SLURM may be early, and {_seconds(first_s)} from the start to the end of the first step: the job would "
            "be told to stop before it has done anything"
        )
        hint = f"set at least cluster.time_limit_min={math.floor((before_end_s + first_s) / 60) + 1}"
        findings.append(Finding("cluster.time_limit_min", message, hint))
    return findings


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def _measured(run_dir: RunDir, world_sizes: Collection[int]) -> Measured | None:
    """Return one run's measurements: steps from its metrics, saves from its events, the start from its attempts.

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
    if not steps or not saves:
        return None
    return Measured(statistics.median(steps), max(saves), sum(tries[-1].start_up_s.values()), run_dir.id)
