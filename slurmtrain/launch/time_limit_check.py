"""Check that the early warning can work: its lead against the time limit, and against the measured time of a step and a save.

A plan that cannot work is refused before anything is queued. A plan that works less well gives a warning. `check` is
pure; `measured_before` reads what earlier runs of the same experiment have left.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.config.checks.cluster import SLURM_EARLY_S
from slurmtrain.config.elastic import usable_sizes
from slurmtrain.config.frozen import config_hash
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.errors import ConfigError, UnreadableRecordError
from slurmtrain.runs import attempts, lookup, reached_step
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.preemption import PreemptionTimes, preemption_times
from slurmtrain.system.records import finite

ROOM = 1.25  # factor of the advice over the measurement, since steps and saves vary
RUNS_LOOKED_AT = 200  # the newest; reading so many run.json takes about 10 ms
RUNS_REMEMBERED = 3  # the newest runs that have measured both
SAVES_REMEMBERED = 3  # the slowest of the last counts: a shared file system has slow days


@dataclass(frozen=True)
class Measured:
    """The times of earlier runs of the same experiment on as many ranks, in seconds.

    Attributes:
        step_s: seconds of a step: the median of means over a window.
        save_s: seconds of a save, from its beginning to its commit: the slowest of the last ones.
        start_s: seconds from the start of the ranks to the first step.
        run_id: the newest of these runs.
    """

    step_s: float
    save_s: float
    start_s: float
    run_id: str

    @property
    def stop_s(self) -> float:
        """The seconds from the warning, which may come at the beginning of a step, to the commit."""
        return self.step_s + self.save_s


def look_ahead(config: Config, runs_dir: Path, facts: ClusterFacts) -> list[str]:
    """Check the plan of a job that is about to be submitted, and return warnings.

    Args:
        facts: those of its cluster; how long a preempted job lives is compared with what runs have measured.

    Raises:
        ConfigError: the plan cannot work.
    """
    measured = measured_before(config, lookup.all_runs(runs_dir)[-RUNS_LOOKED_AT:])
    cluster = config.cluster
    times = preemption_times(facts, cluster.partition, account=cluster.account, qos=cluster.qos)
    return check(cluster, measured, times)


def check(cluster: ClusterConfig, measured: Measured | None, times: PreemptionTimes | None) -> list[str]:
    """Raise for a plan that cannot work, and return warnings.

    Args:
        times: how long a preempted job lives on; None if SLURM has not said.

    Raises:
        ConfigError: the plan cannot work; the message gives the number that would.
    """
    lead_s, limit_s = cluster.signal_lead_s, cluster.time_limit_min * 60
    if lead_s and measured is not None and lead_s < measured.stop_s:
        raise ConfigError(
            f"cluster.signal_lead_s={lead_s} is shorter than one step ({_seconds(measured.step_s)}) plus a save "
            f"({_seconds(measured.save_s)}), as measured in run {measured.run_id}",
            hint=f"set at least cluster.signal_lead_s={_advised(measured.stop_s)}",
        )
    first_s = measured.start_s + measured.step_s if measured is not None else 0.0
    earliest_s = limit_s - lead_s - (SLURM_EARLY_S if lead_s else 0)
    if earliest_s <= first_s:
        started = f", and {_seconds(first_s)} from the start to the end of the first step" if measured else ""
        raise ConfigError(
            f"cluster.time_limit_min={cluster.time_limit_min} is too short for cluster.signal_lead_s={lead_s}, the "
            f"{SLURM_EARLY_S} s that SLURM may be early{started}: the job would be told to stop before it has done anything",
            hint=f"set at least cluster.time_limit_min={math.floor((limit_s - earliest_s + first_s) / 60) + 1}",
        )
    if measured is None or times is None or times.grace_s is None:
        return []
    kill_wait_s = times.kill_wait_s or 0.0
    if times.grace_s + kill_wait_s >= measured.stop_s:
        return []
    grace = f"{times.grace_s:.0f} s (GraceTime of {times.grace_of}) and {kill_wait_s:.0f} s (KillWait)"
    stop = f"one step ({_seconds(measured.step_s)}) plus a save ({_seconds(measured.save_s)})"
    return [
        f"a preempted job lives on for {grace}, less than {stop}, as measured in run {measured.run_id}: after a preemption "
        "it goes on from its last regular checkpoint"
    ]


def measured_before(config: Config, run_dirs: Iterable[RunDir]) -> Measured | None:
    """Return the measurements of the newest of these runs with the same config hash and as many ranks; None: there are none.

    Args:
        run_dirs: oldest first.
    """
    wanted, found = config_hash(config), []
    sizes = {nodes * config.cluster.tasks_per_node for nodes in usable_sizes(config)}
    for run_dir in reversed(list(run_dirs)):
        try:
            measured = _measured(run_dir, sizes) if run_dir.info().get("config_hash") == wanted else None
        except UnreadableRecordError:
            continue
        if measured is not None:
            found.append(measured)
        if len(found) == RUNS_REMEMBERED:
            break
    if not found:
        return None
    return Measured(
        step_s=statistics.median(each.step_s for each in found),
        save_s=max(each.save_s for each in found),
        start_s=max(each.start_s for each in found),
        run_id=found[0].run_id,
    )


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
    saves = [value for value in saved if value is not None]
    if not steps or not saves:
        return None
    return Measured(
        step_s=statistics.median(steps),
        save_s=max(saves[-SAVES_REMEMBERED:]),
        start_s=sum(tries[-1].start_up_s.values()),
        run_id=run_dir.id,
    )


def _advised(needed_s: float) -> int:
    return math.ceil(needed_s * ROOM / 10) * 10


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
