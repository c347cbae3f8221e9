"""A scaling test: the time of a step as runs have logged it; efficiency, bottleneck and plan; and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.schema import Config
from slurmtrain.report.scaling import ScalingTest, scaling_test
from slurmtrain.report.step_times import RECORDS, StepTimes, read_step_times, step_times
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.sweep.scaling import scaling_configs

WORDS = ["cluster=h100x8", "cluster.nodes=4", "model=llama3_8b", "parallel=hsdp", "parallel.param_dtype=bfloat16"]
WORDS += ["train.global_batch_size=64"]


def times(forward_backward: float, communication: float, data: float = 0.01) -> StepTimes:
    parts = {"data": data, "forward_backward": forward_backward, "communication": communication}
    parts |= {"optimizer": 0.05, "other": 0.0}
    return StepTimes(sum(parts.values()), parts)


def a_test(*found: StepTimes, strong: bool = False, words: list[str] | None = None) -> ScalingTest:
    configs = scaling_configs(compose(words or WORDS), [1, 2, 4][: len(found)], strong=strong, steps=20)
    runs = [(f"run-{number}", config, each) for number, (config, each) in enumerate(zip(configs, found, strict=True))]
    return scaling_test(runs, strong=strong)


def test_a_slow_link_is_named_with_its_axis_at_the_size_where_it_begins() -> None:
    """Weak: 2 nodes lose little, and 4 nodes half a second in the sum over the replicas, one on each node."""
    found = a_test(times(1.0, 0.0), times(1.0, 0.04), times(1.0, 0.60))
    assert [round(each.efficiency, 3) for each in found.doublings] == [round(1.06 / 1.1, 3), round(1.1 / 1.66, 3)]
    assert found.first_below == 1
    named = found.bottlenecks[1]
    assert named is not None
    assert (named.kind, named.axis) == ("communication", "dp_replicate")
    assert found.missing == []


def test_data_that_come_too_slowly_are_named_without_an_axis() -> None:
    (named,) = a_test(times(1.0, 0.0), times(1.0, 0.0, data=0.6)).bottlenecks
    assert named is not None and (named.kind, named.axis) == ("data", None)


def test_the_plan_beside_it_has_the_rates_of_the_smallest_size() -> None:
    found = a_test(times(1.0, 0.0), times(1.0, 0.04), times(1.0, 0.60))
    assert found.why_no_plan is None
    assert found.measurements[0].planned_s == pytest.approx(found.measurements[0].times.step_s)
    assert all(each is not None and 0.9 < each.total <= 1.0 for each in found.planned)


def test_strong_scaling_compares_the_same_batch() -> None:
    found = a_test(times(4.0, 0.0), times(2.0, 0.0), times(1.0, 1.1), strong=True)
    assert {each.config.train.global_batch_size for each in found.measurements} == {64}
    assert found.doublings[0].efficiency > 0.95
    assert not found.doublings[1].worth_it


def test_other_models_are_measured_without_a_plan() -> None:
    words = ["cluster=h100x8", "cluster.nodes=2", "model._target_=my.Model", "train.global_batch_size=32"]
    found = a_test(times(1.0, 0.0), times(1.0, 0.6), words=words)
    assert found.planned == (None,)
    assert found.why_no_plan is not None
    named = found.bottlenecks[0]
    assert named is not None and (named.kind, named.axis) == ("communication", "dp_replicate")


def test_one_size_alone_has_nothing_to_compare() -> None:
    assert a_test(times(1.0, 0.0)).doublings == ()


def test_configs_of_a_weak_test_keep_the_batch_of_each_node() -> None:
    configs: list[Config] = scaling_configs(compose(WORDS), [1, 2, 4], strong=False, steps=30)
    assert [each.train.global_batch_size for each in configs] == [16, 32, 64]
    assert [each.cluster.nodes for each in configs] == [1, 2, 4]
    assert {(each.train.steps, each.train.log_every, each.job.name) for each in configs} == {(30, 3, "train-scale")}


# The time of a step.


def record(step: int, step_time_s: float = 1.0, **parts: float) -> dict[str, Any]:
    return {"step": step, "step_time_s": step_time_s, **{f"time_{name}_s": each for name, each in parts.items()}}


USUAL = {"data": 0.1, "forward_backward": 0.7, "communication": 0.15, "optimizer": 0.05, "other": 0.0}
REST = ["communication", "optimizer", "other"]
LOGGED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a step is the sum of its parts without pauses": (
        [record(step, **USUAL, checkpoint=3.0) for step in range(4)],
        {"step_s": pytest.approx(1.0), "parts": USUAL, "missing": []},
    ),
    "the first half, in which steps allocate and compile, does not count": (
        [record(step, forward_backward=seconds) for step, seconds in enumerate((60.0, 5.0, 1.0, 1.0))],
        {"step_s": 1.0, "records": 2},
    ),
    "without parts it is the mean that was logged last": (
        [{"step": 1, "step_time_s": 9.0}, {"step": 2, "step_time_s": 2.0, "data_wait_s": 0.5}],
        {"step_s": 2.0, "parts": {"data": 0.5}, "missing": ["forward_backward", *REST]},
    ),
    "the slowest rank is the one that was named last": (
        [record(1) | {"slowest_rank": 3, "slowest_rank_ratio": 1.1}, record(2) | {"slowest_rank": 5}, record(3),
         record(4) | {"slowest_rank": 7, "slowest_rank_ratio": 1.5}],
        {"slowest_rank": 7, "slowest_ratio": 1.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOGGED)
def test_the_time_of_a_step(case: str) -> None:
    logged, expected = LOGGED[case]
    found = step_times(logged)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("value", [None, "1", -1.0, math.nan, math.inf, 1e308, [1.0], True, {}])
def test_what_is_no_time_counts_as_missing(value: Any) -> None:
    assert step_times([{"step": 1, "step_time_s": value}]) is None
    found = step_times([record(1) | {"time_forward_backward_s": value, "slowest_rank": value}])
    assert found is not None
    assert (found.step_s, found.slowest_rank) == (1.0, None)
    assert "forward_backward" in found.missing


def test_a_long_run_is_read_from_its_end(tmp_path: Path) -> None:
    """100,000 records, of which the last one is torn."""
    run_dir = RunDir(tmp_path)
    line = '{"step": %d, "step_time_s": 1.0, "time_forward_backward_s": %s}\n'
    lines = [line % (step, 9.0 if step < 99_000 else 0.5) for step in range(100_000)]
    run_dir.metrics_file.write_text("".join(lines) + '{"step": 100000, "time_forw')
    found = read_step_times(run_dir)
    assert found is not None
    assert (found.step_s, found.records) == (0.5, RECORDS)


@pytest.mark.parametrize("text", ["", "\n\n", "no JSON\n", "[]\n3\nnull\n", '{"step": 1}\n'])
def test_a_run_without_steps_has_no_times(text: str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert read_step_times(run_dir) is None
    run_dir.metrics_file.write_text(text)
    assert read_step_times(run_dir) is None
