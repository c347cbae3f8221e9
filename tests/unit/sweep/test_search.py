"""What a sweeper that chooses by results is told, and what a Hydra job hands over; without SLURM."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus

from slurmtrain.choices import Backend
from slurmtrain.cli import main
from slurmtrain.config.folders import Primary, search_folders
from slurmtrain.config.schema import Config
from slurmtrain.control.submitting import PointLook
from slurmtrain.errors import ConfigError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.report.status.state import RunState, RunStatus
from slurmtrain.runs.attempts import Attempt, write_attempt
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.reasons import Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.sweep_dir import Sweep
from slurmtrain.runtime.jobs.hydra_task import _pickled
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.adaptive import Wanted, open_sweep
from slurmtrain.sweep.create import find_same
from slurmtrain.sweep.local import alone
from slurmtrain.sweep.plan import SweepPlan
from slurmtrain.sweep.points import composing
from slurmtrain.sweep.search import Search, seeds
from slurmtrain.system.file_claims import is_claimed
from slurmtrain.system.files import write_json
from slurmtrain.system.redaction import hide
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm
from tests.support.recorded_slurm import answers_of, play
from tests.support.run_info import run_info

PRIMARY = Primary("config", search_folders("config", None, None))


def test_only_what_has_no_seed_is_given_one_and_always_the_same() -> None:
    sweeper = {"seed": 3, "sampler": {"seed": None, "name": "tpe"}, "deep": {"er": {"seed": None}}}
    found = list(seeds(sweeper, "this search"))
    keys, values = zip(*(word.split("=") for word in found), strict=True)
    assert keys == ("hydra.sweeper.sampler.seed", "hydra.sweeper.deep.er.seed")
    assert found == list(seeds(sweeper, "this search")) != list(seeds(sweeper, "another"))
    assert all(0 <= int(value) < 2**31 for value in values)


class Finished:
    """An open sweep whose runs finish with the learning rate as their loss; lr=2 logs nothing, lr=3 fails."""

    def __init__(self, path: Path):
        self.path = path

    def check(self, config: Config) -> None:
        pass

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


def test_the_same_search_asks_for_the_same_points_and_another_one_is_apart(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a seed of its own, and on this machine; and stdout belongs to its JSON."""
    result = """'{"step": 1, "valid_loss": 1}'"""
    (project / "point.sh").write_text(
        f"echo I am loud; cd $SLURMTRAIN_RUN_DIR; echo once >>started; echo {result} >metrics.jsonl"
    )

    def searched(*words: str, lr: str = "interval(0.1,1)") -> tuple[dict[str, Any], str]:
        line = ["-m", "+cluster=local", "job=command", "job.command='bash point.sh'", "job.snapshot=none"]
        assert main([*line, "hydra/sweeper=optuna", f"optim.lr={lr}", *words, "submit", "--json"]) == 0
        out, said = capfd.readouterr()
        found: dict[str, Any] = json.loads(out)
        return found, said

    import optuna  # which takes its time

    kept = {"storage": f"sqlite:///{project}/kept.db", "study_name": "mine"}
    storage = [f"hydra.sweeper.{name}={value}" for name, value in kept.items()]
    first, said = searched("hydra.sweeper.n_trials=2", *storage)
    assert first["points"] == 2 and "I am loud" in said
    # The same choices by the same sampler, which may go on for longer.
    longer, said = searched("hydra.sweeper.n_trials=3", *storage)
    assert (longer["points"], longer["sweep"]) == (3, first["sweep"]) and "is there already" in said
    assert [
        trial.value for trial in optuna.load_study(study_name=kept["study_name"], storage=kept["storage"]).trials
    ] == [1.0] * 3  # each told once
    for words, lr in (
        (["hydra.sweeper.n_trials=1"], "interval(0.1,2)"),
        (["hydra.sweeper.n_trials=1", "train.seed=5"], "interval(0.1,1)"),
    ):
        other, _ = searched(*words, lr=lr)
        assert other["points"] == 1 and other["sweep"] != first["sweep"]
    assert [path.read_text() for path in project.glob("runs/*/*/started")] == ["once\n"] * 5


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
    assert ("waiting for jobs 0 to 1 of" in done.stdout) == ("raise" in inside)  # who waits is told for what
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


def find_same_info(sweep_plan: SweepPlan) -> dict[str, Any]:
    sweep = find_same(sweep_plan)
    assert sweep is not None
    return sweep.info()


def test_a_point_that_was_removed_is_submitted_anew(sweep_plan: SweepPlan, slurm: FakeSlurm, project: Path) -> None:
    cluster = dataclasses.replace(sweep_plan.first.cluster, backend=Backend.SLURM)
    on_slurm = SweepPlan(dataclasses.replace(sweep_plan.first, cluster=cluster), search="the same")
    wanted = [Wanted({"optim.lr": "1"}, on_slurm.first)]
    opened = open_sweep(on_slurm, [], SlurmClient(None))
    for job_id, removed in (("101", False), ("102", True), ("102", False)):
        if removed:
            shutil.rmtree(opened.sweep.run_dir(opened.sweep.points()[0].run_id).path)
        opened.submit(opened.add(wanted))
        run_dir = opened.sweep.run_dir(opened.sweep.points()[0].run_id)
        assert run_dir.info()["job_ids"] == [job_id]
    assert opened.sweep.array_numbers() == [0, 1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("cluster=a100x4 --after nobody", 2, "there are no runs"),
        ("cluster=a100x4 requeue=chain", 78, "requeue.mode=chain"),
        ("hydra.sweeper.direction=up", 2, "the sweeper gave up: ValueError"),
        ("hydra.sweeper.n_trials=x", 2, "hydra.sweeper.n_trials: Value 'x'"),
        ("--dry-run", 2, "--dry-run cannot show a search"),
    ],
)
def test_what_a_search_cannot_be_is_said_in_one_sentence(
    project: Path, slurm: FakeSlurm, words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "hydra/sweeper=optuna", "optim.lr=interval(1,2)", "submit", *words.split()]) == code
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown
    assert slurm.submitted == []


def test_each_point_of_a_search_is_compared_with_the_cluster_and_the_base_only_where_it_is_as_they_are(
    project: Path, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    answers = answers_of("alpha_24_11")
    play(slurm, answers)
    words = ["cluster=a100x4", "cluster.partition=gpu", "cluster.cpus_per_task=15", "cluster.mem_per_node_gb=0"]
    with composing(PRIMARY) as composer:
        large, small = (
            with_absolute_paths(composer.compose([*words, f"cluster.nodes={nodes}"]), project) for nodes in (99, 2)
        )
    with pytest.raises(ConfigError, match="the job needs 99"):
        PointLook(large, varies=False)
    look = PointLook(large, varies=True)  # whose points may have fewer nodes
    opened = open_sweep(SweepPlan(large, search="this search"), [], None, look=look)
    opened.check(small)
    with pytest.raises(ConfigError, match="the job needs 99"):
        opened.check(large)
    opened.add([Wanted({}, large)])
    opened.check(large)  # a point already: what has become of the cluster since does not undo its result
    drained = {
        name: text.replace("State=UP", "State=DRAIN") for name, text in answers.items() if "show partition" in name
    }
    play(slurm, {**answers, **drained})
    look = PointLook(small, varies=True)
    with pytest.raises(ConfigError, match="State=DRAIN"):
        look(small)
    play(slurm, answers)
    look(small)  # it is up again
