"""`-m hydra/sweeper=optuna ... submit`: as soon as a trial ends the next one begins, and a bad one is stopped early.

All that is done may be done again: points and runs by their identity, jobs by the token of their array, a stop by its
request. So when this process is killed at any moment, the next one goes on with the trials that the study has recorded.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterable, Sequence

from slurmtrain.choices import Pruner
from slurmtrain.config.compose import Composer
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, RunFailedError, SlurmtrainError, UnreadableRecordError
from slurmtrain.observe import read_metrics
from slurmtrain.report import collect
from slurmtrain.report.status.look import state
from slurmtrain.report.status.state import WAITING, RunState, RunStatus
from slurmtrain.runs import requests
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import RunAction
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.adaptive import OpenSweep, Runs
from slurmtrain.sweep.study import Study, Trial, TrialState
from slurmtrain.system import records

log = logging.getLogger(__name__)

ASK_AGAIN_S = 10.0  # a run that is to be stopped, and has not ended
EVERY_STEP_UP_TO = 100  # from then on reported values are at least 1 % of the steps apart, so that long logs stay cheap
STEPS_APART = 1.01


class Search:
    """A search from its first trial, or from where another process has left it, to its last.

    Args:
        base: the config without the choices.
        fixed: the overrides of the command line that choose nothing.
        show: print what the ranks print, if one trial at a time runs on this machine.
    """

    def __init__(
        self, composer: Composer, opened: OpenSweep, study: Study, base: Config, fixed: Sequence[str], *, show: bool
    ):
        self._composer, self._opened, self._study, self._fixed = composer, opened, study, fixed
        self._metric, self._prunes = base.checkpoint.best_metric, base.search.pruner != Pruner.NONE
        self._most_failures = base.search.max_failures_in_a_row
        local = opened.client is None
        self._slots = min(study.n_jobs, opened.parallelism or (opened.sweep.pack if local else study.n_jobs))
        self._runs = Runs(opened, show=show and self._slots == 1, at_once=self._slots)
        self._running: dict[int, RunDir] = {}  # of the trials that have not ended; two with the same config share a run
        self._read: dict[RunDir, int] = {}  # size of the log when it was read last
        self._asked: dict[RunDir, float] = {}  # when a run was asked to end
        self._failed_in_a_row = 0
        self._full = False  # a limit has kept jobs out of the queue, until others have ended

    def run(self) -> None:
        """Go on until all trials have ended.

        Raises:
            RunFailedError: too many trials in a row have failed, or none has a result.
            ClusterError: a job cannot be submitted, or another process is at this search.
        """
        with self._opened.alone():
            self._study.open(self._opened.sweep)
            with self._runs:
                self._take_up()
                while self._refill() or self._running:
                    for run_dir, now in self._runs.ended(soon=self._prunes) if self._running else ():
                        self._end(run_dir, now)
                    if self._prunes:
                        self._prune()
            self._say_best()

    def _take_up(self) -> None:
        """Go on with the trials that another process has left.

        Those that were started keep their run, whatever has become of their config's checks: its job may be running.
        """
        left = [trial for trial in self._study.trials if trial.state == TrialState.RUNNING]
        self._running = {trial.number: self._opened.sweep.run_dir(trial.run) for trial in left if trial.run}
        self._begin([trial for trial in left if not trial.run])

    def _refill(self) -> bool:
        """Ask for so many trials that all slots are taken, and start them; return whether there were any."""
        pack = self._opened.sweep.pack
        count = to_ask(left=self._study.left, running=len(self._running), slots=self._slots, pack=pack)
        if self._full or not count:
            return False
        # Those whose config is refused have failed, and others take their place at the next call.
        self._begin([self._study.ask() for _ in range(count)])
        return True

    def _begin(self, trials: Iterable[Trial]) -> None:
        """Start the runs of trials that have none, and what else waits for its start."""
        refused = []
        for trial in trials:
            varied = {key.lstrip("+"): value for key, value in trial.chosen.items()}
            try:
                run_dir = self._opened.add(varied, self._composer.compose([*self._fixed, *_chosen(trial)]))
            except SlurmtrainError as error:  # other combinations of values may be valid
                refused.append((trial, error.message))
            else:
                self._study.note(trial.number, run=run_dir.id)
                self._running[trial.number] = run_dir
        if self._running:
            submission = self._runs.start(self._running.values())
            self._full = submission.limit is not None
            if submission.limit is not None:
                if not self._runs.in_queue:
                    submission.check()
                log.info("%s; trials go on as others end", submission.limit.message)
        for trial, why in refused:
            self._failed(trial, why)

    def _prune(self) -> None:
        """Report to the pruner what the trials have logged, and have those stopped that it gives up."""
        for number, run_dir in self._running.items():
            trial = self._study.trial(number)
            if trial.pruned_at is None and self._report(trial, run_dir):
                at = self._study.trial(number).last_step
                self._study.note(number, pruned_at=at)
                words = " ".join(_chosen(trial))
                log.info("%s %s: pruned at step %d by its %s", run_dir.id, words, at, self._metric)
            if self._study.trial(number).pruned_at is not None:
                self._stop(run_dir)

    def _report(self, trial: Trial, run_dir: RunDir, *, at_its_end: bool = False) -> bool:
        """Report what was added to a run's log, if that is worth reading it; return whether its trial is given up."""
        with contextlib.suppress(FileNotFoundError):
            size, read = run_dir.metrics_file.stat().st_size, self._read.get(run_dir, 0)
            if read <= size < read * STEPS_APART and not at_its_end:
                return False
            self._read[run_dir] = size
        try:
            logged = read_metrics(run_dir.metrics_file)
        except UnreadableRecordError as error:
            log.warning("%s; so run %s is not pruned now", error.message, run_dir.id)
            return False
        values = [(each["step"], each[self._metric]) for each in logged if records.is_scalar(each.get(self._metric))]
        return any(self._study.report(trial.number, *each) for each in to_report(values, trial.last_step))

    def _stop(self, run_dir: RunDir) -> None:
        """Have a run stopped; once more if it is still there after a while, since it may just have started again."""
        if time.monotonic() - self._asked.get(run_dir, -ASK_AGAIN_S) < ASK_AGAIN_S:
            return
        self._asked[run_dir] = time.monotonic()
        try:
            ask_to_end(run_dir, self._opened.client)
        except (ClusterError, UnreadableRecordError, OSError) as error:
            log.warning("%s cannot be stopped now: %s", run_dir.id, getattr(error, "message", error))

    def _end(self, run_dir: RunDir, now: RunState) -> None:
        """Tell the study how the trials of a run have ended.

        Raises:
            UnreadableRecordError: the files of the run do not tell how it has ended.
        """
        if now.status == RunStatus.UNREADABLE:  # its job may be running
            raise UnreadableRecordError(
                now.explanation,
                hint="without the folder of the run, its trial counts as failed, and the search goes on",
            )
        value, why = None, ""
        try:
            goal, value = result_of(run_dir, now)
        except RunFailedError as failure:
            why = failure.message
        for number in [number for number, its in self._running.items() if its == run_dir]:
            trial = self._study.trial(number)
            if self._prunes and trial.pruned_at is None:  # others are compared with what it has logged at the end
                self._report(trial, run_dir, at_its_end=True)
            self._study.note(number, steps=now.step)
            # A run that had finished before it could be stopped counts with its result.
            if value is not None:
                best = self._study.best()
                better = best is None or best.value is None or (value > best.value) == self._study.maximize
                more = ", the best so far" if better else ""
                log.info("%s %s: %s %.6g%s", run_dir.id, " ".join(_chosen(trial)), goal.metric, value, more)
                self._study.tell(number, TrialState.COMPLETE, value)
                self._failed_in_a_row = 0
            elif now.status != RunStatus.FINISHED and (trial.pruned_at is not None or now.status == RunStatus.PRUNED):
                self._study.tell(number, TrialState.PRUNED)
                self._failed_in_a_row = 0
            else:
                self._failed(trial, why)
            del self._running[number]
        if self._full:
            self._begin([])

    def _failed(self, trial: Trial, why: str) -> None:
        self._study.note(trial.number, why=why)
        self._study.tell(trial.number, TrialState.FAIL)
        self._failed_in_a_row += 1
        log.warning("trial %d (%s) has failed: %s", trial.number, " ".join(_chosen(trial)), why)
        if self._failed_in_a_row >= self._most_failures:
            raise RunFailedError(
                f"{self._failed_in_a_row} trials in a row have failed (search.max_failures_in_a_row), the last one: {why}"
            )

    def _say_best(self) -> None:
        """Log which trial is the best. Raise RunFailedError if no trial has a result."""
        best, count = self._study.best(), len(self._study.trials)
        if best is None:
            raise RunFailedError(f"none of {count} trials has a result")
        log.info("the best of %d trials: %s: %.6g", count, " ".join(_chosen(best)), best.value)


def _chosen(trial: Trial) -> list[str]:
    return [f"{key}={value}" for key, value in trial.chosen.items()]


def to_ask(*, left: int, running: int, slots: int, pack: int = 1) -> int:
    """Return how many trials are to be asked for now, so that `slots` always run or wait.

    Args:
        left: number of trials that are still to be asked for.
        running: number of those that have not ended.
        pack: runs that share a job; they start together, so as many slots have to be free.
    """
    free = max(0, slots - running)
    return left if free >= left else free - free % min(pack, slots)


def to_report(values: Iterable[tuple[int, float]], last: int) -> list[tuple[int, float]]:
    """Return the logged (step, value) pairs that a pruner is told, given the last step that it was told.

    Steps go up: what a resumed run repeats is told once. All trials log the same steps, so all are judged at the same
    ones.
    """
    found = []
    for step, value in values:
        if step > last and (step <= EVERY_STEP_UP_TO or step >= last * STEPS_APART):
            found.append((step, value))
            last = step
    return found


def result_of(run_dir: RunDir, now: RunState) -> tuple[collect.Goal, float]:
    """Return goal and best value of a run, as `sweep collect` shows them.

    Raises:
        RunFailedError: it has not finished, or has logged no metric.
    """
    if now.status != RunStatus.FINISHED:
        raise RunFailedError(f"run {run_dir.id} {now.status}: {now.explanation}", hint=f"status {run_dir.id}")
    table = collect.table_of([collect.Point(0, {}, run_dir, now.status)])
    value = table.column(table.goal.column)[0] if table.goal is not None else None
    if table.goal is not None and value is None:
        raise RunFailedError(f"run {run_dir.id} has finished, but its {table.goal.metric} was never finite")
    if table.goal is None or value is None:
        raise RunFailedError(f"run {run_dir.id} has finished and logged no metric", hint="set checkpoint.best_metric")
    return table.goal, float(value)


def ask_to_end(run_dir: RunDir, client: SlurmClient | None) -> None:
    """Have a run of a search stopped for good, if it can be asked now.

    Its ranks are warned as before a requeue: they agree on a step, save and leave, and then the job does not come back. A
    job that waits to start again is taken out of the queue. One that is just starting cannot be asked yet.

    Raises:
        ClusterError: SLURM refuses or does not answer.
        OSError: the request could not be written.
    """
    now = state(run_dir)
    last = now.attempts[-1] if now.attempts else None
    if now.status not in (*WAITING, RunStatus.RUNNING) or now.slurm_error is not None or last is None:
        return
    requests.write_request(run_dir, RunAction.PRUNE)
    try:
        if client is None:
            requests.signal_ranks(run_dir, last, signal.SIGTERM)
        elif now.status == RunStatus.RUNNING:
            client.signal((last.step_id if now.packed else now.job_id) or "", "USR2")
        elif not now.packed:  # of a pack, those that were asked to end are left out when the job starts
            client.cancel(now.job_id or "")
    except BaseException:
        run_dir.request_file.unlink(missing_ok=True)
        raise
    run_dir.event(Event.PRUNE_ASKED)
