"""`-m hydra/sweeper=optuna ... submit`: as soon as a trial ends the next one begins, and a bad one is stopped early.

All that is done may be done again: points and runs by their identity, jobs by the token of their array, a stop by its
request. So when this process is killed at any moment, the next one goes on with the trials that the study has recorded.

On disk it is a sweep like any other, and every verb accepts it. One process at a time controls it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.choices import Pruner
from slurmtrain.config.compose import Composer
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, SlurmtrainError, UnreadableRecordError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.report import collect
from slurmtrain.report.status.state import WAITING, RunState, RunStatus, is_over, state, states
from slurmtrain.report.status.waiting import EndWatch, RunFailedError
from slurmtrain.runs import requests
from slurmtrain.runs.create import new_run_id
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.requests import RunAction
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Point, Sweep
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.folder import add_run, create_sweep, find_same
from slurmtrain.sweep.jobs import REMOVED, LocalRuns, Submission, alone, submit_runs
from slurmtrain.sweep.plan import SweepPlan, check_belongs, identity_of, short_key
from slurmtrain.sweep.study import Study, Trial, TrialState, remove_cut_line
from slurmtrain.system import records
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5  # at the logs of runs on this machine, if somebody reads them
ASK_AGAIN_S = 10.0  # a run that is to be stopped, and has not ended
EVERY_STEP_UP_TO = 100  # from then on reported values are at least 1 % of the steps apart, so that long logs stay cheap
STEPS_APART = 1.01


@dataclass(frozen=True)
class OpenSweep:
    """A sweep in the process that controls it. All else is called within `alone`.

    Attributes:
        client: client of the cluster; None: the runs are processes of this machine.
        look: called with the config of each new point; it raises if the point cannot run.
        parallelism: number of points that may run at the same time; None: no limit.
        points: its points by the identity of their config: nobody else adds any.
    """

    sweep: Sweep
    sweep_plan: SweepPlan
    client: SlurmClient | None
    look: Callable[[Config], None] = lambda config: None
    parallelism: int | None = None
    points: dict[str, Point] = field(default_factory=dict, repr=False)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the process that controls the sweep, and go on with the points that are there.

        Raises:
            ClusterError: another process controls it.
        """
        with alone(self.sweep):
            remove_cut_line(self.sweep.points_file)
            self.points.update((point.identity, point) for point in self.sweep.points())
            yield

    def add(self, varied: dict[str, str], config: Config) -> RunDir:
        """Add a point unless it exists, and return its run.

        It may be cut short, and is done when the same point is asked for again.

        Args:
            varied: what distinguishes the point, by key, as text.

        Raises:
            SlurmtrainError: the config cannot be a point of this sweep, or it could not run.
        """
        config = with_absolute_paths(config, current_folder())
        check_belongs(config, self.sweep_plan.first)
        if identity_of(config) not in self.points:
            self.look(config)
        identity = self.sweep_plan.add(config)
        if identity not in self.points:
            number = len(self.points)
            run_id = f"{new_run_id()}-{number:04d}"
            point = Point(number, varied, identity, self.sweep_plan.shapes[identity], run_id)
            with self.sweep.points_file.open("a") as file:
                file.write(json.dumps(asdict(point)) + "\n")
            self.points[identity] = point
        run_dir = self.sweep.run_dir(self.points[identity].run_id)
        if not run_dir.info_file.exists():
            add_run(self.sweep, self.points[identity], self.sweep_plan)
        return run_dir


class Runs:
    """The runs of an open sweep, as jobs of a cluster or as processes of this machine. Used within `here` and `alone`.

    A run whose directory is removed has ended, too: nothing more is to be expected of it.

    Args:
        show: print what the ranks of a run on this machine print.
        at_once: number of runs on this machine at the same time.
    """

    def __init__(self, opened: OpenSweep, *, show: bool, at_once: int):
        self._opened = opened
        self._watch = EndWatch(ask_first=False)
        self.here = LocalRuns(opened.sweep, show=show, at_once=at_once) if opened.client is None else None
        self._started = set[RunDir]()  # on this machine
        self._over: list[RunDir] = []  # before they could be started here

    @property
    def in_queue(self) -> bool:
        """Whether jobs are waited for, whose end makes room for others."""
        return bool(self._watch.waiting)

    def start(self, run_dirs: Iterable[RunDir]) -> Submission:
        """Submit or start those that have no job or process; all of them are reported when they have ended."""
        run_dirs = list(dict.fromkeys(run_dirs))
        there = [run_dir for run_dir in run_dirs if run_dir.info_file.exists()]
        if self._opened.client is not None:
            submission = submit_runs(self._opened.sweep, self._opened.client, there)
            self._watch.add(each for each in run_dirs if each not in there or each.info()["job_ids"])
            return submission
        assert self.here is not None
        for run_dir in run_dirs:
            if run_dir not in self._started:
                self._started.add(run_dir)
                stopped = run_dir in there and states([run_dir])[run_dir].status == RunStatus.STOPPED
                if run_dir in there and (stopped or not is_over(run_dir)):
                    self.here.start(run_dir)
                else:
                    self._over.append(run_dir)
        return Submission([], [])

    def ended(self, *, soon: bool = False) -> list[tuple[RunDir, RunState]]:
        """Wait a moment, or on this machine until a run has ended, and return those that have, in that order.

        Args:
            soon: wait only for a moment on this machine, too, since somebody reads the logs of the runs.

        Raises:
            UnreadableRecordError: the files of a run cannot be used.
            ClusterError: a run cannot be started on this machine.
            KeyboardInterrupt: a person has stopped this process, and the runs on this machine with it.
        """
        if self.here is None:
            gone = [run_dir for run_dir in self._watch.waiting if not run_dir.path.exists()]
            self._watch.forget(gone)
            found = [*((run_dir, REMOVED) for run_dir in gone), *self._watch.look()]
            if not found:
                time.sleep(self._watch.pause_s)
            return found
        run_dir = self._over.pop() if self._over else self.here.ended(LOOK_EVERY_S if soon else math.inf)
        if run_dir is None:
            return []
        self._started.remove(run_dir)  # another trial may have the same config
        now = states([run_dir])[run_dir] if run_dir.info_file.exists() else REMOVED
        if now.alive:  # since its processes of before are still there, as after a kill
            raise ClusterError(
                f"run {run_dir.id} cannot be continued here yet: {now.explanation}",
                hint="repeat the command when it has ended",
            )
        return [(run_dir, now)]


def open_sweep(
    sweep_plan: SweepPlan,
    overrides: Sequence[str],
    client: SlurmClient | None,
    *,
    parallelism: int | None = None,
    after: Sequence[RunDir] = (),
    again: bool = False,
    look: Callable[[Config], None] = lambda config: None,
) -> OpenSweep:
    """Return the sweep of this search: the one that exists, or a new one.

    Args:
        sweep_plan: a plan with a `search`, and no points.
        after: runs that have to finish before any of a new sweep begins.
        again: make another sweep, and do not continue the existing one.
        look: as in `OpenSweep`.

    Raises:
        ConfigError: its points cannot be those of a sweep.
    """
    check_belongs(sweep_plan.first, sweep_plan.first)  # before anything is made
    found = find_same(sweep_plan)
    if found is None or again:
        how: dict[str, Any] = {"parallelism": parallelism, "after": after, "again": again}
        found = create_sweep(sweep_plan, lambda number: {}, overrides, current_folder(), **how)
    elif count := found.point_count():
        log.info("sweep %s is there already, with %d points; going on with it", found.id, count)
    return OpenSweep(found, sweep_plan, client, look, parallelism or found.info()["parallelism"])


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
            with self._runs.here or contextlib.nullcontext():
                self._take_up()
                while self._refill() or self._running:
                    for run_dir, now in self._runs.ended(soon=self._prunes) if self._running else ():
                        self._end(run_dir, now)
                    if self._prunes:
                        self._prune()
            if self._study.best() is None:
                raise RunFailedError(f"none of {len(self._study.trials)} trials has a result")

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
            varied = {short_key(key): value for key, value in trial.chosen.items()}
            try:
                words = [*self._fixed, *(f"{key}={value}" for key, value in trial.chosen.items())]
                run_dir = self._opened.add(varied, self._composer.compose(words))
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
                words = trial.in_words
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
        value, why, hint = None, "", None
        try:
            goal, value = result_of(run_dir, now)
        except RunFailedError as failure:
            why, hint = failure.message, failure.hint
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
                log.info("%s %s: %s %.6g%s", run_dir.id, trial.in_words, goal.metric, value, more)
                self._study.tell(number, TrialState.COMPLETE, value)
                self._failed_in_a_row = 0
            elif now.status != RunStatus.FINISHED and (trial.pruned_at is not None or now.status == RunStatus.PRUNED):
                self._study.tell(number, TrialState.PRUNED)
                self._failed_in_a_row = 0
            else:
                self._failed(trial, why, hint)
            del self._running[number]
        if self._full:
            self._begin([])

    def _failed(self, trial: Trial, why: str, hint: str | None = None) -> None:
        self._study.note(trial.number, why=why)
        self._study.tell(trial.number, TrialState.FAIL)
        self._failed_in_a_row += 1
        log.warning("trial %d (%s) has failed: %s", trial.number, trial.in_words, why)
        if self._failed_in_a_row >= self._most_failures:
            many = f"{self._failed_in_a_row} trials in a row have failed (search.max_failures_in_a_row)"
            raise RunFailedError(f"{many}, the last one: {why}", hint=hint)


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
        RunFailedError: it has not finished, or has not logged the metric of the search; only then it has a hint.
    """
    if now.status != RunStatus.FINISHED:
        raise RunFailedError(f"run {run_dir.id} {now.status}: {now.explanation}")
    table = collect.table_of([collect.Point(0, {}, run_dir, now)])
    wanted = run_dir.config_values()["checkpoint"]["best_metric"]
    # The loss of the training stands for the default, and for no metric that somebody has chosen.
    if table.goal is None or table.goal.metric not in (wanted, "loss" if wanted == Keep.metric else wanted):
        # After point, run, state, step and what stands for the metric.
        names = ", ".join(table.columns[4 + (table.goal is not None) :])
        raise RunFailedError(
            f"run {run_dir.id} has finished and logged no metric {wanted!r}, only: {names or 'none at all'}",
            hint="checkpoint.best_metric=NAME chooses one that the runs log",
        )
    value = table.column(table.goal.column)[0]
    if value is None:
        raise RunFailedError(f"run {run_dir.id} has finished, but its {table.goal.metric} was never finite")
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
