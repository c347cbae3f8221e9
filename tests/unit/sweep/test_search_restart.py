"""A search that goes on after its process was killed, two of them at once, and runs that are no longer what they were."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.choices import Pruner
from slurmtrain.config.folders import Primary, search_folders
from slurmtrain.config.schema import Config, SearchConfig
from slurmtrain.errors import ClusterError, ConfigError, RunFailedError, UnreadableRecordError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.report.progress import Progress
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs.attempts import Attempt, write_attempt
from slurmtrain.runs.reasons import Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.sweep import optuna_search
from slurmtrain.sweep.adaptive import OpenSweep, Wanted, open_sweep
from slurmtrain.sweep.jobs import Submission
from slurmtrain.sweep.local import LocalRuns, alone
from slurmtrain.sweep.optuna_search import OptunaSearch
from slurmtrain.sweep.plan import SweepPlan
from slurmtrain.sweep.points import composing, values_of
from slurmtrain.sweep.search import result_of
from slurmtrain.sweep.search_runs import ProcessRuns
from slurmtrain.sweep.trials import LogEvent, TrialLog, TrialState

PRIMARY = Primary("config", search_folders("config", None, None))
TRIALS = 8
LINE = [f"hydra.sweeper.n_trials={TRIALS}", "hydra.sweeper.n_jobs=3", "optim.lr=interval(0.01,1)"]
LINE += ["hydra.sweeper.sampler.seed=1", "hydra.sweeper.sampler.n_startup_trials=3"]
BEGIN = Callable[..., OptunaSearch]


class KilledError(BaseException):
    """The shell is killed."""


class Finishing:
    """Runs of a search that finish, in the order of their loss, which is the learning rate; those above 0.8 fail.

    Those above 0.5 go on until they are pruned, or four looks long. All log 3 steps before somebody looks.
    """

    def __init__(self, opened: OpenSweep):
        self._left: list[RunDir] = []
        self.asked: list[str] = []
        self.watched = True
        self._looks = 0

    def __enter__(self) -> Finishing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, run_dirs: Sequence[RunDir]) -> Submission:
        for run_dir in run_dirs:
            if run_dir not in self._left:
                self._left.append(run_dir)
                if not run_dir.metrics_file.exists():
                    with (run_dir.path / "started").open("a") as file:
                        file.write("once\n")
                    loss = self.loss(run_dir)
                    steps = (1, 2, 3) if loss <= 0.8 else ()
                    lines = [{"step": step, "valid_loss": loss + 1 / step} for step in steps]
                    run_dir.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Submission([], [])

    @staticmethod
    def loss(run_dir: RunDir) -> float:
        return float(str(run_dir.info()["varied"][0]).partition("=")[2])

    def ended(self, _: bool) -> list[tuple[RunDir, RunState]]:
        self._left.sort(key=lambda run_dir: (run_dir.id not in self.asked, self.loss(run_dir)))
        run_dir = self._left[0]
        loss = self.loss(run_dir)
        self._looks += 1
        if 0.5 < loss <= 0.8 and run_dir.id not in self.asked and self._looks % 4:
            return []
        self._left.remove(run_dir)
        pruned = run_dir.id in self.asked
        word = RunStatus.PRUNED if pruned else RunStatus.FAILED if loss > 0.8 else RunStatus.FINISHED
        return [(run_dir, RunState(word, str(word), False, [], None, Progress(3)))]


@pytest.fixture
def base(project: Path) -> Config:
    with composing(PRIMARY) as composer:
        config = composer.compose(["cluster=local", "job=command", "job.command=true", "job.snapshot=none"])
    config = with_absolute_paths(config, project)
    return dataclasses.replace(config, search=SearchConfig(pruner=Pruner.MEDIAN, startup_trials=2))


@pytest.fixture
def opened(base: Config) -> OpenSweep:
    return open_sweep(SweepPlan(base, search="the same"), [], None, parallelism=3)


@pytest.fixture
def begin(base: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[BEGIN]:
    """Give a function that makes a search in a sweep: of `Finishing` runs, unless the test patches `ProcessRuns` itself."""
    runs: list[Finishing] = []

    def prune(run_dir: RunDir, client: object) -> bool:
        runs[-1].asked.append(run_dir.id)
        return True

    def process_runs(opened: OpenSweep, *, show: bool) -> Finishing:
        runs.append(Finishing(opened))
        return runs[-1]

    def configured(composer: object, overrides: Sequence[str]) -> Config:
        lr = float(values_of(overrides)["optim.lr"])
        return dataclasses.replace(base, optim=dataclasses.replace(base.optim, lr=lr))

    monkeypatch.setattr(optuna_search, "ProcessRuns", process_runs)
    monkeypatch.setattr(optuna_search, "ask_to_end", prune)
    monkeypatch.setattr(optuna_search, "checked", configured)
    with composing(PRIMARY) as composer:

        def search(opened: OpenSweep, line: Sequence[str] = LINE) -> OptunaSearch:
            composed = composer.with_hydra(["hydra/sweeper=optuna", *line])
            return OptunaSearch(composer, opened, base, composed, composer.of_the_program(line), ["optim.lr"])

        yield search


def check_all_told_once(opened: OpenSweep, search: OptunaSearch) -> None:
    assert not any(trial.state == TrialState.RUNNING for trial in search.trials)
    log = TrialLog(opened.sweep.trials_file)
    for event in (LogEvent.ASKED, LogEvent.TOLD):
        assert sorted(line["trial"] for line in log.lines if line["event"] == event) == list(range(TRIALS))


def test_a_search_that_is_killed_between_any_two_lines_goes_on_exactly_once(
    base: Config, begin: BEGIN, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = TrialLog.add
    states = set[TrialState]()
    for kill_at in (None, *range(0, 60, 6), *range(1, 60, 10)):
        count = [0]

        def add(log: TrialLog, *words: Any, kill_at: int | None = kill_at, count: list[int] = count, **f: Any) -> Any:
            count[0] += 1
            if count[0] - 1 == kill_at and kill_at % 2:
                raise KilledError
            trial = written(log, *words, **f)
            if count[0] - 1 == kill_at:
                raise KilledError
            return trial

        monkeypatch.setattr(TrialLog, "add", add)
        opened = open_sweep(SweepPlan(base, search=f"killed at {kill_at}"), [], None, parallelism=3)
        for _ in range(2):
            search = begin(opened)
            with contextlib.suppress(KilledError):
                search.run()
        started = [path.read_text() for path in opened.sweep.path.glob("*/started")]
        assert started == ["once\n"] * TRIALS and len(opened.sweep.points()) == TRIALS
        check_all_told_once(opened, search)
        states.update(trial.state for trial in search.trials)
    assert states == {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}


def test_a_trial_that_was_started_is_not_checked_again(
    opened: OpenSweep, begin: BEGIN, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data may have moved meanwhile, or a newer version may refuse its config: its job runs all the same."""

    def killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patched, contextlib.suppress(KilledError):
        patched.setattr(Finishing, "start", killed)
        begin(opened).run()
    assert [trial.run_id for trial in TrialLog(opened.sweep.trials_file).trials] == list(opened.sweep.run_dirs())

    def refused(*_: object) -> Config:
        raise ConfigError("the data are gone")

    monkeypatch.setattr(optuna_search, "checked", refused)
    search = begin(opened)
    with pytest.raises(RunFailedError, match="the data are gone"):  # of those that are asked for now
        search.run()
    assert not any("gone" in trial.why for trial in search.trials[:3])
    assert TrialState.COMPLETE in {trial.state for trial in search.trials[:3]}
    assert [path.read_text() for path in opened.sweep.path.glob("*/started")] == ["once\n"] * 3


def test_a_run_whose_directory_was_removed_is_a_failed_trial(
    opened: OpenSweep, begin: BEGIN, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_search, "ProcessRuns", ProcessRuns)

    def removed(runs: LocalRuns, run_dir: RunDir) -> None:  # its process then ends somehow
        if run_dir.id.endswith("-0001"):
            shutil.rmtree(run_dir.path)
        else:
            run_dir.metrics_file.write_text('{"step": 1, "valid_loss": 1}\n')
            write_attempt(run_dir, Attempt(run_dir.new_attempt(), started=1.0, ended=2.0, verdict=Verdict.DONE))
        runs._over.append(run_dir)

    monkeypatch.setattr(LocalRuns, "start", removed)
    search = begin(opened)
    search.run()
    states = [trial.state for trial in search.trials]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, *[TrialState.COMPLETE] * 6]
    assert search.trials[1].why.endswith("its run directory is gone")
    # Before another process goes on with the search:
    lines = opened.sweep.trials_file.read_text().splitlines(keepends=True)
    opened.sweep.trials_file.write_text("".join(line for line in lines if '"told"' not in line))
    again = begin(opened)
    again.run()
    assert [trial.state for trial in again.trials] == states


def test_a_run_whose_files_cannot_be_read_ends_the_search_and_fails_no_trial(
    opened: OpenSweep, begin: BEGIN, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(runs: Finishing, _: bool) -> list[tuple[RunDir, RunState]]:
        return [(runs._left[0], RunState(RunStatus.UNREADABLE, "attempt.json is torn", False, [], None))]

    with monkeypatch.context() as patched:
        patched.setattr(Finishing, "ended", unreadable)
        with pytest.raises(UnreadableRecordError, match=r"attempt\.json is torn"):
            begin(opened).run()
    assert {trial.state for trial in TrialLog(opened.sweep.trials_file).trials} == {TrialState.RUNNING}
    search = begin(opened)
    search.run()
    check_all_told_once(opened, search)


def test_two_searches_in_one_folder_do_not_both_go_on(opened: OpenSweep, begin: BEGIN) -> None:
    with alone(opened.sweep), pytest.raises(ClusterError, match=r"process \d+ on .* is already running sweep"):
        begin(opened).run()
    first, second = TrialLog(opened.sweep.trials_file), TrialLog(opened.sweep.trials_file)
    first.add(LogEvent.ASKED, 0, overrides=["optim.lr=0.5"])
    with pytest.raises(ClusterError, match="another process has written"):  # it was suspended, and taken for dead
        second.add(LogEvent.ASKED, 0, overrides=["optim.lr=0.6"])
    assert len(opened.sweep.trials_file.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "best"), [(["NaN", "Infinity"], None), (["0.5", "NaN"], 0.5), (["-Infinity", "0.25"], 0.25)]
)
def test_a_result_is_a_finite_number(values: list[str], best: float | None, opened: OpenSweep, base: Config) -> None:
    (run_dir,) = opened.add([Wanted({"optim.lr": "1"}, base)])
    lines = [f'{{"step": {step}, "valid_loss": {value}}}\n' for step, value in enumerate(values)]
    run_dir.metrics_file.write_text("".join(lines))
    now = RunState(RunStatus.FINISHED, "finished", False, [], None)
    if best is not None:
        assert result_of(run_dir, now)[1] == best
    else:
        with pytest.raises(RunFailedError, match="valid_loss was never finite"):
            result_of(run_dir, now)
