"""The verdicts of `drill`: what it says of records, of SLURM's facts and of two logs. Pure functions of plain values."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.difference import TensorDifference
from slurmtrain.choices import RequeueMode
from slurmtrain.cli import drill as verb
from slurmtrain.cli.drill import exit_code
from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import freeze
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.control.drill.judge import (
    Comparison,
    Divergence,
    Evidence,
    Result,
    compare_logs,
    describe,
    judge,
    likely_causes,
    with_checkpoint,
)
from slurmtrain.control.drill.run import Drill, ScratchRun, is_due
from slurmtrain.control.drill.ways import TINY, Plan, Way, preemptors, scratch_config, tiny_config, why_not_here
from slurmtrain.runs.attempts import Attempt
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.read_facts import ASSOC_COLUMNS, QOS_COLUMNS, parse_associations, parse_partitions, parse_qos
from tests.support.runs import printed, submitted_run

PLAN = Plan()
LATER = Comparison(steps=(8, 9), checkpoint=16)
TOLD = Attempt(
    1, job_id="7", nodes=["n0"], started=100.0, stepping=103.0, first_step=0, last_step=8, committed_step=8, cause="SIGTERM",
    cause_time=111.0, ended=113.0, exit_code=75, reason="requeued", verdict="restarting", sentence="requeued by SLURM",
)  # fmt: skip
BACK = Attempt(
    2, job_id="7", restart_count=1, started=121.0, stepping=123.0, first_step=8, last_step=16, verdict="done", ended=130.0
)  # fmt: skip
told, back = (functools.partial(dataclasses.replace, each) for each in (TOLD, BACK))
PASSES = Evidence(
    Way.REQUEUE, attempts=[TOLD, BACK], over=True, finished=True, told=True, time_s=30.0, resumed_at=8,
    comparison=LATER,
)  # fmt: skip


def test_a_run_that_comes_back_with_the_same_bits_passes_and_says_how_long_it_took_to_leave() -> None:
    said = "resumed at step 8: the same bits (2 logged steps, every tensor of the checkpoint of step 16)"
    assert judge(PASSES, PLAN) == (Result.PASSED, said, ())
    assert (PASSES.left_after_s, PASSES.saved_step) == (2.0, 8)


LOST = told(committed_step=4, exit_code=137, last_sign=112.0)
APART = compare_logs({8: {"loss": 2.0}, 9: {"loss": 2.31}}, {8: {"loss": 2.0}, 9: {"loss": 2.35}})
EARLY = Comparison((1,), Divergence(1, "loss", 2.0, 2.5), checkpoint=16)
PASSED, FAILED, NOT_TRIED, NOT_JUDGED = Result
UNFINISHED: dict[str, Any] = {"over": False, "finished": False}
# A program, of whose checkpoints its attempts say nothing.
PROGRAM: dict[str, Any] = {"is_program": True, "attempts": [told(committed_step=None), back(first_step=None)]}
DONE = told(cause=None, verdict="done")


@pytest.mark.parametrize(
    ("way", "changes", "result", "words", "hint"),
    [
        ("requeue", {"cannot": "there is no SLURM"}, NOT_TRIED, "tried here, because there is no SLURM", ""),
        ("requeue", {"refused": "disabled"}, FAILED, "SLURM refuses it", "requeue=chain"),
        ("requeue", {"mode": "chain", "refused": "disabled"}, NOT_TRIED, "with requeue.mode=chain", ""),
        # How it left.
        ("requeue", {"attempts": [Attempt(1, ended=1.0, sentence="no torch")]}, FAILED, "come to train: no torch", ""),
        ("early_signal", {"attempts": [DONE]}, FAILED, "the signal did not reach", "scancel --signal"),
        ("preemption", {"attempts": [DONE]}, NOT_JUDGED, "did not preempt it", "--ways"),
        (
            "preemption", {"attempts": [LOST, BACK], "time_s": 11.0}, FAILED,
            "before it had saved, for which SLURM gives 11 s; it loses the steps since step 4", "longer GraceTime",
        ),
        ("early_signal", {"attempts": [told(ended=171.0), BACK]}, FAILED, "left 60 s after the", "_lead_s=90"),
        # How it came back.
        (
            "requeue", {"attempts": [told(verdict="requeue")], "explanation": "stopped: refused"}, FAILED,
            "SLURM did not start it again: stopped: refused", "requeue=chain",
        ),
        ("requeue", {"attempts": [told(verdict="end")], "mode": "off"}, FAILED, "(requeue.mode=off)", "requeue=requeue"),
        ("in_place", {}, FAILED, "not in place", "requeue.in_place=true"),
        ("requeue", {"attempts": [TOLD, back(first_step=4)]}, FAILED, "resumed at step 4, though step 8 was", "log"),
        # What has not ended in time.
        ("requeue", {"attempts": [], "told": False, **UNFINISHED}, NOT_JUDGED, "did not train within 30 min", "--within"),
        ("requeue", {"attempts": [], **UNFINISHED}, NOT_JUDGED, "did not stop within 30 min", "--within"),
        ("requeue", UNFINISHED, NOT_JUDGED, "did not finish within 30 min", "--within"),
        ("requeue", {"comparison": None, "undisturbed": "failed"}, NOT_JUDGED, "run has not finished (failed)", ""),
        # The comparison.
        ("requeue", {"comparison": APART}, FAILED, "step 8: diverges at step 9: loss 2.31 and 2.35", "of the data"),
        ("requeue", {"comparison": APART, "twin": EARLY}, NOT_JUDGED, "two undisturbed runs differ, too", "seed"),
        ("requeue", {"comparison": Comparison(left="no log")}, NOT_JUDGED, "compared: no log", "log the loss"),
        ("requeue", {"comparison": Comparison(steps=(8,))}, NOT_JUDGED, "nothing after that could be compared", "--steps"),
        # A program.
        ("requeue", PROGRAM, PASSED, "resumed at step 8: the same bits", ""),
        ("requeue", {**PROGRAM, "resumed_at": 0}, FAILED, "began anew", "save"),
        ("requeue", {**PROGRAM, "attempts": [DONE], "told": False}, NOT_JUDGED, "finished before it could", "--stop-at"),
    ],
)  # fmt: skip
def test_every_ending_has_its_result_and_says_why_and_what_to_set(
    way: str, changes: dict[str, Any], result: Result, words: str, hint: str
) -> None:
    if "mode" in changes:
        changes = {**changes, "mode": RequeueMode(changes["mode"])}
    found = judge(dataclasses.replace(PASSES, way=Way(way), **changes), PLAN)
    assert found.result is result and words in found.sentence, found
    assert hint in "".join(found.hints[:1])


def test_the_exit_code_tells_a_failure_from_a_site_where_nothing_could_be_tried() -> None:
    assert exit_code([PASSED, NOT_TRIED, NOT_JUDGED]) == 0
    assert exit_code([PASSED, FAILED]) == 1
    assert exit_code([NOT_TRIED, NOT_JUDGED]) == 75


PARTITIONS = (
    "PartitionName=low AllowGroups=ALL Default=YES Nodes=n[0-3] PriorityTier=1 PreemptMode=REQUEUE GraceTime=10 State=UP\n"
    "PartitionName=high Default=NO Nodes=n[0-3] PriorityTier=10 PreemptMode=OFF State=UP\n"
    "PartitionName=urgent Default=NO Nodes=n3 PriorityTier=20 PreemptMode=OFF State=UP\n"
    "PartitionName=down Default=NO Nodes=n[0-3] PriorityTier=30 PreemptMode=OFF State=DOWN\n"
    "PartitionName=elsewhere Default=NO Nodes=m[0-3] PriorityTier=30 PreemptMode=OFF State=UP\n"
)
BY_PARTITION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}


def facts_of(
    configuration: dict[str, str], partitions: str = PARTITIONS, qos: Sequence[str] = (), may_use: str = ""
) -> ClusterFacts:
    """A cluster, by what SLURM's commands print of it.

    Args:
        qos: lines of sacctmgr: name, those that it preempts, and how it is preempted.
        may_use: the QOS that this person may use.
    """
    rows = (dict(zip(("Name", "Preempt", "PreemptMode"), line.split("|"), strict=True)) for line in qos)
    text = "\n".join("|".join(row.get(column, "") for column in QOS_COLUMNS) for row in rows)
    mine = {"Cluster": "c", "Account": "physics", "QOS": may_use}
    associations = "|".join(mine.get(column, "") for column in ASSOC_COLUMNS)
    return ClusterFacts(
        config={"ClusterName": "c", **configuration},
        partitions=parse_partitions(partitions),
        qos=parse_qos(text),
        associations=parse_associations(associations, "c"),
    )


def test_who_may_preempt_a_partition_are_those_above_it_the_lowest_first() -> None:
    found = preemptors(facts_of(BY_PARTITION), partition=None)
    assert found == [("--partition=high",), ("--partition=urgent",), ("--partition=elsewhere",)]


@pytest.mark.parametrize(
    ("configuration", "partitions", "partition", "words"),
    [
        ({"PreemptType": "preempt/none"}, PARTITIONS, "low", "preempts nothing here"),
        (BY_PARTITION, PARTITIONS, "high", "PreemptMode=OFF"),
        (BY_PARTITION, PARTITIONS.replace("PreemptMode=REQUEUE", "PreemptMode=GANG,SUSPEND"), "low", "do not end"),
        (BY_PARTITION, PARTITIONS.splitlines()[0], "low", "no partition may preempt"),
        (BY_PARTITION, PARTITIONS.replace("Default=YES", "Default=NO"), None, "no default partition"),
    ],
)
def test_where_nothing_preempts_the_reason_is_told(
    configuration: dict[str, str], partitions: str, partition: str | None, words: str
) -> None:
    found = preemptors(facts_of(configuration, partitions), partition=partition)
    assert isinstance(found, str) and words in found


def test_a_qos_that_preempts_is_found_whether_or_not_the_person_may_use_it() -> None:
    by_qos, qos = {"PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"}, ["cheap||requeue", "fast|cheap|cluster"]
    qos.append("boss|cheap,fast|cluster")
    facts = facts_of(by_qos, qos=qos, may_use="cheap")
    assert preemptors(facts, partition=None, qos="cheap") == [("--qos=fast",), ("--qos=boss",)]
    assert preemptors(facts, partition=None) == [("--qos=fast",), ("--qos=boss",)]  # cheap is the only one of theirs
    # In another partition than the default one it has to be where our job is, or it cannot have its node.
    assert preemptors(facts, partition="high,low", qos="fast") == [("--partition=high,low", "--qos=boss")]
    for name, words in (("boss", "no QOS preempts QOS boss"), ("gone", "does not show QOS gone")):
        assert words in preemptors(facts, partition=None, qos=name)
    assert "cluster.qos is not set" in preemptors(facts_of(by_qos, qos=qos), partition=None)
    for mode in ("GANG,SUSPEND", "OFF"):
        left_alone = facts_of({**by_qos, "PreemptMode": mode}, qos=["cheap||cluster", "fast|cheap|"], may_use="cheap")
        assert f"of QOS cheap do not end (PreemptMode={mode})" in preemptors(left_alone, partition=None, qos="cheap")


def losses(*values: float, **more: list[Any]) -> dict[int, dict[str, Any]]:
    return {
        step: {"loss": value, **{name: each[step - 1] for name, each in more.items()}} for step, value in enumerate(values, 1)
    }  # fmt: skip


def test_what_is_said_of_two_logs() -> None:
    a, b = losses(2.5, 2.25), losses(2.5, 2.25, tokens_per_s=[100.0, 7.0], time_data_s=[0.1, 0.2])
    assert describe(compare_logs(a, b)).startswith("the same bits (2 logged steps)")
    found = compare_logs(a, losses(2.5, 2.25 * (1 + 3e-8)))
    assert not found.same_bits and describe(found).startswith("diverges at step 2: loss 2.25 and 2.2500001")
    assert describe(compare_logs(losses(math.nan), losses(math.nan))).startswith("the same bits (1 logged step")


@pytest.mark.parametrize(
    ("a", "b", "cause"),
    [
        (losses(3.0, 2.0, 1.5), losses(3.0, 2.0, 1.6), "the order of the data is not restored"),
        (losses(3.0, 2.0, 1.5), losses(3.0, 2.1, 1.6), "it has logged step 2 again, after it had resumed at step 2"),
        (losses(3.0, 2.0, 1.5, 1.2), losses(3.0, 2.0, 1.5, 1.3), "the optimiser's state is not restored"),
        (losses(3.0, 2.0, 1.5, lr=[1, 2, 3]), losses(3.0, 2.0, 1.6, lr=[1, 2, 1]), "the learning-rate schedule"),
    ],
)
def test_the_step_at_which_two_logs_part_tells_what_was_not_restored(
    a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], cause: str
) -> None:
    assert cause in likely_causes(compare_logs(a, b), 2)[0]
    if cause[:3] == "the":
        assert "the order of the data" in likely_causes(compare_logs(a, b, samples_part_at=3), 2)[0]


def test_a_tensor_that_differs_is_named() -> None:
    apart = tuple(TensorDifference(f"optimizer.state.w.{name}") for name in ("exp_avg", "step"))
    found = Comparison(steps=(1,), checkpoint=20, tensors=apart)
    assert describe(found) == (
        "first tensor that differs in the checkpoint of step 20: optimizer.state.w.exp_avg (values), and 1 more"
    )
    assert "optimiser's state" in likely_causes(found, 10)[0]


@pytest.mark.parametrize(
    ("logged", "words", "plan", "attempt", "now", "due"),
    [
        (8, [], PLAN, Attempt(1, started=100.0), 101.0, True),
        (None, [], PLAN, Attempt(1, started=100.0), 219.0, False),  # it is still loading
        (None, [], PLAN, Attempt(1, started=100.0), 220.0, True),
        (None, [], PLAN, Attempt(1, started=100.0, stepping=210.0), 240.0, True),
        (None, ["job.checkpoints='out/step-*'"], PLAN, Attempt(1, started=100.0), 1000.0, False),  # one is to come
    ],
)
def test_a_program_is_interrupted_at_its_step_or_by_the_clock_if_it_shows_none(
    project: Path, logged: int | None, words: list[str], plan: Plan, attempt: Attempt, now: float, due: bool
) -> None:
    overrides = ["cluster=local", "job=command", "job.command='python a.py'", *words]
    run_dir = submitted_run(project, *overrides)
    run = ScratchRun(Way.EARLY_SIGNAL, is_program=True, config=compose(overrides), run_dir=run_dir)
    if logged is not None:
        run.run_dir.metrics_file.write_text(f'{{"step": {logged}, "loss": 1.0}}\n')
    assert is_due(run, plan, attempt, now) is due


@pytest.mark.parametrize("way", [None, *Way])
def test_a_job_of_the_drill_is_small_short_and_reaches_out_of_nothing(way: Way | None) -> None:
    words = ["cluster=h100x8", "cluster.partition=low", "checkpoint.mirror=file:///m", "hooks.on_finish=mail", *TINY]
    config = scratch_config(tiny_config(compose(words), PLAN, {"cluster.partition"}), PLAN, way, Path("/runs/drills/1"))
    validate(config)
    assert (config.cluster.node_range.most, config.cluster.tasks_per_node, config.cluster.gpus_per_node) == (1, 1, 1)
    assert config.cluster.time_limit_min <= 20 and config.train.steps <= 20
    assert config.checkpoint.mirror is None and config.hooks.on_finish is None and config.requeue.blame_threshold == 0
    assert config.cluster.exclusive == (way is Way.PREEMPTION)
    assert config.requeue.starts_in_place == (way in (Way.IN_PLACE, None))


def test_random_states_that_differ_alone_are_no_difference(tmp_path: Path) -> None:
    undisturbed, resumed = ({step: tmp_path / name / str(step) for step in (8, 16)} for name in "ab")
    tensors, state = [TensorDifference("rng.torch")], ["random.python", "rank0: numpy_rng"]
    found = with_checkpoint(LATER, undisturbed, resumed, lambda a, b: (tensors, state))
    assert found.same_bits and found.checkpoint == 16
    tensors.append(TensorDifference("random_projection.weight"))  # no random state
    found = with_checkpoint(LATER, undisturbed, resumed, lambda a, b: (tensors, state))
    assert not found.same_bits and "random_projection.weight" in describe(found)
    assert "random state is not restored" in likely_causes(found, 8)[0]


@pytest.mark.parametrize(
    ("words", "here"),
    [
        (["cluster=local"], {Way.EARLY_SIGNAL, Way.IN_PLACE}),
        (["cluster=a100x4"], {*Way}),
        (["cluster=a100x4", "requeue.in_place=false"], {*Way} - {Way.IN_PLACE}),
        (["cluster=a100x4", "job=command", "job.command=date"], {*Way} - {Way.CRASH, Way.IN_PLACE}),
    ],
)
def test_which_ways_can_be_tried(words: list[str], here: set[Way]) -> None:
    assert {way for way in Way if why_not_here(way, compose(words)) is None} == here


def test_a_secret_of_a_run_stays_a_reference_in_the_runs_of_its_drill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their configs and scripts are written to disk."""
    monkeypatch.setenv("API_KEY", "s3cret")
    run = submitted_run(tmp_path, "cluster=local", "+cluster.env.API_KEY='${oc.env:API_KEY}'")
    written: list[str] = []

    def drilled(config: Config, plan: Plan, *_: Any, **__: Any) -> Drill:
        written.append(freeze(scratch_config(config, plan, Way.REQUEUE, tmp_path)))
        return Drill(plan, tmp_path, None)

    monkeypatch.setattr(verb, "drill", drilled)
    printed("drill", str(run.path), "--json", code=75)
    assert "s3cret" not in written[0] and "API_KEY: ${oc.env:API_KEY}" in written[0]
