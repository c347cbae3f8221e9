"""job=prepare: `prepare` with the attempts, signals, requeue and status of every job. Imports no torch.

Every task does its share of the units, and none waits for another during that. Rank 0 then waits for all, since it
writes the manifest, and the others wait for rank 0, since srun kills tasks that stay when others have exited.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.config.schema import Config
from slurmtrain.data.format.manifest import Manifest
from slurmtrain.data.prepare.finish import finish
from slurmtrain.data.prepare.unit_plan import PreparePlan, Unit, agree_on, make_plan
from slurmtrain.data.prepare.units_done import units_done
from slurmtrain.data.prepare.worker_pool import Tally, work
from slurmtrain.errors import EXIT_REQUEUE
from slurmtrain.observe.metrics import MetricsLog
from slurmtrain.observe.progress import LINE_EVERY_S, Preparing, format_count
from slurmtrain.rank import attempt_context
from slurmtrain.rank.attempt_context import AttemptContext
from slurmtrain.rank.leaving import undeterred
from slurmtrain.rank.stop_watcher import StopWatcher
from slurmtrain.runs import attempts
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.reasons import LastWord
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.signals import StopCause, StopFlag

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # seconds between looks at other tasks' files: a shared file system has no event to await


def run_prepare(
    config: Config,
    environment: Environment,
    context: AttemptContext,
    stop_flag: StopFlag,
    stop_watcher: StopWatcher | None,
) -> int:
    """Do this task's share, and return its exit code, 0 or 75.

    Args:
        stop_watcher: rank 0's; None on the others.

    Raises:
        ConfigError: an input, the tokenizer or the output is wrong, or too many records are bad.
        DataError: an error that a retry may mend.
    """
    stop_together(stop_flag, context.attempt_dir)
    plan = make_plan(config.prepare)
    agree_on(plan)
    progress = Preparing()
    report = _Report(plan, config, context) if environment.rank == 0 else None

    def show(tally: Tally) -> None:
        progress.show(tally)
        if report is not None:
            report.update()

    units = share_of(plan, config, environment)
    finished = work(plan, units, workers_of(config, environment), lambda: stop_flag.requested, show)
    if report is None:
        finished = finished and _wait_for(context.attempt_dir.prepared_file, stop_flag)
    elif finished and (finished := report.wait_for_all(stop_flag)):
        manifest = finish(plan, config.prepare.max_bad_share)
        log.info(summary(plan, manifest))
        context.attempt_dir.prepared_file.touch()
    if not finished:
        context.attempt_dir.stopping_file.touch()
    if stop_watcher is not None and stop_flag.requested:
        stop_watcher.wait_for_record()
    if report is not None:
        with undeterred("write the last line of the log of metrics"):
            report.close()
        said = LastWord.FINISHED if finished else LastWord.STOPPED
        attempt_context.record_last_word(context, said, last_step=report.done)
    return 0 if finished else EXIT_REQUEUE


def share_of(plan: PreparePlan, config: Config, environment: Environment) -> Sequence[Unit]:
    """Return the units of this task in its part of the plan."""
    return _part(plan, config)[environment.rank :: environment.world_size]


def workers_of(config: Config, environment: Environment) -> int:
    """Return the number of processes of this task: as many as it has CPUs, unless the config sets it."""
    if config.prepare.workers:
        return config.prepare.workers
    cpus = len(os.sched_getaffinity(0))
    if environment.source == "slurm":  # SLURM need not bind tasks to the CPUs that it gives them
        return min(cpus, int(os.environ.get("SLURM_CPUS_PER_TASK", cpus)))
    return max(1, cpus // environment.local_world_size)


def summary(plan: PreparePlan, manifest: Manifest | None) -> str:
    """Describe the result in a sentence."""
    if manifest is None:
        done = len(units_done(plan.output))
        return f"this part is done, {done} of {len(plan.units)} units in all; who does the last one writes the manifest"
    splits = ", ".join(
        f"{name}: {format_count(split.documents)} documents, {format_count(split.tokens)} tokens"
        for name, split in manifest.splits.items()
    )
    bad = f"; {manifest.bad} bad records left out" if manifest.bad else ""
    return f"prepared {plan.output} ({splits}){bad}"


def _part(plan: PreparePlan, config: Config) -> Sequence[Unit]:
    return plan.units[config.prepare.part :: config.prepare.parts]


class _Report:
    """Rank 0's report on all tasks: the number of units done in place of steps, for `status`."""

    def __init__(self, plan: PreparePlan, config: Config, context: AttemptContext):
        self._output = plan.output
        self._names = {unit.name for unit in _part(plan, config)}
        context.run_dir.update_info(steps=len(self._names))
        self.done = self._before = done_before(context, self._count())
        attempt_context.update_attempt(context, first_step=self._before, stepping=time.time())
        self._log = MetricsLog(context.run_dir.metrics_file, self.done)
        self._began = self._due = time.monotonic()

    def update(self) -> None:
        """Record the number of units done, at intervals."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_EVERY_S
            self._write()

    def wait_for_all(self, stop_flag: StopFlag) -> bool:
        """Wait until all tasks have done their share; return False when a stop was requested before."""
        while self._count() < len(self._names):
            self.update()
            if stop_flag.wait(LOOK_EVERY_S):
                return False
        return True

    def close(self) -> None:
        self._write()
        self._log.close()

    def _write(self) -> None:
        self.done = self._count()
        new = self.done - self._before
        pace = {"step_time_s": (time.monotonic() - self._began) / new} if new else {}
        self._log.write(self.done, **pace)

    def _count(self) -> int:
        return len(self._names & units_done(self._output))


def done_before(context: AttemptContext, now: int) -> int:
    """Return the number of units that were done when this attempt began, of which `now` are done by now.

    Another task may have begun before this one has counted. When an attempt has ended, all its tasks have.
    """
    earlier = [each.last_step for each in attempts.all_attempts(context.run_dir) if each.number < context.number]
    counted = [step for step in earlier if step is not None]
    return min([now, *counted[-1:]])


def _wait_for(path: Path, stop_flag: StopFlag) -> bool:
    """Wait until a file exists, by listing its folder; return False when a stop was requested before."""
    while not _is_listed(path):
        if stop_flag.wait(LOOK_EVERY_S):
            return False
    return True


def _is_listed(path: Path) -> bool:
    """Return whether a file exists by listing its folder: NFS may keep the answer that a file is missing."""
    return path.name in os.listdir(path.parent)


def stop_together(stop_flag: StopFlag, attempt_dir: AttemptDir) -> None:
    """Stop all tasks when one is told to stop: rank 0's watch knows the clock and the switches, others may have a signal."""

    def tell_and_hear() -> None:
        while not stop_flag.wait(LOOK_EVERY_S):
            if _is_listed(attempt_dir.stopping_file):
                stop_flag.request(StopCause.OTHER_RANK)
        attempt_dir.stopping_file.touch()

    threading.Thread(target=tell_and_hear, name="stop-together", daemon=True).start()
