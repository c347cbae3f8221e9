"""A search with Optuna: as soon as a trial ends the next one begins, and one that does badly is stopped early.

Each line of the log of trials is written before what it says is done, and all that is done may be done again: points and
runs by their identity, jobs by the token of their array, a stop by its request. So when this process is killed between any
two lines, the next one goes on with the same trials.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.choices import BestMode, Pruner
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, RunFailedError, SlurmtrainError, UnreadableRecordError, UsageError
from slurmtrain.report.goodput.causes import Cause
from slurmtrain.report.goodput.run import goodput_of
from slurmtrain.report.status.look import states
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.sweep.adaptive import OpenSweep, Wanted
from slurmtrain.sweep.jobs import Submission, check_submitted
from slurmtrain.sweep.local import alone
from slurmtrain.sweep.optuna_study import Study
from slurmtrain.sweep.points import Composer, values_of
from slurmtrain.sweep.pruning import LoggedValues, ask_to_end
from slurmtrain.sweep.search import checked, explaining_sweeper, result_of
from slurmtrain.sweep.search_runs import ClusterRuns, ProcessRuns
from slurmtrain.sweep.trials import (
    LogEvent,
    Trial,
    TrialCost,
    TrialLog,
    TrialState,
    best_of,
    state_of_end,
    to_ask,
    to_report,
)
from slurmtrain.system.files import write_text

log = logging.getLogger(__name__)

ASK_AGAIN_S = 20.0  # a run that is to be stopped, and has not ended
NOT_YET_S = 2.0  # one that could not be asked to stop
SUBMIT_AGAIN_S = 60.0  # after a limit has kept jobs out of the queue, if no trial ends before
NOT_TRAINING = (Cause.QUEUE, Cause.STOPPED, Cause.STARTUP)
RESULTS = "optimization_results.yaml"  # in the sweep's folder, as Hydra's own sweeper writes it


class OptunaSearch:
    """A search from its first trial, or from where another process has left it, to its last.

    Args:
        base: the config without the choices.
        composed: the same as Hydra composes it, with its node `hydra`.
        words: the overrides of the command line that are not Hydra's own.
        searched: the keys whose values are chosen.
    """

    def __init__(
        self,
        composer: Composer,
        open_sweep: OpenSweep,
        base: Config,
        composed: Any,
        words: Sequence[str],
        searched: Sequence[str],
    ):
        self._composer, self._open_sweep = composer, open_sweep
        self._base, self._searched = base, searched
        self._metric, self._prunes = base.checkpoint.best_metric, base.search.pruner != Pruner.NONE
        with explaining_sweeper():
            self._study = Study(composed, words, base.search)
        # The trials that have not ended, by the run that computes them: two with the same config share one.
        self._running: dict[RunDir, list[int]] = {}
        self._logs: dict[RunDir, LoggedValues] = {}
        self._unreadable = set[RunDir]()
        self._ask_again: dict[RunDir, float] = {}
        self._failed_in_a_row = 0
        self._submit_again = 0.0
        self._log = TrialLog(open_sweep.sweep.trials_file)

    @property
    def trials(self) -> list[Trial]:
        """The trials so far."""
        return self._log.trials

    @property
    def maximize(self) -> bool:
        return self._study.maximize

    def run(self) -> None:
        """Go on until all trials have ended.

        Raises:
            RunFailedError: too many trials in a row have failed, or none has a result.
            ClusterError: a job cannot be submitted, or another process is at this search.
        """
        sweep = self._open_sweep.sweep
        with alone(sweep):
            self._log = TrialLog(sweep.trials_file)
            if self._log.remark is not None:
                log.warning("%s", self._log.remark)
            with explaining_sweeper():
                self._study.replay(self._log.lines, self._log.trials)
            pack = sweep.pack
            parallelism = sweep.info()["parallelism"]
            local = self._open_sweep.client is None
            slots = min(self._study.n_jobs, parallelism or (pack if local else self._study.n_jobs))
            runs = ProcessRuns(self._open_sweep, show=slots == 1) if local else ClusterRuns(self._open_sweep)
            with runs:
                self._take_up(runs)
                while True:
                    self._refill(runs, slots, pack)
                    if not self._running:
                        break
                    for run_dir, now in runs.ended(self._prunes):
                        self._end(run_dir, now)
                    self._prune()
            self._write_results()

    def _take_up(self, runs: ClusterRuns | ProcessRuns) -> None:
        """Go on with the trials that another process has left, and with those that had failed and were tried again.

        Those that were started keep their run, whatever has become of their config's checks: its job may be running.
        """
        sweep = self._open_sweep.sweep
        left = [trial for trial in self._log.trials if trial.state == TrialState.RUNNING]
        for trial in left:
            if trial.run_id is not None:
                self._wait_for(sweep.run_dir(trial.run_id), trial.number)
        self._begin([trial for trial in left if trial.run_id is None], runs)
        failed = {
            trial.number: sweep.run_dir(trial.run_id)
            for trial in self._log.trials
            if trial.state == TrialState.FAIL and trial.run_id is not None
        }
        now = states([run_dir for run_dir in dict.fromkeys(failed.values()) if run_dir.info_file.exists()])
        for number, run_dir in failed.items():
            its = now.get(run_dir.id)
            alive = its is not None and its.alive and self._open_sweep.client is not None
            if its is not None and (alive or its.status == RunStatus.FINISHED):
                if alive:
                    log.info("trial %d had failed, and run %s is tried again: waiting for it", number, run_dir.id)
                self._wait_for(run_dir, number)
                runs.watch([run_dir])

    def _wait_for(self, run_dir: RunDir, number: int) -> None:
        self._running.setdefault(run_dir, []).append(number)
        self._logs.setdefault(run_dir, LoggedValues(run_dir, self._metric))

    def _refill(self, runs: ClusterRuns | ProcessRuns, slots: int, pack: int) -> None:
        """Ask for so many trials that all slots are taken, and submit them."""
        if self._submit_again and time.monotonic() < self._submit_again:
            return
        if self._submit_again:  # what is left over from the last time comes first
            self._begin([], runs)
            return
        while True:
            asked, running = len(self._log.trials), sum(map(len, self._running.values()))
            count = to_ask(asked=asked, wanted=self._study.n_trials, running=running, slots=slots, pack=pack)
            if not count:
                return
            begun = []
            for _ in range(count):
                with explaining_sweeper():
                    chosen = self._study.ask()
                number = len(self._log.trials)
                begun.append(
                    self._log.add(
                        LogEvent.ASKED,
                        number,
                        overrides=chosen.overrides,
                        params=chosen.params,
                        attributes=chosen.attributes,
                    )
                )
            self._begin(begun, runs)  # those whose config is refused have failed, and others take their place
            if self._submit_again:
                return

    def _begin(self, trials: Sequence[Trial], runs: ClusterRuns | ProcessRuns) -> None:
        """Start the runs of trials that were asked for and have no run, and what else waits for its start."""
        wanted, refused = [], []
        for trial in trials:
            try:
                config = checked(self._composer, trial.overrides)
                self._open_sweep.check(config)
            except SlurmtrainError as error:  # other combinations of values may be valid
                refused.append((trial, error.message))
            else:
                wanted.append((trial, Wanted(values_of(trial.overrides, self._searched), config)))
        run_dirs = self._open_sweep.add([each for _, each in wanted]) if wanted else []
        for (trial, _), run_dir in zip(wanted, run_dirs, strict=True):
            self._log.add(LogEvent.STARTED, trial.number, run=run_dir.id)
            self._wait_for(run_dir, trial.number)
        submission = runs.start(list(self._running)) if self._running else Submission([], [])
        self._submit_again = 0.0
        if submission.limit is not None:
            if not runs.watched:
                check_submitted(submission)
            self._submit_again = time.monotonic() + SUBMIT_AGAIN_S
            log.info("%s; trials go on as others end", submission.limit.message)
        for trial, why in refused:
            self._tell(trial, TrialState.FAIL, None, why=why)

    def _judged(self, run_dir: RunDir) -> list[Trial]:
        """Return the trials of a run that have not ended. One that had failed, and is tried again, is not judged."""
        trials = [self._log.trials[number] for number in self._running[run_dir]]
        return [trial for trial in trials if trial.state == TrialState.RUNNING]

    def _prune(self) -> None:
        """Tell the pruner what the trials have logged, and have those stopped that it gives up."""
        if not self._prunes:
            return
        for run_dir in self._running:
            judged = self._judged(run_dir)
            if not judged:
                continue
            if all(trial.pruned_at is None for trial in judged) and self._report(run_dir):
                step, value = trial_at(self._judged(run_dir)[0])
                log.info(
                    "%s %s: pruned at step %d, where its %s is %.6g",
                    run_dir.id,
                    " ".join(run_dir.info()["varied"]),
                    step,
                    self._metric,
                    value,
                )
            if any(trial.pruned_at is not None for trial in self._judged(run_dir)):
                self._stop(run_dir)

    def _report(self, run_dir: RunDir) -> bool:
        """Tell the pruner the values that were added to a run's log; return whether its trials are to be pruned."""
        numbers = [trial.number for trial in self._judged(run_dir)]
        try:
            added = list(self._logs[run_dir].added())
        except UnreadableRecordError as error:
            if run_dir not in self._unreadable:  # once, not at every look
                log.warning("%s; so run %s is not pruned now", error.message, run_dir.id)
            self._unreadable.add(run_dir)
            return False
        decided = not self._study.given_up.isdisjoint(numbers)  # by who was killed before that was noted
        for step, value in () if decided else self._to_report(run_dir, added):
            decided = self._tell_value(run_dir, step, value)
            if decided:
                break
        if decided:
            for number in numbers:
                self._log.add(LogEvent.PRUNING, number, step=self._log.trials[number].last_step)
        return decided

    def _to_report(self, run_dir: RunDir, added: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return those of the values that were logged that at least one trial of the run is judged by."""
        return to_report(added, min((trial.last_step for trial in self._judged(run_dir)), default=-1))

    def _tell_value(self, run_dir: RunDir, step: int, value: float) -> bool:
        """Tell the pruner a value of the trials of a run, and return whether it gives one of them up."""
        decided = False
        for trial in self._judged(run_dir):
            if step > trial.last_step:  # the trials of one run may have begun at different moments
                self._log.add(LogEvent.VALUE, trial.number, step=step, value=value)
                decided = self._study.report(trial.number, step, value) or decided
        return decided

    def _stop(self, run_dir: RunDir) -> None:
        """Have a run stopped; once more if it is still there after a while, since it may just have started again."""
        if time.monotonic() < self._ask_again.get(run_dir, 0.0):
            return
        self._ask_again[run_dir] = time.monotonic() + NOT_YET_S
        try:
            if ask_to_end(run_dir, self._open_sweep.client):
                self._ask_again[run_dir] = time.monotonic() + ASK_AGAIN_S
        except (ClusterError, UnreadableRecordError) as error:  # the next look tries again
            log.warning("%s cannot be stopped now: %s", run_dir.id, error.message)
        except OSError as error:
            log.warning("%s cannot be stopped now: %s", run_dir.id, error.strerror)

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
        judged = self._judged(run_dir)
        if self._prunes and judged and all(trial.pruned_at is None for trial in judged):
            self._report_rest(run_dir)
        value, why = None, ""
        finished = now.status == RunStatus.FINISHED
        try:
            goal, value = result_of(run_dir, now)
            self._say_result(run_dir, goal.metric, value)
        except RunFailedError as failure:
            why = failure.message
        for number in self._running[run_dir]:
            trial = self._log.trials[number]
            pruned = trial.pruned_at is not None or (now.status == RunStatus.PRUNED and bool(trial.values))
            end = state_of_end(finished=finished, pruned=pruned, value=value)
            self._tell(trial, end, value, why=why if end == TrialState.FAIL else "", run_dir=run_dir, now=now)
        del self._running[run_dir]  # after the last line: a search that fails in between finds it again
        self._logs.pop(run_dir, None)
        self._submit_again = 0.0 if not self._submit_again else time.monotonic()

    def _report_rest(self, run_dir: RunDir) -> None:
        """Tell the pruner what a run had logged when it ended: others are compared with it."""
        try:
            added = list(self._logs[run_dir].added())
        except UnreadableRecordError:
            return
        for step, value in self._to_report(run_dir, added):
            self._tell_value(run_dir, step, value)

    def _tell(
        self,
        trial: Trial,
        end: TrialState,
        value: float | None,
        *,
        why: str = "",
        run_dir: RunDir | None = None,
        now: RunState | None = None,
    ) -> None:
        again = trial.state != TrialState.RUNNING
        if again and end != TrialState.COMPLETE:  # it has failed once more
            return
        facts: dict[str, Any] = {"state": end, "value": value, "why": why}
        if run_dir is not None and now is not None:
            facts |= _facts_of(run_dir, now)
        trial = self._log.add(LogEvent.TOLD, trial.number, **facts)
        if again:
            log.info("trial %d had failed, and run %s was tried again: its result counts", trial.number, trial.run_id)
            self._study.add(trial)
        else:
            self._study.tell(trial.number, end, value)
        if end != TrialState.FAIL:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        log.warning("trial %d (%s) has failed: %s", trial.number, " ".join(self._chosen(trial)), why)
        if self._failed_in_a_row >= self._base.search.max_failures_in_a_row:
            raise RunFailedError(
                f"{self._failed_in_a_row} trials in a row have failed (search.max_failures_in_a_row), the last one: {why}"
            )

    def _say_result(self, run_dir: RunDir, metric: str, value: float) -> None:
        best = best_of(self._log.trials, maximize=self.maximize)
        better = best is None or best.value is None or (value > best.value if self.maximize else value < best.value)
        words = " ".join(run_dir.info()["varied"])
        log.info("%s %s: %s %.6g%s", run_dir.id, words, metric, value, ", the best so far" if better else "")

    def _chosen(self, trial: Trial) -> list[str]:
        return [f"{key}={value}" for key, value in values_of(trial.overrides, self._searched).items()]

    def _write_results(self) -> None:
        """Write the best trial as Hydra's own sweeper does.

        Raises:
            RunFailedError: no trial has a result.
        """
        from omegaconf import OmegaConf

        best = best_of(self._log.trials, maximize=self.maximize)
        if best is None:
            raise RunFailedError(f"none of {len(self._log.trials)} trials has a result")
        facts = {"name": "optuna", "best_params": dict(best.params), "best_value": best.value}
        write_text(self._open_sweep.sweep.path / RESULTS, OmegaConf.to_yaml(OmegaConf.create(facts)))
        log.info("the best of %d trials: %s: %.6g", len(self._log.trials), " ".join(self._chosen(best)), best.value)


def _facts_of(run_dir: RunDir, now: RunState) -> dict[str, Any]:
    """Return what the log keeps of a run that has ended: the run itself may be removed."""
    facts: dict[str, Any] = {"run": run_dir.id, "steps": now.step}
    try:
        facts["steps_planned"] = run_dir.info().get("steps")
        spent = goodput_of(run_dir, alive=False)
    except UnreadableRecordError:
        return facts
    trained = sum(seconds for cause, seconds in spent.seconds.items() if cause not in NOT_TRAINING)
    cost = TrialCost(gpus=spent.gpu_count, held_s=spent.held_s, trained_s=trained)
    return {**facts, "spent": {"gpus": cost.gpus, "held_s": cost.held_s, "trained_s": cost.trained_s}}


def trial_at(trial: Trial) -> tuple[int, float]:
    """Return step and value of a trial's last intermediate value."""
    return trial.last_step, trial.values[trial.last_step]


def check_settings(sweeper: Mapping[str, Any], base: Config) -> None:
    """Check the settings of hydra/sweeper=optuna that a search by results of runs cannot do with.

    Raises:
        UsageError: they are for several results at once, for the opposite of checkpoint.best_mode, or for no trial.
    """
    direction = sweeper.get("direction")
    if isinstance(direction, list):
        raise UsageError(
            f"hydra.sweeper.direction has {len(direction)} directions, and a run has one result",
            hint="hydra.sweeper.direction=minimize; checkpoint.best_metric says of which metric",
        )
    expected = "maximize" if base.checkpoint.best_mode == BestMode.MAX else "minimize"
    if direction in ("minimize", "maximize") and direction != expected:
        raise UsageError(
            f"hydra.sweeper.direction={direction}, but checkpoint.best_mode={base.checkpoint.best_mode} of "
            f"{base.checkpoint.best_metric}",
            hint=f"hydra.sweeper.direction={expected}, or another checkpoint.best_metric and best_mode",
        )
    for name in ("n_jobs", "n_trials"):
        if int(sweeper.get(name, 1)) < 1:
            raise UsageError(f"hydra.sweeper.{name}={sweeper[name]}: at least 1 was expected")
