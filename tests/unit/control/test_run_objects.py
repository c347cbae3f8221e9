"""`slurmtrain.submit` and `Run`: what a notebook gets, without a cluster."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

import slurmtrain
from slurmtrain.cli.json_output import run_object
from slurmtrain.config.compose import compose, register_schema
from slurmtrain.config.frozen import config_hash, load_frozen
from slurmtrain.control.runs import Status
from slurmtrain.errors import ConfigError, SlurmtrainError, UsageError
from slurmtrain.observe.metrics import MetricsLog
from slurmtrain.report.status import state
from slurmtrain.report.status.waiting import RunFailedError, RunStoppedError
from slurmtrain.runs.reasons import Reason
from slurmtrain.runs.run_dir import RunDir
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import add_attempt, submitted_run

SMALL = ["+cluster=a100x4", "model=small", "optim.lr=2e-4"]


def ended_run(project: Path, **fields: Any) -> slurmtrain.Run:
    """A local run whose one attempt has ended so."""
    run_dir = submitted_run(project, "cluster=local")
    add_attempt(run_dir, ended=1.0, **fields)
    return slurmtrain.open_run(run_dir.id)


def test_submit_returns_a_run_says_nothing_and_leaves_hydra_as_it_was(
    project: Path, slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    names = set(ConfigStore.instance().repo)
    runs = [slurmtrain.submit(SMALL) for _ in range(2)]
    assert runs[0] != runs[1]
    assert [run.job_ids for run in runs] == [["101"], ["102"]]
    assert runs[0].path.parent == project / "runs" / "train"
    assert RunDir(runs[0].path).info()["overrides"] == ["cluster=a100x4", *SMALL[1:]]
    assert not GlobalHydra.instance().is_initialized()
    assert set(ConfigStore.instance().repo) == names
    assert capfd.readouterr().out == ""


def test_the_same_run_comes_of_overrides_of_a_dictconfig_and_of_a_config(
    project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["cluster=a100x4", *SMALL[1:]]
    monkeypatch.setattr(ConfigStore.instance(), "repo", copy.copy(ConfigStore.instance().repo))
    register_schema()
    with initialize_config_dir(str(Path(slurmtrain.__file__).parents[1] / "conf"), version_base="1.3"):
        composed = hydra_compose("config", typed)
        by_hydra = slurmtrain.submit(composed)
        assert GlobalHydra.instance().is_initialized(), "the program's own Hydra is as it was"
    runs = [by_hydra, slurmtrain.submit(compose(typed)), slurmtrain.submit(SMALL)]
    frozen = [load_frozen(run.path / "config.yaml") for run in runs]
    assert frozen[0] == frozen[1] == frozen[2]
    assert frozen[0].optim.lr == 2e-4 and len({config_hash(each) for each in frozen}) == 1


def test_a_program_of_the_users_own_is_given_by_its_words(project: Path, slurm: FakeSlurm) -> None:
    words = ["python", "-c", "print('a, b', {1: ${x}})"]
    run = slurmtrain.submit(["+cluster=a100x4"], command=words)
    assert load_frozen(run.path / "config.yaml").job.command == "python -c 'print('\"'\"'a, b'\"'\"', {1: ${x}})'"


def test_relative_paths_and_runs_are_those_of_the_project(
    project: Path, slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "my_conf" / "cluster").mkdir(parents=True)
    (project / "my_conf" / "cluster" / "mine.yaml").write_text("nodes: 2\n")
    monkeypatch.chdir(tmp_path)
    run = slurmtrain.submit(["cluster=mine", "model=small"], project="project", config_dir="my_conf")
    assert run.path.is_relative_to(project / "runs") and not (tmp_path / "runs").exists()
    assert load_frozen(run.path / "config.yaml").cluster.nodes == 2
    assert slurmtrain.open_run("last", project="project") == run == slurmtrain.open_run(run.path)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ("+cluster=local", UsageError, "expected a list of overrides"),
        ([1], UsageError, "1 is no override"),
        (["optim.learning=1"], UsageError, "learning"),
        (["train.steps=-1"], ConfigError, "train.steps"),
    ],
)
def test_what_cannot_be_submitted_is_one_typed_error_and_leaves_nothing(
    project: Path, given: Any, kind: type[SlurmtrainError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        slurmtrain.submit(given)
    assert not (project / "runs").exists()


def test_wait_raises_the_reason_of_the_last_attempt(project: Path) -> None:
    failed = ended_run(project, verdict="end", reason="crash", sentence="crashed: rank 3: out of memory")
    with pytest.raises(RunFailedError, match="crashed: rank 3: out of memory") as raised:
        failed.wait()
    assert not isinstance(raised.value, RunStoppedError)
    stopped = ended_run(project, verdict="end", reason=Reason.TIME_LIMIT, sentence="the time limit is near")
    with pytest.raises(RunStoppedError, match="the time limit is near"):
        stopped.wait()
    finished = ended_run(project, verdict="done", reason="finished", sentence="finished", last_step=7)
    assert finished.wait().state == "finished"


def test_the_status_has_the_names_and_values_of_status_json(project: Path) -> None:
    run = ended_run(project, verdict="done", reason="finished", sentence="finished", last_step=7)
    now = state.state(RunDir(run.path))
    as_json = json.loads(json.dumps(run_object(RunDir(run.path), now)))
    for name in Status.__dataclass_fields__:
        if name != "attempts":
            assert getattr(run.status(), name) == as_json[name], name
    assert len(run.status().attempts) == len(as_json["attempts"]) == 1


def test_metrics_have_each_step_once_whatever_was_done_again(project: Path) -> None:
    run = ended_run(project, verdict="done", reason="finished")
    log = MetricsLog(RunDir(run.path).metrics_file, -1)
    for step, values in [(1, {"loss": 3.0}), (2, {"loss": 2.0}), (2, {"valid_loss": 2.5}), (3, {"loss": 1.0})]:
        log.write(step, **values)
    for step, values in [(2, {"loss": 2.1}), (2, {"valid_loss": 2.6})]:  # a second attempt, from step 1 on
        log.write(step, **values)
    log.close()
    (run.path / "evaluations.jsonl").write_text('{"step": 1, "other_loss": 9.0}\n')
    left = [{"step": 1, "other_loss": 9.0}, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.1}]
    assert run.metrics() == [*left, {"step": 2, "valid_loss": 2.6}]


def test_logs_are_those_of_the_latest_attempt_whole_or_their_last_lines(project: Path) -> None:
    run = ended_run(project, verdict="end", reason="crash", sentence="crashed")
    attempt = RunDir(run.path).attempt(1)
    attempt.rank_log(0).write_text("".join(f"line {number} {'é' * (number % 300)}\n" for number in range(2000)))
    assert run.logs().count("\n") == 2000
    assert run.logs(tail=2).splitlines() == [f"line {n} {'é' * (n % 300)}" for n in (1998, 1999)]
    assert run.logs(tail=5000) == run.logs() and run.logs(tail=0) == ""
    with pytest.raises(UsageError, match="no log of rank 1"):
        run.logs(rank=1)
    with pytest.raises(UsageError, match="no attempt 2"):
        run.logs(attempt=2)
