"""A scaling test: sizes with their times in, efficiency, bottleneck and plan out; and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.schema import Config
from slurmtrain.errors import UsageError
from slurmtrain.report.scaling import ScalingTest, bars, scaling_test
from slurmtrain.report.scaling_plot import draw
from slurmtrain.report.step_times import StepTimes
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


def test_the_plan_beside_it_has_the_rates_of_the_smallest_size() -> None:
    found = a_test(times(1.0, 0.0), times(1.0, 0.04), times(1.0, 0.60))
    assert found.why_no_plan is None
    assert found.measurements[0].planned_s == pytest.approx(found.measurements[0].times.step_s)
    for each in found.planned:
        assert each is not None
        assert 0.9 < each.total <= 1.0


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


def test_bars_show_the_line() -> None:
    text = bars([("2 nodes", 0.96), ("4 nodes", 0.5), ("8 nodes", float("nan")), ("16 nodes", 1.2)])
    lines = text.splitlines()
    assert [line.count("#") for line in lines] == [48 - 1, 25, 0, 50 - 1]
    assert {line.index("|") for line in lines} == {len("16 nodes ") + 40}


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_it_is_drawn_into_a_file(kind: str, tmp_path: Path) -> None:
    found = a_test(times(1.0, 0.0), times(1.0, 0.04), times(1.0, 0.60))
    draw(found, tmp_path / f"scaling.{kind}")
    drawn = (tmp_path / f"scaling.{kind}").read_bytes()
    assert drawn.startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot draw into"):
        draw(a_test(times(1.0, 0.0), times(1.0, 0.0)), tmp_path / "scaling.pdf")


def test_configs_of_a_weak_test_keep_the_batch_of_each_node() -> None:
    configs: list[Config] = scaling_configs(compose(WORDS), [1, 2, 4], strong=False, steps=30)
    assert [each.train.global_batch_size for each in configs] == [16, 32, 64]
    assert [each.cluster.nodes for each in configs] == [1, 2, 4]
    assert {(each.train.steps, each.train.log_every, each.job.name) for each in configs} == {(30, 3, "train-scale")}
