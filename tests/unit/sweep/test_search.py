"""What a sweeper that chooses by results is told, and what a Hydra job hands over; without SLURM."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus

from slurmtrain.choices import Backend, Pruner
from slurmtrain.config.compose import Primary, search_folders
from slurmtrain.config.schema import Config, SearchConfig
from slurmtrain.errors import ConfigError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.report.progress import Progress
from slurmtrain.report.status import RunState, RunStatus
from slurmtrain.runs.attempts import Attempt, write_attempt
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.outcome import Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.runtime.jobs.hydra_task import _pickled
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.adaptive import OpenSweep, Wanted, open_sweep
from slurmtrain.sweep.create import find_same
from slurmtrain.sweep.jobs import Submission
from slurmtrain.sweep.local import alone
from slurmtrain.sweep.optuna_search import OptunaSearch
from slurmtrain.sweep.plan import SweepPlan
from slurmtrain.sweep.points import composing, values_of
from slurmtrain.sweep.search import Search, identity_text, seeds
from slurmtrain.sweep.trials import LogEvent, TrialLog, TrialState, read_log
from slurmtrain.system.file_claims import is_claimed
from slurmtrain.system.files import write_json
from slurmtrain.system.redaction import hide
from tests.support.commands import Cli, FakeSlurm
from tests.support.run_info import run_info

PRIMARY = Primary("config", search_folders("config", None, None))


def test_only_what_has_no_seed_is_given_one_and_always_the_same() -> None:
    sweeper = {"seed": 3, "sampler": {"seed": None, "name": "tpe"}, "deep": {"er": {"seed": None}}}
    found = list(seeds(sweeper, "this search"))
    keys, values = zip(*(word.split("=") for word in found), strict=True)
    assert keys == ("hydra.sweeper.sampler.seed", "hydra.sweeper.deep.er.seed")
    assert found == list(seeds(sweeper, "this search")) != list(seeds(sweeper, "another"))
    assert all(0 <= int(value) < 2**31 for value in values)


def test_a_search_is_the_same_by_what_is_fixed_who_chooses_and_from_what() -> None:
    line = ["optim.lr=interval(0.1,1)", "train.steps=5"]
    with composing(PRIMARY) as composer:
        assert composer.fixed(line) == ["train.steps=5"] and composer.choices(line) == {"optim.lr": "interval(0.1,1)"}
        base, sweeper = composer.compose(composer.fixed(line)), composer.sweeper(line)
        other = composer.compose(["train.steps=6"])
    text = identity_text(base, sweeper, composer.choices(line))
    longer = {**dict(reversed(sweeper.items())), "n_trials": 80}
    assert text == identity_text(base, longer, {"optim.lr": "interval(0.1,1)"})
    assert text == identity_text(base, {**sweeper, "max_failure_rate": 0.2}, {"optim.lr": "interval(0.1,1)"})
    assert (
        len({text, identity_text(other, sweeper, {}), identity_text(base, sweeper, {}), identity_text(base, {}, {})})
        == 4
    )


class Finished:
    """An open sweep whose runs finish with the learning rate as their loss; lr=2 logs nothing, lr=3 fails."""

    def __init__(self, path: Path):
        self.path = path

    def run(
        self, wanted: Sequence[Wanted], on_end: Callable[[RunDir, RunState], None]
    ) -> list[tuple[RunDir, RunState]]:
        ended = []
        for each in wanted:
            run_dir = create_run_dir(self.path, "train")
            varied = [f"{key}={value}" for key, value in each.varied.items()]
            write_json(run_dir.info_file, run_info(varied=varied))
            run_dir.metrics_file.write_text(
                f'{{"step": 1, "valid_loss": {each.config.optim.lr}}}\n' if each.config.optim.lr != 2 else ""
            )
            failed = each.config.optim.lr == 3
            word, sentence = (RunStatus.FAILED, "rank 0: no luck") if failed else (RunStatus.FINISHED, "finished")
            state = RunState(word, sentence, False, [], None)
            on_end(run_dir, state)
            ended.append((run_dir, state))
        return ended


def test_a_point_gives_back_its_best_metric_or_the_words_of_its_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    points = [[f"optim.lr={lr}"] for lr in (1, 0.5, 2, 3)] + [["optim.lr=-1"]]
    with composing(PRIMARY) as composer:
        loader = GlobalHydra.instance().config_loader()
        from hydra.types import RunMode

        jobs = [(point, loader.load_configuration("config", point, RunMode.RUN)) for point in points]
        opened: Any = Finished(tmp_path)
        returned = Search(composer, opened, ["optim.lr"]).launch(jobs)
    assert [each.status for each in returned] == [JobStatus.COMPLETED] * 2 + [JobStatus.FAILED] * 3
    assert [each.return_value for each in returned[:2]] == [1, 0.5]
    assert returned[0].overrides == ["optim.lr=1"] and returned[0].cfg is not None and "hydra" not in returned[0].cfg
    for each, words in zip(returned[2:], ("logged no metric", "no luck", "optim.lr"), strict=True):
        with pytest.raises(Exception, match=words):
            _ = each.return_value
    assert isinstance(returned[4]._return_value, ConfigError) and len(caplog.messages) == 4
    assert "the best so far" in caplog.messages[1] and "no luck" in caplog.messages[3]


def test_a_point_that_cannot_fit_into_the_gpus_is_a_point_that_has_failed(tmp_path: Path) -> None:
    points = [["cluster=a100x4", "model=llama3_70b", "data.seq_len=4096"], ["optim.lr=1"]]
    with composing(PRIMARY) as composer:
        from hydra.types import RunMode

        loader = GlobalHydra.instance().config_loader()
        jobs = [(point, loader.load_configuration("config", point, RunMode.RUN)) for point in points]
        opened: Any = Finished(tmp_path)
        returned = Search(composer, opened, ["model"]).launch(jobs)
    assert [each.status for each in returned] == [JobStatus.FAILED, JobStatus.COMPLETED]
    assert "gpu_memory_gb" in str(returned[0]._return_value)


class StubbornError(Exception):
    """Cannot be read again: its constructor wants more than it was made of."""

    def __init__(self, a: int, b: int):
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    ("status", "value", "words"),
    [
        (JobStatus.FAILED, StubbornError(1, 2), "StubbornError: 1 and 2"),
        (JobStatus.COMPLETED, (number for number in range(0)), "cannot be handed over"),
        (JobStatus.FAILED, ValueError("no luck"), "no luck"),
    ],
)
def test_what_cannot_be_handed_over_says_so(status: JobStatus, value: object, words: str) -> None:
    returned = JobReturn(overrides=[], status=status)
    returned.return_value = value
    with pytest.raises(Exception, match=words):
        _ = pickle.loads(_pickled(returned)).return_value


def test_the_same_search_asks_for_the_same_points(tmp_path: Path) -> None:
    """Without a seed of its own, and on this machine."""
    result = """'{"step": 1, "valid_loss": 1}'"""
    program = f"cd $SLURMTRAIN_RUN_DIR; echo once >>started; echo {result} >metrics.jsonl"
    (tmp_path / "point.sh").write_text(program)
    words = ["-m", "+cluster=local", "job=command", "job.command='bash point.sh'", "job.snapshot=none"]
    words += ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "optim.lr=interval(0.1,1)", "submit"]
    for _ in range(2):
        command = [sys.executable, "-m", "slurmtrain", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "is there already" in done.stderr
    assert [path.read_text() for path in tmp_path.glob("runs/*/*/started")] == ["once\n"] * 3


def test_what_holds_a_secret_is_not_handed_over() -> None:
    hide({"HF_TOKEN": "hf_123456"})
    for status, value, words in (
        (JobStatus.FAILED, ValueError("no hf_123456"), r"ValueError: no \*\*\*HF_TOKEN\*\*\*"),
        (JobStatus.COMPLETED, {"token": "hf_123456"}, "it holds a secret"),
    ):
        returned = JobReturn(overrides=[], status=status)
        returned.return_value = value
        pickled = _pickled(returned)
        assert b"hf_123456" not in pickled
        with pytest.raises(Exception, match=words):
            _ = pickle.loads(pickled).return_value


PROGRAM = """
import os, hydra
{beside}
@hydra.main(version_base=None, config_path=None)
def main(cfg):
    print("with", os.environ["HF_TOKEN"])
    {inside}
main()
"""
LAUNCHED = ["-m", "+x=1,2", "hydra/launcher=slurmtrain", 'hydra.launcher.overrides=["+secrets.HF_TOKEN=env"]']


@pytest.mark.parametrize(
    ("beside", "inside", "words"),
    [
        (
            "TOKEN = os.environ['HF_TOKEN']",
            "return TOKEN",
            "what the task function needs holds the value of the secret",
        ),
        ("", "raise ValueError('boom', os.environ['HF_TOKEN'])", "boom"),
    ],
)
def test_no_secret_of_a_program_lies_on_disk(cli: Cli, project: Path, beside: str, inside: str, words: str) -> None:
    (project / "program.py").write_text(PROGRAM.format(beside=beside, inside=inside))
    done = cli(*LAUNCHED, program=("program.py",), HF_TOKEN="hf_123456")
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert [path for path in project.rglob("*") if path.is_file() and b"hf_123456" in path.read_bytes()] == []


@pytest.fixture
def sweep_plan(project: Path) -> SweepPlan:
    with composing(PRIMARY) as composer:
        config = composer.compose(["cluster=local", "job=command", "job.command=true", "job.snapshot=none"])
    return SweepPlan(with_absolute_paths(config, project), search="the same")


def test_a_search_here_goes_on_with_what_ctrl_c_has_stopped(
    sweep_plan: SweepPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Sequence[str]] = []

    def run_here(sweep: Sweep, run_ids: Sequence[str], *_: object, **__: object) -> bool:
        begun.append(run_ids)
        for run_id in run_ids:
            number = sweep.run_dir(run_id).new_attempt()
            ended = Attempt(number, started=1.0, ended=2.0, reason="cancelled", verdict=Verdict.END, sentence="Ctrl-C")
            done = Attempt(number, started=3.0, ended=4.0, reason="finished", verdict=Verdict.DONE)
            write_attempt(sweep.run_dir(run_id), ended if len(begun) == 1 else done)
        return len(begun) > 1

    monkeypatch.setattr("slurmtrain.sweep.adaptive.run_here", run_here)
    wanted = [Wanted({"optim.lr": "1"}, sweep_plan.first)]
    with pytest.raises(KeyboardInterrupt):
        open_sweep(sweep_plan, [], None).run(wanted, lambda run_dir, now: None)
    ((_, now),) = open_sweep(sweep_plan, [], None, parallelism=3).run(wanted, lambda run_dir, now: None)
    assert now.status == "finished" and len(begun) == 2 and begun[0] == begun[1]
    assert find_same_info(sweep_plan)["parallelism"] == 3
    open_sweep(sweep_plan, [], None).run(wanted, lambda run_dir, now: None)
    assert begun[2:] == [[]]  # what has finished is not begun again


def test_a_point_whose_line_was_cut_short_is_asked_for_anew(sweep_plan: SweepPlan, cli: Cli) -> None:
    opened = open_sweep(sweep_plan, [], None)
    file = opened.sweep.points_file
    with alone(opened.sweep):
        assert is_claimed(opened.sweep.path)  # `sweep status --watch` goes on, though no run is alive
        opened.add([Wanted({"optim.lr": "1"}, sweep_plan.first)])
        whole = file.read_text()
        file.write_text(f'{whole}{{"number": 1, "vari')
        assert [point["point"] for point in json.loads(cli("sweep", "status", "last", "--json").stdout)["points"]] == [
            0
        ]
        other = dataclasses.replace(sweep_plan.first, job=dataclasses.replace(sweep_plan.first.job, command="false"))
        opened.add([Wanted({"optim.lr": "2"}, other)])
    assert file.read_text().startswith(whole) and [point.number for point in opened.sweep.points()] == [0, 1]
    assert not is_claimed(opened.sweep.path)


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


def test_a_search_that_is_killed_between_any_two_lines_goes_on_exactly_once(
    sweep_plan: SweepPlan, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Finishing] = []

    def prune(run_dir: RunDir, client: object) -> bool:
        runs[-1].asked.append(run_dir.id)
        return True

    def here(opened: OpenSweep, *, show: bool) -> Finishing:
        runs.append(Finishing(opened))
        return runs[-1]

    monkeypatch.setattr("slurmtrain.sweep.optuna_search._Here", here)
    monkeypatch.setattr("slurmtrain.sweep.optuna_search.ask_to_end", prune)
    line = ["hydra/sweeper=optuna", "optim.lr=interval(0.01,1)", "hydra.sweeper.n_trials=8", "hydra.sweeper.n_jobs=3"]
    line += ["hydra.sweeper.sampler.seed=1", "hydra.sweeper.sampler.n_startup_trials=3"]
    pruner = SearchConfig(pruner=Pruner.MEDIAN, startup_trials=2)
    base = dataclasses.replace(sweep_plan.first, search=pruner)

    def configured(composer: object, overrides: Sequence[str]) -> Config:
        lr = float(values_of(overrides)["optim.lr"])
        return dataclasses.replace(base, optim=dataclasses.replace(base.optim, lr=lr))

    monkeypatch.setattr("slurmtrain.sweep.optuna_search.checked", configured)
    written = TrialLog.add
    found = {}
    with composing(PRIMARY) as composer:
        composed = composer.with_hydra(line)
        for kill_at in (None, *range(0, 60, 3), *range(1, 60, 7)):
            count = [0]

            def add(
                log: TrialLog, *words: Any, kill_at: int | None = kill_at, count: list[int] = count, **f: Any
            ) -> Any:
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
                search = OptunaSearch(composer, opened, base, composed, ["optim.lr=interval(0.01,1)"], ["optim.lr"])
                with contextlib.suppress(KilledError):
                    search.run()
            found[kill_at] = search.trials
            started = [path.read_text() for path in opened.sweep.path.glob("*/started")]
            assert started == ["once\n"] * 8 and len(opened.sweep.points()) == 8
            assert not any(trial.state == TrialState.RUNNING for trial in search.trials)
            lines = read_log(opened.sweep.trials_file)
            for event in (LogEvent.ASKED, LogEvent.TOLD):
                assert sorted(line["trial"] for line in lines if line["event"] == event) == list(range(8))
    assert {trial.state for trials in found.values() for trial in trials} == {
        TrialState.COMPLETE,
        TrialState.PRUNED,
        TrialState.FAIL,
    }


def find_same_info(sweep_plan: SweepPlan) -> dict[str, Any]:
    sweep = find_same(sweep_plan)
    assert sweep is not None
    return sweep.info()


def test_a_point_that_was_removed_is_submitted_anew(
    sweep_plan: SweepPlan, fake_slurm: FakeSlurm, project: Path
) -> None:
    fake_slurm.command("squeue", "exit 0")
    cluster = dataclasses.replace(sweep_plan.first.cluster, backend=Backend.SLURM)
    on_slurm = SweepPlan(dataclasses.replace(sweep_plan.first, cluster=cluster), search="the same")
    wanted = [Wanted({"optim.lr": "1"}, on_slurm.first)]
    opened = open_sweep(on_slurm, [], SlurmClient(None))
    for removed in (False, True, False):
        if removed:
            shutil.rmtree(opened.sweep.run_dir(opened.sweep.points()[0].run_id).path)
        opened.submit(opened.add(wanted))
        run_dir = opened.sweep.run_dir(opened.sweep.points()[0].run_id)
        assert run_dir.info()["job_ids"] == ["4711"]
    assert opened.sweep.array_numbers() == [0, 1]


@pytest.mark.parametrize("words", [["cluster=a100x4", "--after", "nobody"], ["cluster=a100x4", "requeue=chain"]])
def test_what_a_search_cannot_be_is_said_before_anything_is_made(
    cli: Cli, project: Path, fake_slurm: FakeSlurm, words: list[str]
) -> None:
    done = cli("-m", "hydra/sweeper=optuna", "optim.lr=interval(1,2)", "submit", *words)
    assert done.returncode != 0 and ("there are no runs" in done.stderr or "requeue.mode=chain" in done.stderr), (
        done.stderr
    )
    assert "Traceback" not in done.stderr and not list(project.glob("runs/*.sweep-*"))


def test_a_search_leaves_stdout_to_its_json(cli: Cli, project: Path) -> None:
    (project / "point.sh").write_text(
        'echo "I am loud"; echo \'{"step": 1, "valid_loss": 1}\' >"$SLURMTRAIN_RUN_DIR/metrics.jsonl"'
    )
    fixed = ["+cluster=local", "job=command", "job.command='bash point.sh'", "job.snapshot=none"]
    sweeper = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "hydra.sweeper.n_jobs=1"]
    done = cli("-m", *fixed, *sweeper, "optim.lr=interval(1e-5,1e-2)", "submit", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["points"] == 1 and "I am loud" in done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [("direction=up", "the sweeper gave up: ValueError"), ("n_trials=x", "hydra.sweeper.n_trials: Value 'x'")],
)
def test_what_a_sweeper_refuses_is_one_sentence(cli: Cli, setting: str, words: str) -> None:
    done = cli("-m", "hydra/sweeper=optuna", f"hydra.sweeper.{setting}", "optim.lr=interval(1,2)", "submit")
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_ctrl_c_says_that_the_jobs_go_on(
    sweep_plan: SweepPlan, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(run_dir: RunDir) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("slurmtrain.report.waiting.is_over", interrupt)
    opened = open_sweep(sweep_plan, [], SlurmClient(None))
    with pytest.raises(KeyboardInterrupt):
        opened.run([Wanted({}, sweep_plan.first)], lambda run_dir, now: None)
    name = opened.sweep.id
    assert caplog.messages == [f"the jobs of {name} go on without this shell; sweep cancel {name} ends them"]
