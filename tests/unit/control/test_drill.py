"""The verdicts of `drill`: what it says of records, of SLURM's facts and of two logs. Pure functions of plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.tensor_difference import TensorDifference
from slurmtrain.choices import RequeueMode
from slurmtrain.cli.drill import exit_code
from slurmtrain.config.compose import compose
from slurmtrain.config.validate import validate
from slurmtrain.control.drill.comparison import Divergence, RunComparison, compare_logs, describe, likely_causes
from slurmtrain.control.drill.evidence import with_checkpoint
from slurmtrain.control.drill.judge import Evidence, Result, judge
from slurmtrain.control.drill.own import (
    OwnEvidence,
    OwnPlan,
    is_due,
    judge_own,
    own_config,
)
from slurmtrain.control.drill.preemptors import Preemptor, preemptors
from slurmtrain.control.drill.ways import TINY, Way, parse_ways, site_config, why_not_here
from slurmtrain.errors import UsageError
from slurmtrain.runs.attempts import Attempt
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.parse_facts import (
    ASSOC_COLUMNS,
    QOS_COLUMNS,
    parse_associations,
    parse_partitions,
    parse_qos,
)

SAME = RunComparison(steps=(1, 2), names=("loss",), checkpoint=2)
TOLD = Attempt(
    1,
    job_id="7",
    nodes=["n0"],
    started=100.0,
    stepping=103.0,
    first_step=0,
    last_step=8,
    committed_step=8,
    cause="SIGTERM",
    cause_time=111.0,
    ended=113.0,
    exit_code=75,
    reason="requeued",
    verdict="restarting",
    sentence="requeued by SLURM or by `scontrol requeue`; SLURM starts it again",
)
BACK = Attempt(
    2,
    job_id="7",
    restart_count=1,
    started=121.0,
    stepping=123.0,
    first_step=8,
    last_step=16,
    verdict="done",
    ended=130.0,
)


def evidence(way: Way = Way.REQUEUE, **changes: Any) -> Evidence:
    """A run that has passed, but for these changes."""
    good = Evidence(
        way,
        attempts=[TOLD, BACK],
        over=True,
        told_at=110.0,
        save_s=0.4,
        time_s=30.0,
        time_of="KillWait",
        comparison=SAME,
    )
    return dataclasses.replace(good, **changes)


def told(**changes: Any) -> Attempt:
    return dataclasses.replace(TOLD, **changes)


def test_a_run_that_comes_back_with_the_same_bits_passes_and_says_how_long_everything_took() -> None:
    found = judge(evidence())
    assert (found.result, found.advice) == (Result.PASSED, None)
    assert (found.told_after_s, found.left_after_s, found.back_after_s) == (1.0, 2.0, 8.0)
    assert (found.saved_step, found.save_s, found.resumed_step, found.same_bits) == (8, 0.4, 8, True)
    assert found.sentence == (
        "left 2.0 s after it was told (KillWait gives 30 s), saved step 8 in 0.4 s, came back after 8 s by SLURM's own "
        "requeue, resumed at step 8, ended with the same bits"
    )


@pytest.mark.parametrize(
    ("first", "second", "who"),
    [
        (told(verdict="requeue"), BACK, "by a requeue of the supervisor"),
        (told(verdict="next"), dataclasses.replace(BACK, job_id="8", restart_count=0), "in the next job, 8"),
        (told(verdict="in-place"), dataclasses.replace(BACK, restart_count=0), "in place, in the same job"),
        (told(job_id=None), dataclasses.replace(BACK, job_id=None, restart_count=0), "by the launcher"),
    ],
)
def test_it_says_who_has_brought_a_run_back(first: Attempt, second: Attempt, who: str) -> None:
    assert judge(evidence(attempts=[first, second])).back_by == who


LOST = told(committed_step=4, exit_code=137, last_sign=112.0)


@pytest.mark.parametrize(
    ("given", "words", "advice"),
    [
        (evidence(cannot="cluster=local has no SLURM"), "cannot be tried here, because cluster=local has no SLURM", ""),
        (evidence(refused="Requested operation is presently disabled"), "SLURM refuses to requeue", "requeue=chain"),
        (evidence(Way.PREEMPTION, attempts=[told(cause=None), BACK]), "without having been told", "GraceTime"),
        (
            evidence(Way.PREEMPTION, attempts=[LOST, BACK], time_s=11.0, time_of="partition low"),
            "killed before it had saved, and partition low gives 11 s; it loses the steps since step 4",
            "GraceTime of partition low",
        ),
        (evidence(attempts=[LOST, BACK]), "killed before it had saved, and KillWait gives 30 s", "KillWait"),
        (
            evidence(attempts=[told(verdict="requeue")], explanation="stopped: SLURM refused", comparison=None),
            "SLURM did not start it again: stopped: SLURM refused",
            "requeue=chain",
        ),
        (
            evidence(attempts=[told(verdict="end")], mode=RequeueMode.OFF, comparison=None),
            "does not come back: requeue.mode=off",
            "requeue=requeue",
        ),
        (
            evidence(
                attempts=[told(verdict="end", sentence="no job is left")], mode=RequeueMode.CHAIN, comparison=None
            ),
            "did not come back: no job is left",
            "chain_length",
        ),
        (evidence(attempts=[TOLD, dataclasses.replace(BACK, first_step=4)]), "resumed at step 4, though step 8", "log"),
        (
            evidence(
                Way.EARLY_SIGNAL, attempts=[told(ended=171.0), BACK], time_s=30.0, time_of="cluster.signal_lead_s"
            ),
            "left 60 s after it was told, and cluster.signal_lead_s=30",
            "cluster.signal_lead_s=90",
        ),
        (evidence(Way.EARLY_SIGNAL, attempts=[told(cause=None, verdict="done")]), "was never told", "scancel --signal"),
        (
            evidence(comparison=RunComparison((1,), ("loss",), Divergence(9, "loss", 2.0, 2.5), 0.2)),
            "other bits: diverges at step 9",
            "data",
        ),
        (evidence(Way.IN_PLACE), "not in place", "requeue.in_place=true"),
        (
            evidence(Way.CRASH, attempts=[told(committed_step=None), BACK]),
            "no checkpoint when",
            "checkpoint.every_steps",
        ),
    ],
)
def test_a_way_that_fails_says_why_and_what_to_set(given: Evidence, words: str, advice: str) -> None:
    found = judge(given)
    assert words in found.sentence
    assert advice in (found.advice or "")
    assert found.result is (Result.NOT_TRIED if given.cannot else Result.FAILED)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            evidence(attempts=[], over=False, explanation="waiting: Priority"),
            "did not begin to train within 30 min (waiting",
        ),
        (evidence(attempts=[TOLD], over=False, comparison=None), "did not start again within 30 min"),
        (evidence(attempts=[TOLD, BACK], over=False, comparison=None), "has not finished within 30 min"),
        (evidence(undisturbed="it has not finished"), "its bits cannot be compared"),
        (evidence(Way.PREEMPTION, attempts=[told(cause=None, verdict="done")]), "SLURM did not preempt it"),
        (
            evidence(unanswered="the controller did not answer", attempts=[told(cause=None, verdict="done")]),
            "it could not be found out whether SLURM does that: the controller did not answer",
        ),
        (
            evidence(unanswered="the controller did not answer", attempts=[told(cause=None, verdict=None)], over=False),
            "it could not be found out",
        ),
    ],
)
def test_what_is_not_known_is_no_failure(given: Evidence, words: str) -> None:
    found = judge(given)
    assert found.result is Result.NOT_TRIED and found.undecided
    assert words in found.sentence


def test_what_cannot_be_tried_here_leaves_nothing_to_look_at() -> None:
    found = judge(evidence(mode=RequeueMode.CHAIN, refused="disabled"))
    assert (found.result, found.undecided) == (Result.NOT_TRIED, False)
    assert "with requeue.mode=chain SLURM does not requeue the job" in found.sentence
    assert not judge(evidence(cannot="cluster=local has no SLURM")).undecided


def test_a_request_that_was_done_although_nobody_said_so_counts() -> None:
    assert judge(evidence(unanswered="the controller did not answer")).result is Result.PASSED
    lost = evidence(unanswered="it did not answer", attempts=[told(cause=None, committed_step=4), BACK])
    assert "killed without having been told" in judge(lost).sentence


def test_every_verdict_can_be_made_of_a_run_that_has_left_next_to_nothing() -> None:
    for way in Way:
        for attempts in ([], [Attempt(1)], [Attempt(1), Attempt(2)], [Attempt(1, verdict="end", ended=1.0)]):
            for over in (False, True):
                found = judge(Evidence(way, attempts=attempts, over=over, explanation="lost"))
                assert found.result is not Result.PASSED
                assert found.sentence


def test_the_exit_code_tells_a_failure_from_a_site_where_nothing_could_be_tried() -> None:
    assert exit_code([Result.PASSED, Result.NOT_TRIED]) == 0
    assert exit_code([Result.PASSED, Result.FAILED]) == 1
    assert exit_code([Result.NOT_TRIED]) == 75


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


def test_who_preempts_a_partition_are_those_above_it_on_its_nodes_the_lowest_first() -> None:
    assert preemptors(facts_of(BY_PARTITION), partition=None) == [
        Preemptor(("--partition=high",), "partition high"),
        Preemptor(("--partition=urgent",), "partition urgent"),
    ]


@pytest.mark.parametrize(
    ("configuration", "partitions", "partition", "words"),
    [
        ({"PreemptType": "preempt/none"}, PARTITIONS, "low", "preempts nothing here"),
        ({}, PARTITIONS, None, "preempts nothing here"),
        (BY_PARTITION, PARTITIONS, "high", "PreemptMode=OFF"),
        (BY_PARTITION, PARTITIONS.replace("PreemptMode=REQUEUE", "PreemptMode=GANG,SUSPEND"), "low", "are suspended"),
        (BY_PARTITION, PARTITIONS.splitlines()[0], "low", "no other partition on its nodes"),
        (BY_PARTITION, PARTITIONS, "nowhere", "does not say how partition nowhere"),
        (BY_PARTITION, PARTITIONS.replace("Default=YES", "Default=NO"), None, "no default partition"),
        (BY_PARTITION, "", "low", "did not say who preempts whom"),
        ({"PreemptType": "preempt/site"}, PARTITIONS, "low", "nothing is known of PreemptType=preempt/site"),
    ],
)
def test_where_nothing_preempts_the_reason_is_told(
    configuration: dict[str, str], partitions: str, partition: str | None, words: str
) -> None:
    found = preemptors(facts_of(configuration, partitions), partition=partition)
    assert isinstance(found, str) and words in found


def test_a_controller_that_says_nothing_is_not_one_that_preempts_nothing() -> None:
    assert preemptors(ClusterFacts(), partition=None) == "SLURM's controller did not say who preempts whom"


def test_a_qos_that_preempts_is_used_only_where_the_person_may() -> None:
    by_qos, qos = {"PreemptType": "preempt/qos"}, ["cheap||requeue", "fast|cheap|cluster", "boss|cheap,fast|cluster"]
    two = facts_of(by_qos, qos=qos, may_use="cheap,fast")
    assert preemptors(two, partition=None, qos="cheap") == [Preemptor(("--qos=fast",), "QOS fast")]
    # In another partition than the default one it has to be where our job is, or it cannot have its node.
    assert preemptors(two, partition="high,low", qos="cheap") == [
        Preemptor(("--partition=high,low", "--qos=fast"), "QOS fast")
    ]
    cheap = facts_of(by_qos, qos=qos, may_use="cheap")
    assert "you may use none of the QOS that preempt cheap: fast, boss" in preemptors(
        cheap, partition=None, qos="cheap"
    )
    assert preemptors(cheap, partition=None) == preemptors(cheap, partition=None, qos="cheap")  # the only one of theirs
    boss = facts_of(by_qos, qos=qos, may_use="boss")
    assert "no QOS preempts QOS boss" in preemptors(boss, partition=None, qos="boss")
    assert "does not show QOS gone" in preemptors(boss, partition=None, qos="gone")
    assert "cluster.qos is not set" in preemptors(facts_of(by_qos, qos=qos), partition=None)


def test_a_qos_that_is_preempted_as_the_cluster_says_may_be_suspended_or_left_alone() -> None:
    qos = ["cheap||cluster", "fast|cheap|cluster"]
    for mode, words in (("GANG,SUSPEND", "of QOS cheap are suspended"), ("OFF", "of QOS cheap are not preempted")):
        facts = facts_of({"PreemptType": "preempt/qos", "PreemptMode": mode}, qos=qos, may_use="cheap,fast")
        assert words in preemptors(facts, partition=None, qos="cheap")


def losses(*values: float, first: int = 1, **more: list[Any]) -> dict[int, dict[str, Any]]:
    return {
        first + index: {"loss": value, **{name: each[index] for name, each in more.items()}}
        for index, value in enumerate(values)
    }


SPEEDS: dict[str, Any] = {"tokens_per_s": [100.0, 7.0], "time_data_s": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("a", "b", "same", "within", "said"),
    [
        (losses(2.5, 2.25), losses(2.5, 2.25, **SPEEDS), True, True, "the same bits (2 logged steps)"),
        (losses(2.5, 2.25), losses(2.5, 2.25 * (1 + 3e-8)), False, True, "equal to 3e-08 relative"),
        (losses(2.5, 2.31), losses(2.5, 2.35), False, False, "diverges at step 2: loss 2.31 and 2.35"),
        (losses(math.nan), losses(math.nan), True, True, "the same bits (1 logged step"),
        (losses(math.nan), losses(2.0), False, False, "diverges at step 1"),
    ],
)
def test_what_is_said_of_two_logs(
    a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], same: bool, within: bool, said: str
) -> None:
    found = compare_logs(a, b)
    assert (found.same_bits, found.within(1e-6)) == (same, within)
    assert describe(found).startswith(said)


@pytest.mark.parametrize(
    ("a", "b", "cause"),
    [
        (losses(3.0, 2.0, 1.5), losses(3.0, 2.0, 1.6), "the order of the data is not restored"),
        (losses(3.0, 2.0, 1.5, 1.2), losses(3.0, 2.0, 1.5, 1.3), "the optimiser's state is not restored"),
        (losses(3.0, 2.0), losses(3.1, 2.0), "they diverge before the stop (after step 2)"),
        (
            losses(3.0, 2.0, 1.5, data_hash=["a", "b", "c"]),
            losses(3.0, 2.0, 1.6, data_hash=["a", "b", "d"]),
            "begins with other samples",
        ),
        (losses(3.0, 2.0, 1.5, lr=[1, 2, 3]), losses(3.0, 2.0, 1.6, lr=[1, 2, 1]), "the learning-rate schedule"),
    ],
)
def test_the_step_at_which_two_logs_part_tells_what_was_not_restored(
    a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], cause: str
) -> None:
    assert cause in likely_causes(compare_logs(a, b), 2)[0]


def test_a_tensor_that_differs_is_named_with_how_much() -> None:
    found = RunComparison(
        steps=(1,),
        names=("loss",),
        checkpoint=20,
        tensors=(TensorDifference("optimizer.state.w.exp_avg", 0.5), TensorDifference("optimizer.state.w.step")),
    )
    assert describe(found) == (
        "first tensor that differs in the checkpoint of step 20: optimizer.state.w.exp_avg (by 5.0e-01 relative), and 1 more"
    )
    assert "optimiser's state" in likely_causes(found, 10)[0]


PLAN = OwnPlan()
LATER = RunComparison(steps=(10, 11), names=("loss",), checkpoint=20)


def test_a_run_of_ones_own_is_judged_by_what_it_has_logged_and_saved() -> None:
    passed = judge_own(OwnEvidence(stopped_at=10, resumed_at=10, comparison=LATER), PLAN)
    assert passed.result is Result.PASSED
    assert passed.sentence.startswith(
        "stopped after step 10 and resumed there: the same bits (2 logged steps, every tensor"
    )
    apart = compare_logs(losses(2.0, 2.31, first=10), losses(2.0, 2.35, first=10))
    failed = judge_own(OwnEvidence(stopped_at=10, resumed_at=10, comparison=apart), PLAN)
    assert (failed.result, failed.sentence) == (
        Result.FAILED,
        "stopped after step 10 and resumed there: diverges at step 11: loss 2.31 and 2.35",
    )
    assert "order of the data" in failed.causes[0]


@pytest.mark.parametrize(
    ("given", "result", "words"),
    [
        (
            OwnEvidence(undisturbed="has not finished (failed: crashed)"),
            Result.NOT_TRIED,
            "the undisturbed run has not finished",
        ),
        (OwnEvidence(finished_first=True), Result.NOT_TRIED, "it had finished before it was told to stop"),
        (OwnEvidence(failed="it was told to stop, and did not begin again"), Result.FAILED, "did not begin again"),
        (OwnEvidence(failed="it could not be told", told=False), Result.NOT_TRIED, "could not be judged"),
        (OwnEvidence(stopped_at=10, resumed_at=0, comparison=LATER), Result.FAILED, "began anew"),
        (
            OwnEvidence(stopped_at=10, resumed_at=10, comparison=RunComparison()),
            Result.NOT_TRIED,
            "nothing could be compared",
        ),
        (OwnEvidence(stopped_at=10, resumed_at=5, comparison=LATER), Result.PASSED, "resumed at step 5"),
        (
            OwnEvidence(stopped_at=20, resumed_at=20, comparison=LATER),
            Result.NOT_TRIED,
            "nothing that came after could be compared, only up to step 20",
        ),
    ],
)
def test_other_endings_of_a_run_of_ones_own(given: OwnEvidence, result: Result, words: str) -> None:
    found = judge_own(given, PLAN)
    assert found.result is result and words in found.sentence


def test_a_program_is_stopped_at_its_step_or_by_the_clock_if_it_shows_none() -> None:
    silent = compose(["job=command", "job.command='python a.py'"])
    saving = compose(["job=command", "job.command='python a.py'", "job.checkpoints='out/step-*'"])
    begun = Attempt(1, started=100.0)
    assert not is_due(9, PLAN, begun, silent, 1000.0) and is_due(10, PLAN, begun, silent, 101.0)
    assert not is_due(0, PLAN, begun, silent, 129.0) and is_due(0, PLAN, begun, silent, 130.0)
    assert not is_due(0, PLAN, begun, saving, 1000.0)  # its first checkpoint is still to come
    assert is_due(0, OwnPlan(stop_after_s=5.0), begun, saving, 105.0)
    assert not is_due(0, PLAN, dataclasses.replace(begun, stepping=160.0), silent, 170.0)  # it took a minute to load


def test_ways_are_named_as_a_person_types_them() -> None:
    assert parse_ways("in-place, crash") == [Way.IN_PLACE, Way.CRASH]
    assert parse_ways(None) == list(Way)
    with pytest.raises(UsageError, match="there is no such way"):
        parse_ways("crashes")


@pytest.mark.parametrize("way", [None, *Way])
def test_a_job_of_the_drill_is_small_short_and_reaches_out_of_nothing(way: Way | None) -> None:
    words = ["cluster=h100x8", "cluster.partition=low", "checkpoint.mirror=file:///m", "hooks.on_finish=mail", *TINY]
    config = site_config(compose(words), way, Path("/runs/drills/1"), given={"cluster.partition"})
    validate(config)
    assert (config.cluster.node_range.most, config.cluster.tasks_per_node, config.cluster.gpus_per_node) == (1, 1, 1)
    assert config.cluster.time_limit_min <= 20 and config.train.steps <= 20
    assert config.checkpoint.mirror is None and config.hooks.on_finish is None and config.requeue.blame_threshold == 0
    assert config.cluster.exclusive == (way is Way.PREEMPTION)
    assert config.requeue.starts_in_place == (way in (Way.IN_PLACE, None))


SAVED = {"undisturbed": (20,), "resumed": (10, 20)}


def test_random_numbers_that_nobody_seeds_or_uses_are_no_failed_resume(tmp_path: Path) -> None:
    undisturbed, resumed = ({step: tmp_path / name / str(step) for step in steps} for name, steps in SAVED.items())
    states = {undisturbed[20]: (1, 7), resumed[10]: (2, 5), resumed[20]: (2, 7)}

    def differences(a: Path, b: Path) -> tuple[list[TensorDifference], list[str]]:
        pairs = zip(("random.python", "random.torch"), states[a], states[b], strict=True)
        return [], [name for name, one, other in pairs if one != other]

    found = with_checkpoint(RunComparison(), 20, undisturbed, resumed, differences, 10)
    assert found.same_bits and "random.python" in describe(found)
    states[resumed[20]] = (3, 7)  # it has drawn from it since, or it was not restored
    found = with_checkpoint(RunComparison(), 20, undisturbed, resumed, differences, 10)
    assert found.state == ("random.python",) and not found.same_bits
    assert "random state is not restored" in likely_causes(found, 10)[0]


def test_the_two_runs_of_ones_own_differ_in_nothing_but_the_stop() -> None:
    config = compose(["experiment=smoke", "train.hooks=[{_target_: mine.Hook}]", "observe.wandb.enabled=true"])
    one, other = (own_config(config, PLAN, Path("/d"), stopped=stopped) for stopped in (False, True))
    assert other.train.hooks[:-1] == one.train.hooks == [{"_target_": "mine.Hook"}]
    assert dataclasses.replace(other, train=one.train, job=one.job) == one
    assert one.train.steps == 20 and one.requeue.mode == RequeueMode.OFF and not one.observe.wandb.enabled


def test_without_slurm_the_ways_that_need_it_are_told_as_such() -> None:
    config = compose(["cluster=local"])
    assert {way: why_not_here(way, config) is None for way in Way} == {
        Way.EARLY_SIGNAL: True,
        Way.REQUEUE: False,
        Way.CRASH: False,
        Way.IN_PLACE: True,
        Way.PREEMPTION: False,
    }
