"""A search with Optuna: what it chooses, what it does when it is killed at any moment, and what it refuses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from optuna.storages.journal import JournalFileBackend

from slurmtrain.choices import Pruner
from slurmtrain.cli import main
from slurmtrain.config.compose import Composer
from slurmtrain.config.folders import search_folders
from slurmtrain.config.schema import Config, SearchConfig
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.submit_once import SubmitLimitError
from slurmtrain.report.progress import Progress
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.report.status.waiting import RunFailedError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.sweep.jobs import Submission
from slurmtrain.sweep.plan import SweepPlan, choices_of
from slurmtrain.sweep.search import OpenSweep, Search, open_sweep, result_of, to_ask, to_report
from slurmtrain.sweep.study import Study, Trial, TrialState
from tests.support.commands import refusal

FIXED = ["cluster=local", "job=command", "job.command=true", "job.snapshot=none"]
HERE = ["-m", "+cluster=local", "job=command", "job.command='bash point.sh'", "job.snapshot=none"]


# From outside, on this machine.


def test_the_same_search_goes_on_and_another_one_is_apart(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a seed of its own; and stdout belongs to its JSON."""
    result = """'{"step": 1, "valid_loss": 1}'"""
    (project / "point.sh").write_text(
        f"echo I am loud; cd $SLURMTRAIN_RUN_DIR; echo once >>started; echo {result} >metrics.jsonl"
    )

    def searched(trials: int, *words: str, lr: str = "interval(0.1,1)") -> dict[str, Any]:
        how = ["hydra/sweeper=optuna", f"hydra.sweeper.n_trials={trials}", f"optim.lr={lr}"]
        assert main([*HERE, *how, *words, "submit", "--json"]) == 0
        found: dict[str, Any] = json.loads(capfd.readouterr().out)
        return found

    first, longer = searched(2), searched(3)  # which goes on for longer
    assert (first["points"], longer["points"], longer["sweep"]) == (2, 3, first["sweep"])
    assert longer["trials"][:2] == first["trials"] and {each["state"] for each in longer["trials"]} == {"complete"}
    for words, lr in ([], "interval(0.1,2)"), (["train.seed=5"], "interval(0.1,1)"):
        other = searched(1, *words, lr=lr)
        assert other["points"] == 1 and other["sweep"] != first["sweep"]
    assert [path.read_text() for path in project.glob("runs/*/*/started")] == ["once\n"] * 5
    assert main([*HERE, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "optim.lr=interval(0.1,1)", "submit"]) == 0
    shown = capfd.readouterr().out
    assert "3 complete\nbest is 1, of trial 0: optim.lr=" in shown  # nothing is left to do


def test_a_search_chooses_the_arguments_of_a_program(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "point.sh").write_text("""echo '{"step": 1, "valid_loss": '$1'}' >$SLURMTRAIN_RUN_DIR/metrics.jsonl""")
    line = ["-m", "+cluster=local", "job.snapshot=none", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1"]
    assert main([*line, "+lr=interval(0.1,1)", "submit", "--", "bash", "point.sh", "${lr}"]) == 0
    assert "of trial 0: lr=0." in capfd.readouterr().out


def test_a_search_ends_after_failures_in_a_row_and_the_same_command_goes_on_with_other_trials(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "point.sh").write_text(
        """[ -e mended ] || exit 3; echo '{"step": 1, "valid_loss": 0.5}' >$SLURMTRAIN_RUN_DIR/metrics.jsonl"""
    )
    line = [*HERE, "requeue.max_attempts_without_progress=1", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3"]
    line += ["optim.lr=interval(0.1,1)", "search.max_failures_in_a_row=2", "submit"]
    assert main(line) == 1
    assert "2 trials in a row have failed (search.max_failures_in_a_row)" in capfd.readouterr().err
    (project / "mended").touch()
    capfd.readouterr()
    assert main([*line, "--json"]) == 0
    trials = json.loads(capfd.readouterr().out)["trials"]
    assert [trial["state"] for trial in trials] == ["failed", "failed", "complete"]


def test_a_search_for_a_metric_that_is_not_logged_says_which_are(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "point.sh").write_text("""echo '{"step": 1, "acc": 1}' >$SLURMTRAIN_RUN_DIR/metrics.jsonl""")
    line = [*HERE, "hydra/sweeper=optuna", "optim.lr=interval(0.1,1)", "search.max_failures_in_a_row=1", "submit"]
    assert main([*line, "checkpoint.best_metric=accuracy"]) == 1
    said = capfd.readouterr().err
    assert "has finished and logged no metric 'accuracy', only: acc\n" in said
    assert "hint: checkpoint.best_metric=NAME" in said and "other trials" not in said


# Decisions.


@pytest.mark.parametrize(
    ("left", "running", "pack", "count"),
    [
        (10, 0, 1, 3),  # all slots at the beginning
        (7, 2, 1, 1),  # one for each that has ended
        (1, 2, 1, 1),  # the last one
        (6, 2, 2, 0),  # one place in a job of two is not enough
        (6, 1, 2, 2),
        (1, 2, 2, 1),  # the last one does not wait for another
    ],
)
def test_a_trial_is_asked_for_as_soon_as_one_has_ended(left: int, running: int, pack: int, count: int) -> None:
    assert to_ask(left=left, running=running, slots=3, pack=pack) == count


def test_a_pruner_is_told_each_step_once_and_a_long_log_thinned() -> None:
    assert to_report([(1, 0.5), (2, 0.4), (2, 0.3), (1, 0.2), (4, 0.1)], -1) == [(1, 0.5), (2, 0.4), (4, 0.1)]
    assert to_report([(1, 0.5), (2, 0.4)], 2) == []
    every = to_report([(step, 0.0) for step in range(1, 100_001)], -1)
    assert len(every) < 1000 and every[:100] == [(step, 0.0) for step in range(1, 101)]
    in_parts, last = list[tuple[int, float]](), -1  # however often a log is looked at
    for begin in range(1, 2001, 7):
        in_parts += to_report([(step, 0.0) for step in range(begin, begin + 7)], last)
        last = in_parts[-1][0]
    assert in_parts == every[: len(in_parts)]


# What a study chooses.


@pytest.fixture
def composer() -> Composer:
    return Composer(search_folders())


@pytest.fixture
def base(composer: Composer, project: Path) -> Config:
    return with_absolute_paths(composer.compose(FIXED), project)


Studies = Callable[..., Study]


@pytest.fixture
def studies(composer: Composer, base: Config, tmp_path: Path) -> Studies:
    """Open the study of a search, each time as another process does."""

    def opened(*words: str, name: str = "s", **search: Any) -> Study:
        line = [*FIXED, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=9", *words]
        (tmp_path / name).mkdir(exist_ok=True)
        choices = choices_of(composer, line)
        study = Study(choices.sweeper, choices.space, replace(base, search=SearchConfig(**search)))
        study.open(Sweep(tmp_path / name))
        return study

    return opened


CHOICES: dict[str, Callable[[str], bool]] = {
    "optim.lr=tag(log,interval(1e-5,1e-2))": lambda value: 1e-5 <= float(value) <= 1e-2,
    "optim.lr=interval(0.5,2)": lambda value: 0.5 <= float(value) <= 2,
    "train.seed=int(interval(1,4))": lambda value: value in ("1", "2", "3", "4"),
    "train.seed=range(2,9,3)": lambda value: value in ("2", "5", "8"),  # as of a grid, without its end
    "optim.lr=range(0,1,0.25)": lambda value: value in ("0.0", "0.25", "0.5", "0.75"),
    "cluster.account=choice(1e5,ab)": lambda value: value in ("1e5", "ab"),
    "model=glob(t*)": lambda value: value.startswith("t"),
}


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "cmaes", "nsgaii"])
def test_every_sampler_stays_within_the_search_space(studies: Studies, sampler: str) -> None:
    words = [word for word in CHOICES if sampler != "grid" or "interval" not in word]  # a grid needs choices
    for place, word in enumerate(words if sampler in ("tpe", "grid") else words[:2]):
        study = studies(f"hydra/sweeper/sampler={sampler}", word, name=f"s{place}")
        for number in range(min(3, study.n_trials)):
            (value,) = study.ask().chosen.values()
            study.tell(number, TrialState.COMPLETE, 1.0)
            assert CHOICES[word](value), (word, value)


def search_until(study: Study, trials: int) -> list[Trial]:
    """Trials of three values each, the loss being the learning rate plus 1 / step; one at a time, the third one fails."""
    while len(study.trials) < trials:
        trial = study.ask()
        end, value = TrialState.COMPLETE, float(trial.chosen["optim.lr"])
        for step in (1, 4, 16):
            if study.report(trial.number, step, value + 1 / step):
                end = TrialState.PRUNED
                break
        study.tell(trial.number, TrialState.FAIL if trial.number == 2 else end, value)
    return study.trials


@pytest.mark.parametrize(
    ("pruner", "sampler"),
    [(Pruner.NONE, "nsgaii"), (Pruner.MEDIAN, "tpe"), (Pruner.MEDIAN, "cmaes"), (Pruner.ASHA, "random")],
)
def test_a_study_that_is_opened_again_for_each_trial_chooses_and_prunes_as_if_it_had_not_been(
    studies: Studies, pruner: Pruner, sampler: str
) -> None:
    words = ["optim.lr=interval(0.001,0.9)", "optim.weight_decay=interval(0.0,0.1)", f"hydra/sweeper/sampler={sampler}"]
    search = {"pruner": pruner, "startup_trials": 2, "prune_after_steps": 1 if pruner == Pruner.ASHA else 0}
    whole = search_until(studies(*words, name="whole", **search), 12)
    assert (TrialState.PRUNED in {trial.state for trial in whole}) == (pruner != Pruner.NONE)
    for trials in range(3, 13, 3):
        found = search_until(studies(*words, name="parts", **search), trials)
    assert found == whole
    # Its own words say nothing of a seed; another search has another.
    other = search_until(studies(*words, "optim.lr=interval(0.002,0.9)", name="other", **search), 1)
    assert other[0].chosen != whole[0].chosen


def test_a_grid_is_searched_once_in_whatever_parts(studies: Studies) -> None:
    words = ["optim.lr=0.1,0.2,0.3", "train.seed=range(2)", "hydra/sweeper/sampler=grid"]
    assert studies(*words).n_trials == 6  # and not 9
    found = [search_until(studies(*words), number)[-1].chosen for number in range(1, 7)]
    every = [(lr, seed) for lr in ("0.1", "0.2", "0.3") for seed in ("0", "1")]
    assert sorted((each["optim.lr"], each["train.seed"]) for each in found) == every


# Killed, and what is no longer what it was.

TRIALS = 8
LINE = ["hydra/sweeper=optuna", f"hydra.sweeper.n_trials={TRIALS}", "hydra.sweeper.n_jobs=3"]
LINE += ["optim.lr=interval(0.01,1)", "hydra.sweeper.sampler.seed=10", "hydra.sweeper.sampler.n_startup_trials=8"]


class KilledError(BaseException):
    """The shell is killed."""


def ended(status: RunStatus) -> RunState:
    return RunState(status, str(status), [], None, Progress(3))


class Finishing:
    """Runs of a search that finish, in the order of their loss, which is the learning rate; those above 0.8 fail.

    Those above 0.5 go on until they are pruned, or four looks long. All log 3 steps before somebody looks.

    Attributes:
        fault: what else happens: the queue has room for two and is "full".
    """

    here = None

    def __init__(self, fault: str) -> None:
        self.left: list[RunDir] = []
        self.asked: list[str] = []
        self.in_queue = True
        self.fault, self._looks = fault, 0

    def start(self, run_dirs: Iterable[RunDir]) -> Submission:
        for run_dir in run_dirs:
            if run_dir not in self.left:
                if self.fault == "full" and len(self.left) == 2:
                    return Submission([], [], 1, SubmitLimitError("above a limit"))
                self.left.append(run_dir)
                if run_dir.path.exists() and not run_dir.metrics_file.exists():
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

    def ended(self, *, soon: bool) -> list[tuple[RunDir, RunState]]:
        self.left.sort(key=lambda run_dir: (run_dir.id not in self.asked, self.loss(run_dir)))
        run_dir = self.left[0]
        loss = self.loss(run_dir)
        self._looks += 1
        if 0.5 < loss <= 0.8 and run_dir.id not in self.asked and self._looks % 4:
            return []
        self.left.remove(run_dir)
        alone = RunStatus.FAILED if loss > 0.8 else RunStatus.FINISHED
        return [(run_dir, ended(RunStatus.PRUNED if run_dir.id in self.asked else alone))]


class Searches:
    """Searches of `Finishing` runs; each call of `go` is another process."""

    def __init__(self, composer: Composer, base: Config, monkeypatch: pytest.MonkeyPatch):
        self._composer, self._patch, self._runs = composer, monkeypatch, Finishing("")
        self._base = replace(base, search=SearchConfig(pruner=Pruner.MEDIAN, startup_trials=2))
        monkeypatch.setattr("slurmtrain.sweep.search.Runs", lambda *_, **__: self._runs)
        monkeypatch.setattr("slurmtrain.sweep.search.ask_to_end", lambda run, _: self._runs.asked.append(run.id))

    def _study(self) -> Study:
        choices = choices_of(self._composer, LINE)
        return Study(choices.sweeper, choices.space, self._base)

    def open(self, name: str = "the same") -> OpenSweep:
        return open_sweep(SweepPlan(self._base, search=name), [], None, parallelism=3)

    def go(self, opened: OpenSweep, fault: str = "") -> None:
        self._runs = Finishing(fault)
        with contextlib.suppress(KilledError):
            Search(self._composer, opened, self._study(), self._base, FIXED, show=True).run()

    def trials(self, opened: OpenSweep) -> list[Trial]:
        study = self._study()
        study.open(opened.sweep)
        return study.trials


@pytest.fixture
def searches(composer: Composer, base: Config, monkeypatch: pytest.MonkeyPatch) -> Searches:
    return Searches(composer, base, monkeypatch)


def started(opened: OpenSweep) -> list[str]:
    return [path.read_text() for path in opened.sweep.path.glob("*/started")]


def test_a_search_that_is_killed_between_any_two_records_goes_on_exactly_once(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = JournalFileBackend.append_logs
    states, found = set[TrialState](), []
    for kill_at in (None, *range(1, 130, 19)):
        count = [0]

        def append(backend: Any, logs: Any, kill_at: int | None = kill_at, count: list[int] = count) -> None:
            count[0] += 1
            if count[0] - 1 == kill_at and kill_at % 2:
                raise KilledError
            written(backend, logs)
            if count[0] - 1 == kill_at:
                raise KilledError

        monkeypatch.setattr(JournalFileBackend, "append_logs", append)
        opened = searches.open(f"killed at {kill_at}")
        for _ in range(2):
            searches.go(opened)
        assert started(opened) == ["once\n"] * TRIALS and len(opened.sweep.points()) == TRIALS
        trials = searches.trials(opened)
        assert len(trials) == TRIALS and TrialState.RUNNING not in {trial.state for trial in trials}
        states.update(trial.state for trial in trials)
        found.append([trial.chosen for trial in trials[:3]])
    assert states == {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}
    assert all(each == found[0] for each in found)


def test_a_search_goes_on_below_a_limit_on_jobs(searches: Searches) -> None:
    opened = searches.open()
    searches.go(opened, "full")
    states = [trial.state for trial in searches.trials(opened)]
    assert len(states) == TRIALS and TrialState.RUNNING not in states and started(opened) == ["once\n"] * TRIALS


@pytest.mark.parametrize(
    ("values", "best"), [(["NaN", "Infinity"], None), (["0.5", "NaN"], 0.5), (["-Infinity", "0.25"], 0.25)]
)
def test_a_result_is_a_finite_number(values: list[str], best: float | None, searches: Searches, base: Config) -> None:
    run_dir = searches.open().add({"optim.lr": "1"}, base)
    lines = [f'{{"step": {step}, "valid_loss": {value}}}\n' for step, value in enumerate(values)]
    run_dir.metrics_file.write_text("".join(lines))
    finite = contextlib.nullcontext() if best else pytest.raises(RunFailedError, match="valid_loss was never finite")
    with finite:
        assert result_of(run_dir, ended(RunStatus.FINISHED))[1] == best


def test_without_optuna_a_search_says_what_to_install(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    said = refusal("-m", "+cluster=local", "hydra/sweeper=optuna", "optim.lr=interval(1,2)", "submit")
    assert "needs Optuna" in said and "slurmtrain[search]" in said
