"""Evaluations apart from the training: by which config, submitted once, and what becomes of their checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from slurmtrain.checkpoint.format.directory import COMPLETE, checkpoint_name, committed, remove
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.evaluation import evaluation_config
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.overrides import normalise
from slurmtrain.config.rules import validate
from slurmtrain.launch.evaluations import submit_due
from slurmtrain.report.collect import Point, metrics_of, table_of
from slurmtrain.report.compare import compare
from slurmtrain.report.prune import plan
from slurmtrain.report.status.state import state
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.end_of_attempt import finish_attempt
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import add_attempt, printed, submitted_run

JOB = ["cluster=a100x4", "eval=job"]


def composed(*overrides: str) -> list[str]:
    return [normalise(override) for override in overrides]


# By which config.


@pytest.mark.parametrize(
    ("overrides", "ranks", "layout"),
    [
        ([], (1, 1, 1), "1 rank = 1 data-parallel group"),
        (["parallel.tp=4", "parallel.pp=2", "model=llama3_8b"], (2, 4, 4), "8 ranks = 1 data-parallel group x TP 4 x PP 2"),
        (["parallel.tp=2", "eval.cluster.tasks_per_node=4"], (1, 4, 4), "4 ranks = 2 data-parallel groups x TP 2"),
        (["parallel=fsdp", "eval.parallel.tp=2"], (1, 4, 4), "4 ranks = 2 data-parallel groups (2 shards) x TP 2"),
    ],
)  # fmt: skip
def test_a_job_asks_for_no_more_than_the_model_needs(
    overrides: list[str], ranks: tuple[int, int, int], layout: str
) -> None:
    sizes = [
        "cluster.nodes=4",
        "train.global_batch_size=64",
        "train.micro_batch_size=2",
        "eval.cluster.time_limit_min=30",
    ]
    config = compose(composed(*JOB, *overrides, *sizes))
    validate(config)
    found = evaluation_config(config, "checkpoints/checkpoint_0000010")
    dims = validate(found)
    cluster = found.cluster
    assert (cluster.nodes, cluster.tasks_per_node, cluster.gpus_per_node) == ranks
    assert str(dims) == layout
    assert found.train.micro_batch_size == 2
    assert found.checkpoint.restore_from == "checkpoints/checkpoint_0000010"
    assert cluster.time_limit_min == 30


def test_what_was_the_training_s_own_is_not_the_evaluation_s() -> None:
    config = compose(
        composed(
            *JOB,
            *("requeue=chain", "job.singleton=true", "hooks.on_finish=true", "+cluster.sbatch.nodelist=n1"),
            *("+cluster.sbatch.wckey=a", "eval.cluster.sbatch.begin=now+1hour", "checkpoint.mirror=s3://bucket/x"),
        )
    )
    found = evaluation_config(config, "c")
    assert found.cluster.sbatch == {"wckey": "a", "begin": "now+1hour"}
    assert (found.requeue.mode, found.job.singleton, found.hooks.on_finish) == ("resubmit", False, None)
    assert (found.job.name, found.checkpoint.mirror, found.eval.mode) == ("eval-train", None, "inline")


# Submitted once.


def commit(run_dir: RunDir, step: int) -> None:
    (path := run_dir.checkpoints / checkpoint_name(step)).mkdir()
    (path / COMPLETE).write_text("digest\n")


@pytest.fixture
def trained(project: Path, slurm: FakeSlurm) -> RunDir:
    """A run of SLURM with a committed checkpoint of step 10 and one of step 20."""
    run_dir = submitted_run(project, *composed(*JOB), job_ids=["1"])
    for step in (10, 20):
        commit(run_dir, step)
    return run_dir


def hold(run_dir: RunDir, step: int) -> None:
    """As the training does."""
    retention.hold(run_dir.checkpoints, step, run_dir.evaluation(step).path.name)


def held(run_dir: RunDir) -> list[int]:
    return [step for step, _ in retention.held(run_dir.checkpoints)]


def test_what_is_held_is_submitted_once_and_with_the_code_of_the_run(trained: RunDir, slurm: FakeSlurm) -> None:
    for step in (10, 30):  # that of step 30 is still to be saved
        hold(trained, step)
    submit_due(trained)
    submit_due(trained)
    (script,) = slurm.submitted
    evaluation = trained.evaluation(10)
    assert f"run_dir={evaluation.path}\n" in script and "#SBATCH --ntasks-per-node=1\n" in script
    assert evaluation.code.resolve() == trained.code
    assert evaluation.info()["job_ids"] == ["101"]
    assert evaluation.id == f"{trained.id}.step_0000010" != trained.evaluation(20).id
    assert load_frozen(evaluation.config_file).job.kind == "evaluate"
    assert held(trained) == [10, 30]


def test_a_run_that_was_cancelled_has_no_more_submitted(trained: RunDir, slurm: FakeSlurm) -> None:
    hold(trained, 10)
    trained.event(Event.CANCEL_ASKED)
    submit_due(trained)
    assert slurm.submitted == []
    trained.event(Event.RESUME_ASKED)
    submit_due(trained)
    assert len(slurm.submitted) == 1


def test_a_checkpoint_is_let_go_when_its_evaluation_has_failed_or_its_save_has(
    trained: RunDir, slurm: FakeSlurm
) -> None:
    for step in (5, 10):  # nothing was ever committed for step 5, and nothing will be
        hold(trained, step)
    for path in retention.unwanted(trained.checkpoints, committed(trained.checkpoints), Keep(last=2)):
        remove(path, 1)
    submit_due(trained)
    assert held(trained) == [10]
    evaluation = trained.evaluation(10)
    config = load_frozen(evaluation.config_file)
    number = add_attempt(evaluation).number
    assert finish_attempt(evaluation, number, 78, config, None).verdict == "end"
    assert held(trained) == []


# By hand.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel=fsdp"], "parallel=fsdp: only single fields can be set"),
        (["cluster.nodez=1"], "cluster has no field 'nodez'"),
        (["--step", "15"], "no checkpoint of step 15"),
        (["cluster.backend=kubernetes", "--submit"], "`evaluate --submit` needs SLURM, but cluster.backend=kubernetes"),
    ],
)
def test_the_verb_says_what_it_cannot_do(
    trained: RunDir, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(trained.path), *words]) in (2, 78)
    assert said in capsys.readouterr().err
    assert not trained.evaluations.exists()


def test_the_same_command_is_the_same_evaluation(
    trained: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(trained.path), "--submit", "--json", "cluster.tasks_per_node=2"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["step"], first["job_ids"], first["metrics"]) == (20, ["101"], {})
    assert main(words) == 0 and json.loads(capsys.readouterr().out) == first
    assert main([*words[:-1], "cluster.tasks_per_node=4"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] != first["path"]
    assert len(slurm.submitted) == 2
    assert held(trained) == [20, 20]
    assert "step_0000020-" in printed("cancel", str(trained.path))
    assert held(trained) == []


def test_an_evaluation_that_failed_says_the_command_that_repeats_it(trained: RunDir, slurm: FakeSlurm) -> None:
    """`resume` knows no evaluation by its ID."""
    assert main(["evaluate", str(trained.path), "--submit", "eval.metrics.accuracy=true"]) == 0
    (evaluation,) = trained.all_evaluations()
    slurm.change("101", state="FAILED")
    ended = {"ended": time.time(), "verdict": "end", "job_id": "101"}
    add_attempt(evaluation, **ended, reason="config", sentence="rank 0: no validation set")
    repeat = f"`evaluate {trained.id} --step 20 eval.metrics.accuracy=true --submit` repeats it"
    assert state(evaluation).explanation == f"rank 0: no validation set. When that is put right, {repeat}"
    add_attempt(evaluation, **ended, reason="time_limit", sentence="out of time")
    assert state(evaluation).explanation == f"out of time. {repeat}"


# What becomes of the results.


def test_results_stand_beside_the_metrics_and_what_the_run_has_logged_counts(trained: RunDir) -> None:
    trained.metrics_file.write_text('{"step": 10, "loss": 3.0}\n{"step": 20, "loss": 2.0, "valid_loss": 2.5}\n')
    trained.evaluations_file.write_text(
        '{"step": 20, "valid_loss": 9.0, "wiki_loss": 4.0, "evaluation": "b", "time": 1.7e9}\n'
        '{"step": 10, "valid_loss": 2.0, "wiki_loss": 5.0, "evaluation": "a", "time": 1.8e9}\n'
    )
    table = table_of([Point(0, {}, trained, state(trained))])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["best_valid_loss"], row["valid_loss"], row["wiki_loss"], row["loss"]) == (2.0, 2.5, 4.0, 2.0)
    final = compare(trained, trained).final
    assert final["wiki_loss"] == (4.0, 4.0)
    assert "time" not in {*table.columns, *final, *(name for record in metrics_of(trained) for name in record)}


def test_a_run_is_not_removed_while_it_is_evaluated(trained: RunDir, slurm: FakeSlurm) -> None:
    root = trained.path.parents[1]
    add_attempt(trained, job_id="1", started=1.0, ended=2.0, verdict="done", reason="finished")
    hold(trained, 20)
    submit_due(trained)
    assert plan(root, now=time.time()).stays == {trained.id: "an evaluation of it has not ended"}
    slurm.change("101", state="COMPLETED")
    assert [removal.path for removal in plan(root, now=time.time()).removals] == [trained.path]
